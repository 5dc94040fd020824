"""Hostile GGUF files: small networks with a tokenizer, written here field by field, whose fields or bytes are changed."""

from __future__ import annotations

import math
import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
from mutation import VALUES, changed_bytes, changed_json, refused

from edgeq.converters.checkpoint.sentence_transformers import embedding_settings
from edgeq.converters.checkpoint.tokenizer import read_text
from edgeq.converters.families.network import described, open_tensors
from edgeq.converters.importers.gguf_source import GgufSource
from edgeq.converters.importers.gguf_tensors import GgufTensor
from edgeq.converters.importers.gguf_types import BLOCK_TYPES, stored_bytes
from edgeq.errors import EdgeqError

Entries = dict[str, Any]
WORDS = [*(f"<0x{byte:02X}>" for byte in range(256)), "<s>", "</s>", "\u2581", "a", "b", "\u2581a", "ab"]
METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 1,
    "llama.context_length": 64,
    "llama.embedding_length": 256,
    "llama.feed_forward_length": 256,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 1e4,
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": WORDS,
    "tokenizer.ggml.scores": [-0.5 * i for i in range(len(WORDS))],
    "tokenizer.ggml.token_type": [6] * 256 + [3, 3] + [1] * (len(WORDS) - 258),
    "tokenizer.ggml.bos_token_id": 256,
    "tokenizer.ggml.eos_token_id": 257,
    "tokenizer.chat_template": "{{ messages[0].content }}",
}
SHAPES: dict[str, Any] = {
    "token_embd.weight": [8, [len(WORDS), 256]],
    "output_norm.weight": [0, [256]],
    "blk.0.attn_norm.weight": [0, [256]],
    "blk.0.ffn_norm.weight": [0, [256]],
    "blk.0.attn_q.weight": [34, [256, 256]],
    "blk.0.attn_k.weight": [12, [128, 256]],
    "blk.0.attn_v.weight": [14, [128, 256]],
    "blk.0.attn_output.weight": [1, [256, 256]],
    "blk.0.ffn_gate.weight": [3, [256, 256]],
    "blk.0.ffn_up.weight": [11, [256, 256]],
    "blk.0.ffn_down.weight": [10, [256, 256]],
}
SEEING = {**METADATA, "tokenizer.ggml.tokens": [*WORDS[:-1], "<image>"]}
TOWER: dict[str, Any] = {
    "general.architecture": "clip",
    "clip.has_vision_encoder": True,
    "clip.projector_type": "mlp",
    "clip.use_gelu": False,
    "clip.vision.image_size": 8,
    "clip.vision.patch_size": 4,
    "clip.vision.embedding_length": 32,
    "clip.vision.feed_forward_length": 64,
    "clip.vision.block_count": 1,
    "clip.vision.feature_layer": [1],
    "clip.vision.attention.head_count": 2,
    "clip.vision.attention.layer_norm_epsilon": 1e-5,
    "clip.vision.image_mean": [0.5, 0.5, 0.5],
    "clip.vision.image_std": [0.5, 0.5, 0.5],
}
TOWER_SHAPES: dict[str, Any] = {
    "v.class_embd": [0, [32]],
    "v.patch_embd.weight": [1, [32, 3, 4, 4]],
    "v.position_embd.weight": [0, [5, 32]],
    **{f"v.pre_ln.{kind}": [0, [32]] for kind in ("weight", "bias")},
    **{f"v.blk.0.{norm}.{kind}": [0, [32]] for norm in ("ln1", "ln2") for kind in ("weight", "bias")},
    **{f"v.blk.0.attn_{part}.weight": [8, [32, 32]] for part in ("q", "k", "v", "out")},
    **{f"v.blk.0.attn_{part}.bias": [0, [32]] for part in ("q", "k", "v", "out")},
    **{"v.blk.0.ffn_up.weight": [1, [64, 32]], "v.blk.0.ffn_up.bias": [0, [64]]},
    **{"v.blk.0.ffn_down.weight": [1, [32, 64]], "v.blk.0.ffn_down.bias": [0, [32]]},
    **{"mm.0.weight": [8, [256, 32]], "mm.0.bias": [0, [256]], "mm.2.weight": [8, [256, 256]], "mm.2.bias": [0, [256]]},
}


def norms(*names: str, size: int = 64) -> Entries:
    return {f"{name}.weight": [0, [size]] for name in names}


def matrices(kind: int, **shapes: list[int]) -> Entries:
    return {f"{name.replace('__', '.')}.weight": [kind, shape] for name, shape in shapes.items()}


def layers(*entries: Entries) -> Entries:
    return {f"blk.{layer}.{name}": entry for layer, found in enumerate(entries) for name, entry in found.items()}


def of(name: str, **keys: Any) -> Entries:
    """Metadata of an architecture; two underscores in a key are a dot."""
    common = {"context_length": 64, "embedding_length": 64, "feed_forward_length": 64, "rope.freq_base": 1e4}
    common |= {"attention.layer_norm_rms_epsilon": 1e-5, "attention.head_count": 4}
    found = {f"{name}.{key}": value for key, value in (common | {k.replace("__", "."): v for k, v in keys.items()}).items()}
    return {"general.architecture": name, **found}


HEADS = matrices(8, attn_q=[64, 64], attn_k=[32, 64], attn_v=[32, 64], attn_output=[64, 64])
MLP = matrices(2, ffn_gate=[64, 64], ffn_up=[64, 64], ffn_down=[64, 64])
GEMMA4_LAYER = (
    norms("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm", "post_norm", "post_ffw_norm_1", "post_ffw_norm_2")
    | norms("pre_ffw_norm_2")
    | norms("attn_q_norm", "attn_k_norm", size=16)
    | norms("layer_output_scale", size=1)
    | {"ffn_gate_inp.weight": [0, [2, 64]], "ffn_gate_inp.scale": [0, [64]], "ffn_down_exps.scale": [0, [2]]}
    | matrices(2, ffn_gate_up_exps=[2, 64, 64], ffn_down_exps=[2, 64, 32])
    | matrices(8, attn_q=[64, 64], attn_k=[32, 64], attn_output=[64, 64], inp_gate=[32, 64], proj=[64, 32])
    | MLP
)
WIDE = {
    **GEMMA4_LAYER,
    **norms("attn_q_norm", "attn_k_norm", size=32),
    **matrices(8, attn_q=[128, 64], attn_k=[32, 64], attn_output=[64, 128]),
}
SSM_KEYS = {"ssm__conv_kernel": 3, "ssm__state_size": 16, "ssm__group_count": 2, "ssm__time_step_rank": 4}
SPACE_KEYS = {**SSM_KEYS, "ssm__inner_size": 128}
DELTA_KEYS = {
    **{"block_count": 3, "attention__head_count_kv": 2, "full_attention_interval": 2, "rope__dimension_count": 8},
    **SSM_KEYS,
    "ssm__inner_size": 64,
}
ATTENDING = norms("attn_q_norm", "attn_k_norm", size=16)
ATTENDING |= matrices(8, attn_q=[128, 64], attn_k=[32, 64], attn_v=[32, 64], attn_output=[64, 64])
DELTA = {"ssm_a": [0, [4]], "ssm_dt.bias": [0, [4]], "ssm_conv1d.weight": [0, [128, 3]], **norms("ssm_norm", size=16)}
DELTA |= matrices(2, attn_qkv=[128, 64], attn_gate=[64, 64], ssm_out=[64, 64])
QWEN_NORMS = norms("attn_norm", "post_attention_norm")
QWEN_EXPERTS = {"ffn_gate_inp.weight": [0, [2, 64]], "ffn_gate_inp_shexp.weight": [0, [64]]}
QWEN_EXPERTS |= matrices(2, ffn_gate_exps=[2, 32, 64], ffn_up_exps=[2, 32, 64], ffn_down_exps=[2, 64, 32])
QWEN_EXPERTS |= matrices(2, ffn_gate_shexp=[32, 64], ffn_up_shexp=[32, 64], ffn_down_shexp=[64, 32])
DRAFTS = norms("nextn.enorm", "nextn.hnorm", "nextn.shared_head_norm") | {"nextn.eh_proj.weight": [8, [64, 128]]}
APART, JOINED = matrices(8, ssm_alpha=[4, 64], ssm_beta=[4, 64]), matrices(8, ssm_ba=[8, 64])
MAMBA = {f"ssm_{name}": [0, [4, 1]] for name in "ad"} | {"ssm_dt.bias": [0, [4]], "ssm_norm.weight": [0, [2, 64]]}
MAMBA |= {"ssm_conv1d.weight": [0, [192, 3]], "ssm_conv1d.bias": [0, [192]]} | matrices(2, ssm_in=[324, 64], ssm_out=[64, 128])
BERT_LAYER = {f"{norm}.{kind}": [0, [64]] for norm in ("attn_output_norm", "layer_output_norm") for kind in ("weight", "bias")}
BERT_LAYER |= matrices(8, attn_q=[64, 64], attn_k=[64, 64], attn_v=[64, 64], attn_output=[64, 64])
BERT_LAYER |= matrices(2, ffn_up=[96, 64], ffn_down=[64, 96])
BERT_LAYER |= {f"{name}.bias": [0, [64]] for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_down")}
BERT_LAYER |= {"ffn_up.bias": [0, [96]]}
BERT_KEYS = of("bert", block_count=1, feed_forward_length=96, attention__causal=False, pooling_type=2)
BERT_KEYS["bert.attention.layer_norm_epsilon"] = BERT_KEYS.pop("bert.attention.layer_norm_rms_epsilon")
BERT_ENDS = {"position_embd.weight": [0, [64, 64]], "token_types.weight": [0, [2, 64]]}
BERT_ENDS |= {f"token_embd_norm.{kind}": [0, [64]] for kind in ("weight", "bias")}
SCORE = {"cls.weight": [0, [64, 64]], "cls.bias": [0, [64]], "cls.output.weight": [0, [1, 64]], "cls.output.bias": [0, [1]]}
NETWORKS: dict[str, tuple[Entries, Entries]] = {
    "bert": (BERT_KEYS, BERT_ENDS | layers(BERT_LAYER)),
    "bert-reranker": (BERT_KEYS, BERT_ENDS | SCORE | layers(BERT_LAYER)),
    "granitehybrid": (
        of(
            "granitehybrid",
            block_count=2,
            attention__head_count_kv=[0, 2],
            attention__scale=0.25,
            embedding_scale=2.0,
            residual_scale=0.5,
            logit_scale=4.0,
            rope__scaling__finetuned=False,
            **SPACE_KEYS,
        ),
        norms("output_norm")
        | layers(
            norms("attn_norm", "ffn_norm") | MLP | MAMBA,
            norms("attn_norm", "ffn_norm") | MLP | HEADS,
        ),
    ),
    "falcon-h1": (
        of(
            "falcon-h1",
            block_count=1,
            attention__head_count_kv=2,
            **SPACE_KEYS,
        ),
        norms("output_norm") | layers(norms("attn_norm") | {"ffn_norm": [0, [64]]} | MLP | MAMBA | HEADS),
    ),
    "nemotron_h": (
        of(
            "nemotron_h",
            block_count=3,
            feed_forward_length=[0, 0, 96],
            attention__head_count_kv=[0, 2, 0],
            **SPACE_KEYS,
        ),
        norms("output_norm")
        | matrices(8, output=[len(WORDS), 64])
        | layers(
            norms("attn_norm") | MAMBA,
            norms("attn_norm") | HEADS,
            norms("attn_norm") | matrices(2, ffn_up=[96, 64], ffn_down=[64, 96]),
        ),
    ),
    "qwen35": (
        of("qwen35", **DELTA_KEYS, nextn_predict_layers=1, rope__dimension_sections=[2, 1, 1, 0]),
        norms("output_norm") | layers(*(QWEN_NORMS | MLP | each for each in (DELTA | APART, ATTENDING, ATTENDING | DRAFTS))),
    ),
    "qwen3next": (
        of(
            "qwen3next",
            **DELTA_KEYS,
            attention__recurrent_layers=[True, False, True],
            expert_count=2,
            expert_used_count=1,
            expert_feed_forward_length=32,
            expert_shared_feed_forward_length=32,
        ),
        norms("output_norm")
        | layers(*(QWEN_NORMS | QWEN_EXPERTS | each for each in (DELTA | JOINED, ATTENDING, DELTA | JOINED))),
    ),
    "gemma4": (
        of(
            "gemma4",
            block_count=2,
            attention__head_count_kv=[2, 1],
            attention__key_length=32,
            attention__value_length=32,
            attention__key_length_swa=16,
            attention__value_length_swa=16,
            attention__sliding_window=8,
            attention__sliding_window_pattern=[True, False],
            attention__shared_kv_layers=0,
            rope__freq_base_swa=1e4,
            rope__dimension_count=32,
            rope__dimension_count_swa=16,
            embedding_length_per_layer_input=32,
            final_logit_softcapping=30.0,
            expert_count=2,
            expert_used_count=1,
            expert_feed_forward_length=32,
        ),
        norms("output_norm")
        | norms("per_layer_proj_norm", size=32)
        | matrices(8, per_layer_token_embd=[263, 64], per_layer_model_proj=[64, 64])
        | layers(GEMMA4_LAYER | matrices(8, attn_v=[32, 64]), WIDE),
    ),
    "lfm2": (
        of("lfm2", block_count=2, attention__head_count_kv=[0, 2], shortconv__l_cache=3),
        norms("token_embd_norm")
        | layers(
            norms("attn_norm", "ffn_norm")
            | MLP
            | matrices(2, shortconv__in_proj=[192, 64], shortconv__out_proj=[64, 64])
            | {"shortconv.conv.weight": [0, [64, 3]]},
            norms("attn_norm", "ffn_norm")
            | norms("attn_q_norm", "attn_k_norm", size=16)
            | MLP
            | matrices(2, attn_q=[64, 64], attn_k=[32, 64], attn_v=[32, 64], attn_output=[64, 64]),
        ),
    ),
    "gpt-oss": (
        of(
            "gpt-oss",
            block_count=1,
            attention__head_count_kv=2,
            attention__sliding_window=8,
            expert_count=2,
            expert_used_count=1,
            expert_feed_forward_length=32,
            rope__scaling__type="yarn",
            rope__scaling__factor=32.0,
            rope__scaling__original_context_length=32,
        ),
        norms("output_norm")
        | layers(
            norms("attn_norm", "post_attention_norm")
            | HEADS
            | matrices(2, ffn_gate_exps=[2, 32, 64], ffn_up_exps=[2, 32, 64], ffn_down_exps=[2, 64, 32])
            | {f"attn_{part}.bias": [0, [size]] for part, size in (("q", 64), ("k", 32), ("v", 32), ("output", 64))}
            | {f"ffn_{part}_exps.bias": [0, [2, size]] for part, size in (("gate", 32), ("up", 32), ("down", 64))}
            | {"ffn_gate_inp.weight": [0, [2, 64]], "ffn_gate_inp.bias": [0, [2]], "attn_sinks.weight": [0, [4]]}
        ),
    ),
}
"""Name -> metadata of the network, and number of the type and shape of its tensors, the embedding left out."""

VOCABULARY = {key: value for key, value in METADATA.items() if key.startswith("tokenizer.")}
OTHERS = [
    ({**metadata, **VOCABULARY}, {"token_embd.weight": [8, [len(WORDS), 64]], **shapes})
    for metadata, shapes in NETWORKS.values()
]
PIECES = {"tokenizer.ggml.model": "bert", "tokenizer.ggml.seperator_token_id": 257, "tokenizer.ggml.cls_token_id": 256}
PIECES |= {"tokenizer.ggml.unknown_token_id": 259}
OTHERS += [({**metadata, **PIECES}, shapes) for metadata, shapes in OTHERS if metadata["general.architecture"] == "bert"]
TYPES = (*BLOCK_TYPES, 0, 1, 30, 20, 99, 2**31)


def gguf(rng: random.Random, path: Path) -> str:
    """A file with metadata, tensors or bytes changed, at times with its tower; opened, and every weight read."""
    mmproj = path.with_name("mmproj.gguf") if rng.random() < 0.3 else None
    if mmproj:
        # One of the two is sound at times, so that the other is looked at.
        _write(rng, mmproj, TOWER, TOWER_SHAPES)
        path.write_bytes(encoded(random.Random(0), SEEING, SHAPES))
    if not mmproj or rng.random() < 0.2:
        _write(rng, path, *((SEEING, SHAPES) if mmproj else rng.choice([(METADATA, SHAPES), *OTHERS])))
    try:
        source = GgufSource.open(path, mmproj=mmproj)
        embeds = embedding_settings(source, None)
        family, config = described(source, embeds.pooling if embeds else None)
        read_text(source, config.vocab_size)
        tensors = open_tensors(source, family)
        for name, shape in (family.tensor_shapes() | (family.tower.tensor_shapes() if family.tower else {})).items():
            assert np.isfinite(tensors.rows(name, 0, shape[0])).all(), name
            if isinstance(found := tensors.tensors[name].stored, GgufTensor) and found.codec and len(shape) > 1:
                arrays = tensors.quantized(name, 0, shape[0])
                assert arrays["q"].shape == shape and all(np.isfinite(array).all() for array in arrays.values()), name
    except EdgeqError as error:
        return refused(error)
    return "seen" if mmproj else "read"


def _write(rng: random.Random, path: Path, entries: dict[str, Any], shapes: dict[str, Any]) -> None:
    metadata: Any = changed_json(rng, entries) if rng.random() < 0.5 else entries
    tensors: Any = changed_json(rng, shapes, (*VALUES, *TYPES, [256, 256], [1])) if rng.random() < 0.3 else shapes
    data = encoded(rng, metadata if isinstance(metadata, dict) else {}, tensors if isinstance(tensors, dict) else {})
    path.write_bytes(changed_bytes(rng, data[: len(data) if rng.random() < 0.9 else rng.randrange(len(data))]))
    if rng.random() < 0.5:
        path.write_bytes(data)


def encoded(rng: random.Random, metadata: dict[str, Any], tensors: dict[str, Any]) -> bytes:
    """A file of these entries, with whatever values they have."""
    entries = [text(key) + typed(value) for key, value in metadata.items()]
    infos, data = list[bytes](), b""
    for name, entry in tensors.items():
        kind, shape = entry if isinstance(entry, list) and len(entry) == 2 else (8, [32, 32])
        shape = shape if isinstance(shape, list) else [32]
        known = kind in (*BLOCK_TYPES, 0, 1, 30) and all(type(n) is int and 0 < n < 1024 for n in shape) and 0 < len(shape) < 5
        known = known and math.prod(shape) < 1 << 20
        size = (known and stored_bytes(kind, math.prod(shape[:-1]), shape[-1])) or 64
        dimensions = b"".join(number(n, "<Q") for n in shape[::-1])
        infos.append(
            text(name) + struct.pack("<I", len(shape)) + dimensions + number(kind, "<I") + struct.pack("<Q", len(data))
        )
        # Few scales of random bytes are finite: most files have small numbers, whose bytes are all alike; decays are negative.
        alike = rng.randrange(0x30) | (0x80 if name.endswith("ssm_a") else 0)
        data += (rng.randbytes(size) if rng.random() < 0.02 else bytes([alike]) * size).ljust(-(-size // 32) * 32, b"\0")
    head = b"GGUF" + struct.pack("<IQQ", 3, len(infos), len(entries)) + b"".join(entries) + b"".join(infos)
    return head.ljust(-(-len(head) // 32) * 32, b"\0") + data


def text(value: str) -> bytes:
    data = value.encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(data)) + data


def number(value: Any, form: str) -> bytes:
    """An integer that fits whatever `value` is."""
    return struct.pack(form, value % (1 << 8 * struct.calcsize(form)) if isinstance(value, int) else 0)


def typed(value: Any) -> bytes:
    """Type and value of an entry."""
    match value:
        case bool():
            return struct.pack("<I?", 7, value)
        case int():
            return struct.pack("<I", 4) + number(value, "<I")
        case float():
            return struct.pack("<Id", 12, value)
        case str():
            return struct.pack("<I", 8) + text(value)
        case list() if value and all(isinstance(each, str) for each in value):
            return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(text, value))
        case list() if value and all(isinstance(each, bool) for each in value):
            return struct.pack(f"<IIQ{len(value)}?", 9, 7, len(value), *value)
        case list() if value and all(isinstance(each, float) for each in value):
            return struct.pack(f"<IIQ{len(value)}d", 9, 12, len(value), *value)
        case list():
            return struct.pack("<IIQ", 9, 5, len(value)) + b"".join(number(each, "<I") for each in value)
        case _:
            return struct.pack("<II", 99, 0)
