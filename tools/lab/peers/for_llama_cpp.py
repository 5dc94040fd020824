"""llama.cpp through llama-cpp-python: a GGUF file of Q4_0 blocks (32 weights, an f16 scale), head Q6_K or Q8_0."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeq.format.codec import AnyArray, ArrayU8
from edgeq.format.manifest import fused_shapes
from edgeq.network.config import ModelConfig
from edgeq.tools.lab.peers.peer import Stored, Times, Variant
from edgeq.tools.lab.peers.weights import head_slabs, head_step, matrix, step

VARIANTS = (
    Variant("llama.cpp-q4_0-h6", "llama.cpp", "llama.cpp-q4_0-h6", 32, 6, "flash attention"),
    Variant("llama.cpp-q4_0-h8", "llama.cpp", "llama.cpp-q4_0-h8", 32, 8, "flash attention"),
    Variant("llama.cpp-as-published", "llama.cpp", "llama.cpp-as-published", 0, 0, "flash attention", published=True),
    Variant("llama.cpp-cuda-q4_0-h6", "llama.cpp", "llama.cpp-q4_0-h6", 32, 6, "flash attention", "cuda"),
    Variant("llama.cpp-cuda-q4_0-h8", "llama.cpp", "llama.cpp-q4_0-h8", 32, 8, "flash attention", "cuda"),
)
NAME = "model.gguf"
EVERY_LAYER = 999
PARTS = {"q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output"}
PARTS |= {"gate": "ffn_gate", "up": "ffn_up", "down": "ffn_down"}


def version() -> str:
    import_module("gguf")
    return str(import_module("llama_cpp").__version__)


def q4_0(q: ArrayU8, value: float) -> ArrayU8:
    """[rows, columns] below 16 -> uint8 [rows, bytes]: per 32 weights an f16 scale, then weights i and i + 16 in a byte."""
    blocks = q.reshape(len(q), -1, 2, 16)
    packed = blocks[:, :, 0] | blocks[:, :, 1] << 4
    return _joined(len(q), _scales(packed.shape[:2], value), packed)


def q8_0(q: ArrayU8, value: float) -> ArrayU8:
    """[rows, columns], center 128 -> uint8 [rows, bytes]: per 32 weights an f16 scale, then signed bytes."""
    blocks = (q ^ 128).reshape(len(q), -1, 32)
    return _joined(len(q), _scales(blocks.shape[:2], value), blocks)


def q6_k(q: ArrayU8, value: float) -> ArrayU8:
    """[rows, columns] below 64 -> uint8 [rows, bytes]: per 256 weights the low four bits of all, the high two bits of all,
    sixteen 8-bit scales (all one here) and an f16 scale.
    """
    halves = q.reshape(len(q), -1, 2, 4, 32)  # half of the block, quarter of the half, weight
    low, high = halves & 15, halves >> 4
    four = low[:, :, :, :2] | low[:, :, :, 2:] << 4
    two = high[:, :, :, 0] | high[:, :, :, 1] << 2 | high[:, :, :, 2] << 4 | high[:, :, :, 3] << 6
    blocks = halves.shape[:2]
    ones = np.ones((*blocks, 16), np.uint8)
    return _joined(len(q), four.reshape(*blocks, 128), two.reshape(*blocks, 64), ones, _scales(blocks, value))


def _scales(blocks: tuple[int, ...], value: float) -> ArrayU8:
    return np.full((*blocks, 1), value, np.float16).view(np.uint8)


def _joined(rows: int, *parts: AnyArray) -> ArrayU8:
    return np.ascontiguousarray(np.concatenate(parts, axis=-1).reshape(rows, -1))


def interleaved(q: AnyArray, heads: int) -> AnyArray:
    """Output channels of a head in GGUF's order for Llama: channel i next to i + head_dim / 2, which RoPE rotates together."""
    return q.reshape(heads, 2, -1, q.shape[1]).swapaxes(1, 2).reshape(q.shape)


def new_file(config: ModelConfig, path: Path) -> Any:
    """A GGUFWriter of a Llama without a tokenizer; tensors and the end are still to be written."""
    writer = import_module("gguf").GGUFWriter(str(path), "llama", use_temp_file=True)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    return writer


def finish(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def build(config: ModelConfig, variant: Variant, folder: Path) -> Stored:
    types, pack = import_module("gguf").GGMLQuantizationType, {6: q6_k, 8: q8_0}[variant.head_bits]
    writer = new_file(config, folder / NAME)
    weights = 0
    for name, array, quantized in _tensors(config):
        writer.add_tensor(name, array, raw_dtype=types.Q4_0 if quantized else None)
        weights += array.nbytes
    head = np.concatenate([pack(slab, head_step(variant.head_bits)) for slab in head_slabs(config, variant.head_bits)])
    writer.add_tensor("token_embd.weight", head, raw_dtype={6: types.Q6_K, 8: types.Q8_0}[variant.head_bits])
    finish(writer)
    return Stored(weights, head.nbytes)


def _tensors(config: ModelConfig) -> Iterator[tuple[str, NDArray[Any], bool]]:
    """GGUF name, data, and whether the data is Q4_0 blocks."""
    gain = np.ones(config.hidden_size, np.float32)
    heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads}
    for layer in range(config.num_hidden_layers):
        yield f"blk.{layer}.attn_norm.weight", gain, False
        yield f"blk.{layer}.ffn_norm.weight", gain, False
        for _, parts in fused_shapes(config, layer):
            for name, (rows, columns) in parts.items():
                part = name.rpartition(".")[2]
                q = matrix(name, rows, columns)
                q = interleaved(q, heads[part]) if part in heads else q
                yield f"blk.{layer}.{PARTS[part]}.weight", q4_0(q, step(columns)), True
    yield "output_norm.weight", gain, False


def take(model: Path, folder: Path) -> Stored:
    (folder / NAME).symlink_to(model)
    size = {tensor.name: int(tensor.n_bytes) for tensor in import_module("gguf").GGUFReader(str(model)).tensors}
    head = size.get("output.weight", size["token_embd.weight"])
    return Stored(sum(n for name, n in size.items() if name.startswith("blk.")), head)


def load(config: ModelConfig, variant: Variant, folder: Path, threads: int, context: int) -> LlamaCpp:
    return LlamaCpp(folder / NAME, config.vocab_size, threads, context, variant.target == "cuda")


class LlamaCpp:
    """A model through the C interface, without the Python class over it, which copies more; see `Runner`."""

    def __init__(self, path: Path, vocab_size: int, threads: int, context: int, on_gpu: bool) -> None:
        self._llama: Any = import_module("llama_cpp")
        self._vocab_size = vocab_size
        self._llama.llama_backend_init()
        if on_gpu and not self._llama.llama_supports_gpu_offload():
            raise ValueError("this build of llama.cpp has no GPU; build llama-cpp-python with CMAKE_ARGS=-DGGML_CUDA=on")
        wanted = self._llama.llama_model_default_params()
        wanted.n_gpu_layers = EVERY_LAYER if on_gpu else 0
        self._model = self._llama.llama_model_load_from_file(str(path).encode(), wanted)
        if not self._model:
            raise ValueError(f"llama.cpp cannot load {path}")
        params = self._llama.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = context
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn_type = self._llama.LLAMA_FLASH_ATTN_TYPE_ENABLED
        self._context = self._llama.llama_init_from_model(self._model, params)
        if not self._context:
            raise ValueError("llama.cpp cannot make a context")
        features = " ".join(re.findall(r"(\w+) = 1", self._llama.llama_print_system_info().decode()))
        where = "all layers on the GPU" if on_gpu else "mmap, layers repacked at load"
        self.settings = f"{where}, flash attention, f16 cache, prompt in one batch; built with {features}"

    def _draw(self, tokens: Sequence[int]) -> int:
        array = (self._llama.llama_token * len(tokens))(*tokens)
        result = self._llama.llama_decode(self._context, self._llama.llama_batch_get_one(array, len(tokens)))
        if result:
            raise ValueError(f"llama_decode returned {result}")
        logits = ctypes.cast(self._llama.llama_get_logits_ith(self._context, -1), ctypes.POINTER(ctypes.c_float))
        return int(np.ctypeslib.as_array(logits, (self._vocab_size,)).argmax())

    def run(self, prompt: Sequence[int], steps: int) -> Times:
        self._llama.llama_memory_clear(self._llama.llama_get_memory(self._context), True)
        began = perf_counter()
        tokens = [self._draw(prompt)]
        first = perf_counter()
        for _ in range(steps):
            tokens.append(self._draw(tokens[-1:]))
        return Times(first - began, perf_counter() - first, tokens)
