"""llama.cpp through llama-cpp-python's mtmd: the tower in f16, the decoder in Q4_0 with a vocabulary of bytes."""

from __future__ import annotations

import ctypes
from importlib import import_module
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import numpy as np

from edgeq.tools.lab.peers.for_llama_cpp import finish
from edgeq.tools.lab.peers.pictures import Checkpoint, Seconds, Size

DECODER, TOWER = "decoder.gguf", "tower.gguf"
SPECIAL = ("<|endoftext|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
CONTROL, NORMAL = 3, 1
CONTEXT_BESIDE = 64
"""Positions of the context for what is not the picture."""
PARTS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
}
PARTS |= {"mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
BLOCK = {"norm1": "ln1", "norm2": "ln2", "attn.proj": "attn_out", "mlp.fc1": "ffn_up", "mlp.fc2": "ffn_down"}


def version() -> str:
    import_module("gguf")
    import_module("llama_cpp.mtmd_cpp")
    return str(import_module("llama_cpp").__version__)


def byte_tokens() -> list[str]:
    """A printable character for every byte, as GPT-2's tokenizer has them."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte if byte in kept else next(others)) for byte in range(256)]


def build(checkpoint: Path, folder: Path) -> None:
    weights = Checkpoint(checkpoint)
    _build_tower(weights, folder / TOWER)
    _build_decoder(weights, folder / DECODER)


def _build_tower(weights: Checkpoint, path: Path) -> None:
    about = weights.config["vision_config"]
    writer = import_module("gguf").GGUFWriter(str(path), "clip", use_temp_file=True)
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_string("clip.projector_type", "qwen2vl_merger")
    numbers = {
        "image_size": 560,
        "patch_size": about["patch_size"],
        "embedding_length": about["embed_dim"],
        "feed_forward_length": about["embed_dim"] * about["mlp_ratio"],
        "block_count": about["depth"],
        "projection_dim": about["hidden_size"],
        "attention.head_count": about["num_heads"],
    }
    for key, value in numbers.items():
        writer.add_uint32(f"clip.vision.{key}", value)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-6)
    writer.add_array("clip.vision.image_mean", [0.5] * 3)
    writer.add_array("clip.vision.image_std", [0.5] * 3)

    def add(name: str, values: Any) -> None:
        matrix = values.ndim > 1
        writer.add_tensor(name, np.ascontiguousarray(values, np.float16 if matrix else np.float32))

    def both(name: str, source: str) -> None:
        for kind in ("weight", "bias"):
            add(f"{name}.{kind}", weights[f"{source}.{kind}"])

    pixels = weights["visual.patch_embed.proj.weight"]
    add("v.patch_embd.weight", pixels[:, :, 0])
    add("v.patch_embd.weight.1", pixels[:, :, 1])
    for layer in range(about["depth"]):
        source, name = f"visual.blocks.{layer}", f"v.blk.{layer}"
        for theirs, ours in BLOCK.items():
            both(f"{name}.{ours}", f"{source}.{theirs}")
        for kind in ("weight", "bias"):
            for part, values in zip("qkv", np.split(weights[f"{source}.attn.qkv.{kind}"], 3), strict=True):
                add(f"{name}.attn_{part}.{kind}", values)
    both("v.post_ln", "visual.merger.ln_q")
    both("mm.0", "visual.merger.mlp.0")
    both("mm.2", "visual.merger.mlp.2")
    finish(writer)


def _build_decoder(weights: Checkpoint, path: Path) -> None:
    gguf, about = import_module("gguf"), weights.config
    writer = gguf.GGUFWriter(str(path), "qwen2vl", use_temp_file=True)
    writer.add_context_length(about["max_position_embeddings"])
    writer.add_embedding_length(about["hidden_size"])
    writer.add_block_count(about["num_hidden_layers"])
    writer.add_feed_forward_length(about["intermediate_size"])
    writer.add_head_count(about["num_attention_heads"])
    writer.add_head_count_kv(about["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(about["rms_norm_eps"])
    writer.add_rope_freq_base(about["rope_theta"])
    writer.add_rope_dimension_sections([*about["rope_scaling"]["mrope_section"], 0])
    tokens = [*byte_tokens(), *SPECIAL]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([NORMAL] * 256 + [CONTROL] * len(SPECIAL))
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(256)
    types = gguf.GGMLQuantizationType

    def add(name: str, values: Any, kind: Any) -> None:
        writer.add_tensor(name, gguf.quants.quantize(np.ascontiguousarray(values), kind), raw_dtype=kind)

    for layer in range(about["num_hidden_layers"]):
        source, name = f"model.layers.{layer}", f"blk.{layer}"
        add(f"{name}.attn_norm.weight", weights[f"{source}.input_layernorm.weight"], types.F32)
        add(f"{name}.ffn_norm.weight", weights[f"{source}.post_attention_layernorm.weight"], types.F32)
        for theirs, ours in PARTS.items():
            add(f"{name}.{ours}.weight", weights[f"{source}.{theirs}.weight"], types.Q4_0)
            if ours in ("attn_q", "attn_k", "attn_v"):
                add(f"{name}.{ours}.bias", weights[f"{source}.{theirs}.bias"], types.F32)
    add("output_norm.weight", weights["model.norm.weight"], types.F32)
    add("token_embd.weight", weights["model.embed_tokens.weight"][: len(tokens)], types.Q8_0)
    finish(writer)


def load(folder: Path, threads: int, most_patches: int, isa: str | None) -> LlamaCpp:
    return LlamaCpp(folder, threads, most_patches // 4 + CONTEXT_BESIDE)


class LlamaCpp:
    """A loaded model; see `Viewer`."""

    def __init__(self, folder: Path, threads: int, context: int) -> None:
        self._llama: Any = import_module("llama_cpp")
        self._mtmd: Any = import_module("llama_cpp.mtmd_cpp")
        llama, self._batch = self._llama, context
        llama.llama_backend_init()
        loading = llama.llama_model_default_params()
        # Its buffers for AMX end the process in the first product of Q4_0 (0.3.36, Xeon, Linux 6.18).
        loading.use_extra_bufts = b"AMX_INT8 = 1" not in llama.llama_print_system_info()
        self._model = llama.llama_model_load_from_file(str(folder / DECODER).encode(), loading)
        params = llama.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = context
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn_type = llama.LLAMA_FLASH_ATTN_TYPE_ENABLED
        self._context = self._model and llama.llama_init_from_model(self._model, params)
        seeing = self._mtmd.mtmd_context_params_default()
        seeing.use_gpu, seeing.n_threads, seeing.warmup = False, threads, False
        seeing.flash_attn_type = llama.LLAMA_FLASH_ATTN_TYPE_ENABLED
        self._tower = self._context and self._mtmd.mtmd_init_from_file(str(folder / TOWER).encode(), self._model, seeing)
        if not self._tower:
            raise ValueError("llama.cpp cannot load the model or its tower")
        packed = "layers repacked at load" if loading.use_extra_bufts else "layers not repacked, since that fails with AMX"
        self.settings = f"tower f16, decoder Q4_0, {packed}, flash attention in both, picture in one batch, vocabulary of 261"

    def see(self, size: Size) -> Seconds:
        width, height = size
        pixels = np.random.default_rng(0).integers(0, 256, 3 * width * height, dtype=np.uint8)
        data = pixels.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        bitmap = self._mtmd.mtmd_bitmap_init(width, height, data)
        chunks, marker = self._mtmd.mtmd_input_chunks_init(), self._mtmd.mtmd_default_marker()
        text = self._mtmd.mtmd_input_text(marker, len(marker), False, True)
        bitmaps = (type(bitmap) if isinstance(bitmap, ctypes.c_void_p) else ctypes.c_void_p)(bitmap)
        code = self._mtmd.mtmd_tokenize(self._tower, chunks, ctypes.byref(text), ctypes.pointer(bitmaps), 1)
        if code:
            raise ValueError(f"mtmd_tokenize returned {code}")
        try:
            return self._timed(chunks)
        finally:
            self._mtmd.mtmd_input_chunks_free(chunks)
            self._mtmd.mtmd_bitmap_free(bitmap)

    def _timed(self, chunks: Any) -> Seconds:
        mtmd, llama = self._mtmd, self._llama
        every = [mtmd.mtmd_input_chunks_get(chunks, i) for i in range(mtmd.mtmd_input_chunks_size(chunks))]
        image = next(each for each in every if mtmd.mtmd_input_chunk_get_type(each) == mtmd.MTMD_INPUT_CHUNK_TYPE_IMAGE)
        # The decoder runs as many tokens as the picture has vectors, and one: the same work but for where rows come from.
        count = mtmd.mtmd_input_chunk_get_n_tokens(image) + 1
        tokens = (llama.llama_token * count)(*([0] * count))
        llama.llama_memory_clear(llama.llama_get_memory(self._context), True)
        began, worked = perf_counter(), process_time()
        failed = mtmd.mtmd_encode_chunk(self._tower, image)
        tower, worked = perf_counter() - began, process_time() - worked
        if failed or llama.llama_decode(self._context, llama.llama_batch_get_one(tokens, count)):
            raise ValueError("llama.cpp failed to encode the picture or to decode after it")
        llama.llama_get_logits_ith(self._context, -1)
        return Seconds(tower, worked, perf_counter() - began)
