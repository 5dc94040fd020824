"""Make a checkpoint of a published shape with random weights: a Llama, or a Qwen2-VL with its vision tower.

    python -m edgeq.tools.lab.make_checkpoint OUT --shape NAME

For measuring conversion and speed without downloading anything.  The weights are bf16 and written one slab at a time, so that
memory does not grow with the model; the tokenizer is a byte-level BPE of the right size with invented merges.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from edgeq.errors import InputError
from edgeq.format.codec import to_bf16
from edgeq.tools.cli.entry import Command
from edgeq.tools.cli.terminal import note, progress

SPECIAL = ("<|begin|>", "<|end|>")
SLAB = 1 << 22
"""Weights in memory at a time."""


VISION_SPECIAL = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")
"""The last tokens of a vocabulary with pictures."""
PATCH, FRAMES, MERGE = 14, 2, 2


@dataclass(frozen=True)
class Tower:
    """Sizes of a vision tower: width, that of its feed-forward part, layers and heads."""

    width: int
    inner: int
    layers: int
    heads: int


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama; `tied`: the head is the embedding.  With `tower` those of a Qwen2-VL."""

    vocab: int
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    tied: bool
    tower: Tower | None = None


QWEN2_VL_TOWER = Tower(1280, 5120, 32, 16)
SHAPES = {
    "tiny": Shape(2048, 256, 768, 2, 8, 4, 32, True),
    "smollm-135m": Shape(49152, 576, 1536, 30, 9, 3, 64, True),
    "llama-3.2-1b": Shape(128256, 2048, 8192, 16, 32, 8, 64, True),
    "llama-3.2-3b": Shape(128256, 3072, 8192, 28, 24, 8, 128, True),
    "llama-3.1-8b": Shape(128256, 4096, 14336, 32, 32, 8, 128, False),
    "qwen2-vl-2b": Shape(151936, 1536, 8960, 28, 12, 2, 128, True, QWEN2_VL_TOWER),
    "qwen2-vl-tiny": Shape(2048, 256, 768, 2, 4, 2, 64, True, Tower(160, 640, 2, 2)),
}
ROPE = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def tensors(s: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every weight, in execution order."""
    query, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
    yield "model.embed_tokens.weight", (s.vocab, s.hidden)
    for i in range(s.layers):
        p = f"model.layers.{i}."
        yield f"{p}input_layernorm.weight", (s.hidden,)
        yield f"{p}self_attn.q_proj.weight", (query, s.hidden)
        yield f"{p}self_attn.k_proj.weight", (kv, s.hidden)
        yield f"{p}self_attn.v_proj.weight", (kv, s.hidden)
        if s.tower:
            yield f"{p}self_attn.q_proj.bias", (query,)
            yield f"{p}self_attn.k_proj.bias", (kv,)
            yield f"{p}self_attn.v_proj.bias", (kv,)
        yield f"{p}self_attn.o_proj.weight", (s.hidden, query)
        yield f"{p}post_attention_layernorm.weight", (s.hidden,)
        yield f"{p}mlp.gate_proj.weight", (s.inner, s.hidden)
        yield f"{p}mlp.up_proj.weight", (s.inner, s.hidden)
        yield f"{p}mlp.down_proj.weight", (s.hidden, s.inner)
    yield "model.norm.weight", (s.hidden,)
    if not s.tied:
        yield "lm_head.weight", (s.vocab, s.hidden)
    if s.tower:
        yield from tower_tensors(s.tower, s.hidden)


def tower_tensors(t: Tower, features: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Those of the vision tower and its projector."""

    def linear(name: str, rows: int, columns: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{name}.weight", (rows, columns)
        yield f"{name}.bias", (rows,)

    yield "visual.patch_embed.proj.weight", (t.width, 3, FRAMES, PATCH, PATCH)
    for i in range(t.layers):
        p = f"visual.blocks.{i}."
        for name in ("norm1", "norm2"):
            yield f"{p}{name}.weight", (t.width,)
            yield f"{p}{name}.bias", (t.width,)
        yield from linear(f"{p}attn.qkv", 3 * t.width, t.width)
        yield from linear(f"{p}attn.proj", t.width, t.width)
        yield from linear(f"{p}mlp.fc1", t.inner, t.width)
        yield from linear(f"{p}mlp.fc2", t.width, t.inner)
    yield "visual.merger.ln_q.weight", (t.width,)
    yield "visual.merger.ln_q.bias", (t.width,)
    joined = MERGE**2 * t.width
    yield from linear("visual.merger.mlp.0", joined, joined)
    yield from linear("visual.merger.mlp.2", features, joined)


def config(s: Shape) -> dict[str, Any]:
    """config.json."""
    return qwen2_vl_config(s, s.tower) if s.tower else llama_config(s)


def qwen2_vl_config(s: Shape, t: Tower) -> dict[str, Any]:
    """That of a model with a vision tower."""
    start, image, end, video = range(s.vocab - len(VISION_SPECIAL), s.vocab)
    quarter = s.head_dim // 8
    return {
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "model_type": "qwen2_vl",
        "vocab_size": s.vocab,
        "hidden_size": s.hidden,
        "intermediate_size": s.inner,
        "num_hidden_layers": s.layers,
        "num_attention_heads": s.heads,
        "num_key_value_heads": s.kv_heads,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "rope_scaling": {"type": "mrope", "mrope_section": [quarter, quarter * 3 // 2, quarter * 3 // 2]},
        "max_position_embeddings": 32768,
        "max_window_layers": s.layers,
        "use_sliding_window": False,
        "tie_word_embeddings": s.tied,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "dtype": "bfloat16",
        "vision_start_token_id": start,
        "image_token_id": image,
        "vision_end_token_id": end,
        "video_token_id": video,
        "vision_config": {
            "model_type": "qwen2_vl",
            "depth": t.layers,
            "embed_dim": t.width,
            "hidden_size": s.hidden,
            "hidden_act": "quick_gelu",
            "mlp_ratio": t.inner // t.width,
            "num_heads": t.heads,
            "in_channels": 3,
            "patch_size": PATCH,
            "spatial_merge_size": MERGE,
            "temporal_patch_size": FRAMES,
        },
    }


PICTURES = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "patch_size": PATCH,
    "temporal_patch_size": FRAMES,
    "merge_size": MERGE,
    "min_pixels": 56 * 56,
    "max_pixels": 1280 * 28 * 28,
    "resample": 3,
    "rescale_factor": 1 / 255,
}
"""preprocessor_config.json: how pictures become patches."""


def llama_config(s: Shape) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": s.vocab,
        "hidden_size": s.hidden,
        "intermediate_size": s.inner,
        "num_hidden_layers": s.layers,
        "num_attention_heads": s.heads,
        "num_key_value_heads": s.kv_heads,
        "head_dim": s.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": ROPE,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": s.tied,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "dtype": "bfloat16",
    }


def tokenizer(size: int, last: tuple[str, ...] = ()) -> Tokenizer:
    """Byte-level BPE with exactly `size` tokens: special ones, bytes, earlier tokens with a byte, `last` special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet]
    merges: list[tuple[str, str]] = []
    wanted = size - len(SPECIAL) - len(last)
    first = 0
    while len(words) < wanted:
        for byte in alphabet[: wanted - len(words)]:
            merges.append((words[first], byte))
            words.append(words[first] + byte)
        first += 1
    vocab = {word: i for i, word in enumerate([*SPECIAL, *words])}
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(token, special=True) for token in (*SPECIAL, *last)])
    return made


def values(name: str, shape: tuple[int, ...], random: np.random.Generator) -> Iterator[NDArray[np.uint16]]:
    """bf16 bits of a tensor in slabs: gains are 1, and weights keep the size of what passes through them."""
    left = math.prod(shape)
    while left:
        count = min(left, SLAB)
        left -= count
        if name.endswith(("norm.weight", "norm1.weight", "norm2.weight", "ln_q.weight")):
            yield to_bf16(np.ones(count, np.float32))
        elif name.endswith(".bias"):
            yield to_bf16(np.zeros(count, np.float32))
        else:
            scale = np.float32(0.02 if "embed" in name else math.prod(shape[1:]) ** -0.5)
            yield to_bf16(random.standard_normal(count, np.float32) * scale)


def write_weights(path: Path, shape: Shape, seed: int) -> None:
    """Write a safetensors file: length of the header, header, tensors."""
    header: dict[str, Any] = {}
    at = 0
    for name, dims in tensors(shape):
        size = 2 * math.prod(dims)
        header[name] = {"dtype": "BF16", "shape": dims, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    random, done = np.random.default_rng(seed), 0
    with open(path, "wb") as file, progress() as report:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, dims in tensors(shape):
            for slab in values(name, dims, random):
                file.write(slab.data)
                done += slab.nbytes
                report(done, at, name)


def make(folder: Path, shape: Shape, seed: int) -> None:
    """Write the checkpoint into `folder`.  InputError: it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_weights(folder / "model.safetensors", shape, seed)
        (folder / "config.json").write_text(json.dumps(config(shape), indent=2), encoding="utf-8")
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": SPECIAL[0], "eos_token": SPECIAL[1]}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")
        if shape.tower:
            (folder / "preprocessor_config.json").write_text(json.dumps(PICTURES), encoding="utf-8")
        tokenizer(shape.vocab, VISION_SPECIAL if shape.tower else ()).save(str(folder / "tokenizer.json"))
    except OSError as error:
        raise InputError(f"{folder}: cannot write it: {error.strerror}") from None


@click.command(cls=Command)
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--shape", type=click.Choice(list(SHAPES)), default="llama-3.2-1b", show_default=True, help="The published shape."
)
@click.option("--layers", type=click.IntRange(1), help="Fewer or more decoder layers than the shape has.")
@click.option("--vocab", type=click.IntRange(512), help="Fewer or more entries of the vocabulary.")
@click.option("--seed", default=0, show_default=True, help="Start of the random numbers.")
def main(out: Path, shape: str, layers: int | None, vocab: int | None, seed: int) -> None:
    """Write a checkpoint of random weights into the folder OUT."""
    published = SHAPES[shape]
    make(out, replace(published, layers=layers or published.layers, vocab=vocab or published.vocab), seed)
    note(f"{out}: {sum(path.stat().st_size for path in out.iterdir()) / 1e6:,.0f} MB")


if __name__ == "__main__":
    main()
