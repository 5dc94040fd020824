"""onnxruntime-genai: the graph that its model builder makes for a CPU, written without it.

MatMulNBits with 8-bit arithmetic (accuracy_level 4), q, k and v in one product, GroupQueryAttention with its own rotation, the
embedding looked up in the quantized head, logits of the last position only.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Any, BinaryIO

import numpy as np

from edgeq.format.manifest import fused_shapes
from edgeq.network.config import ModelConfig
from edgeq.tools.lab.peers.peer import Stored, Times, Variant
from edgeq.tools.lab.peers.weights import BITS, head_slabs, head_step, matrix, pack_nibbles, step


def _variant(block: int, head: int) -> Variant:
    name = f"onnxruntime-b{block}-h{head}"
    return Variant(name, "onnxruntime-genai", name, block, head, "accuracy level 4")


VARIANTS = (_variant(128, 4), _variant(32, 4), _variant(128, 8))
POSITIONS = 16384
CONTRIB = "com.microsoft"
SKIP = "SkipSimplifiedLayerNormalization"
DATA = "model.onnx.data"


def version() -> str:
    import_module("onnx")
    return str(import_module("onnxruntime_genai").__version__)


class GraphFile:
    """Nodes and initializers; the data of initializers goes at once to a file next to the graph and is mapped from there."""

    def __init__(self, data: BinaryIO) -> None:
        self.onnx = import_module("onnx")
        self._data = data
        self.nodes: list[Any] = []
        self.initializers: list[Any] = []

    def node(self, kind: str, inputs: Sequence[str], *outputs: str, domain: str = "", **attributes: Any) -> str:
        """Add a node; the name of its first output."""
        made = self.onnx.helper.make_node(kind, inputs, outputs, name=f"node_{outputs[0]}", domain=domain, **attributes)
        self.nodes.append(made)
        return outputs[0]

    def constant(self, name: str, array: Any) -> str:
        """Add a small initializer to the graph itself; its name."""
        self.initializers.append(self.onnx.numpy_helper.from_array(np.asarray(array), name))
        return name

    def external(self, dtype: str, chunks: Iterable[Any], shapes: Mapping[str, Sequence[int]]) -> int:
        """Write data once for one or several initializers, each with its own shape; bytes written."""
        self._data.write(bytes(-self._data.tell() % 4096))
        start = self._data.tell()
        for chunk in chunks:
            self._data.write(np.ascontiguousarray(chunk).data)
        length = self._data.tell() - start
        for name, shape in shapes.items():
            tensor = self.onnx.TensorProto(name=name, data_type=getattr(self.onnx.TensorProto, dtype), dims=shape)
            tensor.data_location = self.onnx.TensorProto.EXTERNAL
            for key, value in (("location", DATA), ("offset", start), ("length", length)):
                tensor.external_data.add(key=key, value=str(value))
            self.initializers.append(tensor)
        return length

    def product(self, name: str, x: str, rows: int, *, columns: int, block: int, bits: int, out: str) -> str:
        """x times the weights `name`, which `external` wrote."""
        shape = {"K": columns, "N": rows, "block_size": block, "bits": bits, "accuracy_level": 4}
        return self.node("MatMulNBits", [x, f"{name}.q", f"{name}.scale"], out, domain=CONTRIB, **shape)

    def linear(self, x: str, parts: dict[str, tuple[int, int]], block: int) -> tuple[str, int]:
        """x times the random weights of the layers `parts`, stacked; the output and bytes stored."""
        columns, rows = next(iter(parts.values()))[1], sum(count for count, _ in parts.values())
        name = "+".join(parts)
        packed = (pack_nibbles(matrix(part, count, columns)) for part, (count, _) in parts.items())
        size = self.external("UINT8", packed, {f"{name}.q": (rows, columns // block, block // 2)})
        scale = np.full(rows * columns // block, step(columns), np.float32)
        size += self.external("FLOAT", [scale], {f"{name}.scale": scale.shape})
        return self.product(name, x, rows, columns=columns, block=block, bits=BITS, out=f"{name}.y"), size


def build(config: ModelConfig, variant: Variant, folder: Path) -> Stored:
    with open(folder / DATA, "wb") as data:
        graph = GraphFile(data)
        head = _embedding(graph, config, variant)
        _positions(graph, config)
        weights = _layers(graph, config, variant.group)
        _head(graph, config, variant)
    onnx = graph.onnx
    made = onnx.helper.make_graph(graph.nodes, "llama", *_values(onnx, config), graph.initializers)
    opsets = [onnx.helper.make_opsetid("", 21), onnx.helper.make_opsetid(CONTRIB, 1)]
    onnx.save(onnx.helper.make_model(made, opset_imports=opsets, ir_version=10), str(folder / "model.onnx"))
    return Stored(weights, head)


def _values(onnx: Any, config: ModelConfig) -> tuple[list[Any], list[Any]]:
    """Inputs and outputs of the graph."""
    value, kinds = onnx.helper.make_tensor_value_info, onnx.TensorProto
    inputs = [value("input_ids", kinds.INT64, ["batch", "rows"]), value("attention_mask", kinds.INT64, ["batch", "total"])]
    outputs = [value("logits", kinds.FLOAT, ["batch", 1, config.vocab_size])]
    for layer in range(config.num_hidden_layers):
        for what in ("key", "value"):
            heads, size = config.num_key_value_heads, config.head_dim
            inputs.append(value(f"past_key_values.{layer}.{what}", kinds.FLOAT, ["batch", heads, "past", size]))
            outputs.append(value(f"present.{layer}.{what}", kinds.FLOAT, ["batch", heads, "total", size]))
    return inputs, outputs


def _embedding(graph: GraphFile, config: ModelConfig, variant: Variant) -> int:
    """Look up rows of the quantized head: the same bytes in two shapes, as the two operators need them.  Bytes of the head."""
    rows, columns, bits, block = config.vocab_size, config.hidden_size, variant.head_bits, variant.group
    blocks = columns // block
    packed = (slab if bits == 8 else pack_nibbles(slab) for slab in head_slabs(config, bits))
    shapes = {"head.q": (rows, blocks, block * bits // 8), "table.q": (rows, columns * bits // 8)}
    size = graph.external("UINT8", packed, shapes)
    scale = np.full(rows * blocks, head_step(bits), np.float32)
    size += graph.external("FLOAT", [scale], {"head.scale": scale.shape, "table.scale": (rows, blocks)})
    settings = {"bits": bits, "block_size": block, "gather_axis": 0, "quantize_axis": 1}
    graph.node("GatherBlockQuantized", ["table.q", "input_ids", "table.scale"], "x", domain=CONTRIB, **settings)
    return size


def _positions(graph: GraphFile, config: ModelConfig) -> None:
    """Add the lengths for attention, from the mask, and its tables of rotations."""
    lengths = graph.node("ReduceSum", ["attention_mask", graph.constant("axis_1", np.array([1]))], "lengths", keepdims=0)
    last = graph.node("Sub", [lengths, graph.constant("one", np.array(1))], "last_positions")
    graph.node("Cast", [last], "seqlens_k", to=graph.onnx.TensorProto.INT32)
    shape = graph.node("Shape", ["attention_mask"], "mask_shape")
    total = graph.node("Gather", [shape, graph.constant("index_1", np.array(1))], "mask_total")
    graph.node("Cast", [total], "total_length", to=graph.onnx.TensorProto.INT32)
    frequencies = config.rope.theta ** (-np.arange(0, config.head_dim, 2) / config.head_dim)
    angles = np.outer(np.arange(POSITIONS), frequencies)
    graph.constant("cos", np.cos(angles).astype(np.float32))
    graph.constant("sin", np.sin(angles).astype(np.float32))


def _layers(graph: GraphFile, config: ModelConfig, block: int) -> int:
    """Add the decoder layers, from "x" to the normed output of the last; bytes of the weights."""
    gain = graph.constant("gain", np.ones(config.hidden_size, np.float32))
    epsilon = config.rms_norm_eps
    normed = graph.node("SimplifiedLayerNormalization", ["x", gain], "x.normed", epsilon=epsilon, axis=-1)
    residual, weights = "x", 0
    attention = {"num_heads": config.num_attention_heads, "kv_num_heads": config.num_key_value_heads, "do_rotary": 1}
    for layer in range(config.num_hidden_layers):
        (_, qkv), (_, o), (_, gate_up), (_, down) = fused_shapes(config, layer)
        p, (gate, up) = f"layers.{layer}.", gate_up.items()
        packed, sizes = graph.linear(normed, qkv, block)
        past = [f"past_key_values.{layer}.key", f"past_key_values.{layer}.value"]
        inputs = [packed, "", "", *past, "seqlens_k", "total_length", "cos", "sin"]
        present = [f"present.{layer}.key", f"present.{layer}.value"]
        graph.node("GroupQueryAttention", inputs, f"{p}attended", *present, domain=CONTRIB, **attention)
        y, size_o = graph.linear(f"{p}attended", o, block)
        residual_mlp = f"{p}residual_mlp"
        normed = graph.node(SKIP, [residual, y, gain], f"{p}normed_mlp", "", "", residual_mlp, domain=CONTRIB, epsilon=epsilon)
        gates, size_gate = graph.linear(normed, dict([gate]), block)
        ups, size_up = graph.linear(normed, dict([up]), block)
        silu = graph.node("Mul", [gates, graph.node("Sigmoid", [gates], f"{p}sigmoid")], f"{p}silu")
        y, size_down = graph.linear(graph.node("Mul", [silu, ups], f"{p}inner"), down, block)
        residual = f"{p}residual"
        normed = graph.node(SKIP, [residual_mlp, y, gain], f"{p}normed", "", "", residual, domain=CONTRIB, epsilon=epsilon)
        weights += sizes + size_o + size_gate + size_up + size_down
    return weights


def _head(graph: GraphFile, config: ModelConfig, variant: Variant) -> None:
    """Add the logits of the last position."""
    normed = f"layers.{config.num_hidden_layers - 1}.normed"
    last = graph.node("Gather", [normed, graph.constant("index_last", np.array([-1]))], "last", axis=1)
    rows, columns = config.vocab_size, config.hidden_size
    graph.product("head", last, rows, columns=columns, block=variant.group, bits=variant.head_bits, out="logits")


def settings(config: ModelConfig, threads: int, context: int) -> dict[str, Any]:
    """genai_config.json."""
    names = {"past_key_names": "past_key_values.%d.key", "past_value_names": "past_key_values.%d.value"}
    present = {"present_key_names": "present.%d.key", "present_value_names": "present.%d.value"}
    decoder = {
        "session_options": {"intra_op_num_threads": threads, "provider_options": []},
        "filename": "model.onnx",
        "head_size": config.head_dim,
        "hidden_size": config.hidden_size,
        "inputs": {"input_ids": "input_ids", "attention_mask": "attention_mask", **names},
        "outputs": {"logits": "logits", **present},
        "num_attention_heads": config.num_attention_heads,
        "num_hidden_layers": config.num_hidden_layers,
        "num_key_value_heads": config.num_key_value_heads,
    }
    ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1, "vocab_size": config.vocab_size}
    # min_length keeps a drawn end-of-text from ending the measurement.
    search = {"do_sample": False, "max_length": context, "min_length": context, "past_present_share_buffer": True}
    return {"model": {"type": "llama", "context_length": POSITIONS, "decoder": decoder, **ids}, "search": search}


def load(config: ModelConfig, variant: Variant, folder: Path, threads: int, context: int) -> OnnxRuntime:
    (folder / "genai_config.json").write_text(json.dumps(settings(config, threads, context)), encoding="utf-8")
    return OnnxRuntime(folder, context)


class OnnxRuntime:
    """A loaded model; see `Runner`."""

    def __init__(self, folder: Path, context: int) -> None:
        self._genai = import_module("onnxruntime_genai")
        self._model = self._genai.Model(str(folder))
        self._context = context
        self.settings = "accuracy level 4 (8-bit activations), weights packed again at load, shared f32 cache buffer"

    def run(self, prompt: Sequence[int], steps: int) -> Times:
        params = self._genai.GeneratorParams(self._model)
        params.set_search_options(max_length=self._context, min_length=self._context, do_sample=False)
        generator = self._genai.Generator(self._model, params)
        began = perf_counter()
        generator.append_tokens(np.asarray(prompt, np.int32))
        generator.generate_next_token()
        first = perf_counter()
        for _ in range(steps):
            generator.generate_next_token()
        ended = perf_counter()
        return Times(first - began, ended - first, [int(token) for token in generator.get_sequence(0)[len(prompt) :]])
