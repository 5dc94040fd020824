"""OpenVINO GenAI: a stateful graph as optimum exports it, with 4-bit weights and an 8-bit head as NNCF compresses it.

Weights are i4 with an f16 scale per group; head and embedding are one u8 table, with an f16 scale and a zero point per output
channel.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from edgeq.format.codec import AnyArray
from edgeq.format.manifest import fused_shapes
from edgeq.network.config import ModelConfig
from edgeq.tools.lab.peers.peer import Stored, Times, Variant
from edgeq.tools.lab.peers.weights import head_slabs, head_step, matrix, pack_nibbles, step

BACKENDS = {"paged": "PA", "stateful": "SDPA"}


def _variant(group: int, backend: str) -> Variant:
    return Variant(f"openvino-g{group}-h8-{backend}", "openvino-genai", f"openvino-g{group}-h8", group, 8, backend)


VARIANTS = (_variant(128, "paged"), _variant(128, "stateful"))


def version() -> str:
    return str(import_module("openvino_genai").__version__)


def build(config: ModelConfig, variant: Variant, folder: Path) -> Stored:
    graph = Graph(config, variant.group)
    ov = import_module("openvino")
    ov.save_model(graph.model(), str(folder / "openvino_model.xml"), compress_to_fp16=False)
    return Stored(graph.weights, graph.head)


class Graph:
    """The decoder in OpenVINO's operations; `weights` and `head` count the bytes that are stored."""

    def __init__(self, config: ModelConfig, group: int) -> None:
        self._ov = import_module("openvino")
        self._op = import_module("openvino.opset13")
        self._config, self._group = config, group
        self._kept: list[AnyArray] = []
        self.weights = self.head = 0

    def model(self) -> Any:
        op, c = self._op, self._config
        ids, mask, positions = (self._parameter(n, np.int64, 2) for n in ("input_ids", "attention_mask", "position_ids"))
        beams = self._parameter("beam_idx", np.int32, 1)
        table = self._table()
        x = op.gather(table, ids, np.int64(0))
        rotation, visible = self._rotation(positions), self._visible(mask, positions)
        sinks: list[Any] = []
        for layer in range(c.num_hidden_layers):
            x = self._layer(layer, x, rotation, visible, beams, sinks)
        logits = op.result(op.matmul(self._norm(x), table, False, True))
        logits.output(0).get_tensor().set_names({"logits"})
        return self._ov.Model([logits], sinks, [ids, mask, positions, beams], "llama")

    def _parameter(self, name: str, dtype: Any, rank: int) -> Any:
        made = self._op.parameter([-1] * rank, dtype)
        made.set_friendly_name(name)
        made.output(0).get_tensor().set_names({name})
        return made

    def _layer(self, layer: int, x: Any, rotation: tuple[Any, Any], visible: Any, beams: Any, sinks: list[Any]) -> Any:
        op, c = self._op, self._config
        (_, qkv), (_, o), (_, gate_up), (_, down) = fused_shapes(c, layer)
        normed = self._norm(x)
        q, k, v = (self._heads(self._linear(normed, name, *shape)) for name, shape in qkv.items())
        q, k = self._rotate(q, *rotation), self._rotate(k, *rotation)
        k = self._repeated(self._cached(f"past_key_values.{layer}.keypresent.{layer}.key", k, beams, sinks))
        v = self._repeated(self._cached(f"past_key_values.{layer}.valuepresent.{layer}.value", v, beams, sinks))
        attended = op.scaled_dot_product_attention(q, k, v, visible, np.float32(c.head_dim**-0.5))
        merged = op.reshape(op.transpose(attended, [0, 2, 1, 3]), [0, 0, c.query_size], True)
        x = op.add(x, self._linear(merged, *self._only(o)))
        normed = self._norm(x)
        gate, up = (self._linear(normed, name, *shape) for name, shape in gate_up.items())
        return op.add(x, self._linear(op.multiply(op.swish(gate), up), *self._only(down)))

    @staticmethod
    def _only(parts: dict[str, tuple[int, int]]) -> tuple[str, int, int]:
        ((name, (rows, columns)),) = parts.items()
        return name, rows, columns

    def _packed(self, array: AnyArray, shape: Sequence[int], kind: Any) -> Any:
        # OpenVINO reads the array when the graph is saved, and keeps no reference to it.
        self._kept.append(np.ascontiguousarray(array))
        return self._op.constant(self._ov.Tensor(self._kept[-1], self._ov.Shape(shape), kind))

    def _linear(self, x: Any, name: str, rows: int, columns: int) -> Any:
        op, groups = self._op, columns // self._group
        # Two's complement: the integer minus 8.
        q = pack_nibbles((matrix(name, rows, columns) - 8) & 15)
        scale = np.full((rows, groups, 1), step(columns), np.float16)
        self.weights += q.nbytes + scale.nbytes
        weight = op.convert(self._packed(q, (rows, groups, self._group), self._ov.Type.i4), np.float16)
        weight = op.reshape(op.multiply(weight, op.constant(scale)), np.array([rows, columns], np.int64), False)
        return op.matmul(x, op.convert(weight, np.float32), False, True)

    def _table(self) -> Any:
        """Head and embedding: float32 [vocab, hidden], a scale per output channel times u8 minus 128."""
        op, c = self._op, self._config
        q = np.concatenate(list(head_slabs(c, 8)))
        scale = np.full((c.vocab_size, 1), head_step(8), np.float16)
        zero = np.full((c.vocab_size, 1), 128, np.uint8)
        self.head = q.nbytes + scale.nbytes + zero.nbytes
        centered = op.subtract(op.convert(op.constant(q), np.float16), op.convert(op.constant(zero), np.float16))
        return op.convert(op.multiply(centered, op.constant(scale)), np.float32)

    def _norm(self, x: Any) -> Any:
        op, c = self._op, self._config
        mean = op.reduce_mean(op.power(x, np.float32(2)), np.array([-1]), True)
        scaled = op.multiply(x, op.divide(np.float32(1), op.sqrt(op.add(mean, np.float32(c.rms_norm_eps)))))
        return op.multiply(op.constant(np.ones((1, 1, c.hidden_size), np.float32)), scaled)

    def _heads(self, x: Any) -> Any:
        """[batch, rows, heads * head_dim] -> [batch, heads, rows, head_dim]."""
        shape = np.array([0, 0, -1, self._config.head_dim], np.int64)
        return self._op.transpose(self._op.reshape(x, shape, True), np.array([0, 2, 1, 3]))

    def _rotation(self, positions: Any) -> tuple[Any, Any]:
        """cos and sin, [batch, 1, rows, head_dim]."""
        op, c = self._op, self._config
        frequencies = (c.rope.theta ** (-np.arange(0, c.head_dim, 2) / c.head_dim)).astype(np.float32)
        columns = op.convert(op.unsqueeze(positions, np.array(1)), np.float32)
        batch = op.gather(op.shape_of(positions), np.array([0]), np.array(0))
        shape = op.concat([batch, op.constant(np.array([c.head_dim // 2, 1]))], 0)
        angles = op.matmul(op.broadcast(op.constant(frequencies.reshape(1, -1, 1)), shape), columns, False, False)
        angles = op.transpose(angles, np.array([0, 2, 1]))
        both = op.concat([angles, angles], -1)
        return op.unsqueeze(op.cos(both), np.array(1)), op.unsqueeze(op.sin(both), np.array(1))

    def _rotate(self, x: Any, cos: Any, sin: Any) -> Any:
        op, half = self._op, self._config.head_dim // 2
        one, axis, end = np.array([1]), np.array([3]), np.array([np.iinfo(np.int64).max])
        first = op.slice(x, np.array([0]), np.array([half]), one, axis)
        second = op.slice(x, np.array([half]), end, one, axis)
        halves = op.concat([op.multiply(second, np.float32(-1)), first], -1)
        return op.add(op.multiply(x, cos), op.multiply(halves, sin))

    def _cached(self, name: str, x: Any, beams: Any, sinks: list[Any]) -> Any:
        """The cache with the rows of x appended; it is a variable of the graph."""
        op, c = self._op, self._config
        batch = op.gather(op.shape_of(x), np.array([0]), np.array(0))
        shape = op.concat([batch, op.constant(np.array([c.num_key_value_heads, 0, c.head_dim]))], 0)
        unknown = self._ov.PartialShape([-1, c.num_key_value_heads, -1, c.head_dim])
        past = op.read_value(op.broadcast(op.constant(np.float32(0)), shape), name, np.float32, unknown)
        grown = op.concat([op.gather(past, beams, np.array(0)), x], 2)
        sinks.append(op.assign(grown, name))
        return grown

    def _repeated(self, x: Any) -> Any:
        """Key or value heads, each repeated for the query heads that share it."""
        op, c = self._op, self._config
        times = c.num_attention_heads // c.num_key_value_heads
        if times == 1:
            return x
        shape = op.shape_of(x)
        front, back = (op.gather(shape, np.array(axes), np.array(0)) for axes in ([0, 1], [2, 3]))
        wide = op.concat([front, op.constant(np.array([times])), back], 0)
        wider = op.broadcast(op.unsqueeze(x, np.array(2)), wide, "BIDIRECTIONAL")
        return op.reshape(wider, np.array([0, c.num_attention_heads, -1, c.head_dim]), True)

    def _visible(self, mask: Any, positions: Any) -> Any:
        """The attention mask that is added to scores, [batch, 1, rows, total]: 0 up to the position of the row, else -65504."""
        op = self._op
        total = op.gather(op.shape_of(mask), np.array(1), np.array(0))
        columns = op.range(op.constant(np.int64(0)), total, op.constant(np.int64(1)), "i64")
        rows = op.unsqueeze(op.unsqueeze(positions, np.array(1)), np.array(3))
        return op.select(op.less_equal(columns, rows), np.float32(0), np.float32(-65504))


def load(config: ModelConfig, variant: Variant, folder: Path, threads: int, context: int) -> OpenVino:
    return OpenVino(folder, BACKENDS[variant.mode], variant.group, threads)


class OpenVino:
    """A loaded model; see `Runner`."""

    def __init__(self, folder: Path, backend: str, group: int, threads: int) -> None:
        self._genai, self._ov = import_module("openvino_genai"), import_module("openvino")
        properties: dict[str, Any] = {"PERFORMANCE_HINT": "LATENCY", "NUM_STREAMS": 1, "INFERENCE_NUM_THREADS": threads}
        # Scales of the activations for as many channels as those of the weights: faster than its default of 32.
        properties["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = group
        self._pipeline = self._genai.LLMPipeline(str(folder), "CPU", ATTENTION_BACKEND=backend, **properties)
        self.settings = f"{backend} attention, latency hint, one stream, 8-bit activations in groups of {group}, 8-bit cache"

    def run(self, prompt: Sequence[int], steps: int) -> Times:
        config = self._genai.GenerationConfig(max_new_tokens=steps + 1, ignore_eos=True, eos_token_id=1)
        ids = np.asarray([prompt], np.int64)
        inputs = self._genai.TokenizedInputs(self._ov.Tensor(ids), self._ov.Tensor(np.ones_like(ids)))
        results = self._pipeline.generate(inputs, config)
        raw = results.perf_metrics.raw_metrics
        times = raw.m_new_token_times
        return Times(raw.m_times_to_first_token[0] / 1e6, (times[-1] - times[0]) / 1e3, list(results.tokens[0]))
