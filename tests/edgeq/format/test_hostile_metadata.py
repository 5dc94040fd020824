"""Metadata that lies under right digests: each field, one clear error."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgeq.errors import EdgeqError, FormatError, UnsupportedError
from edgeq.format.schema import model_generated as fb
from tests.edgeq.format.sample_file import CONFIG, refused

Forge = Callable[..., Path]
MIB = 1 << 20


def config(**changes: Any) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        values = json.loads(CONFIG.to_json())
        rope = changes.pop("rope", {})
        values["rope"].update(rope)
        model.config = json.dumps({**values, **changes})

    return change


def split_row(index: int, rows: int = 64) -> Any:
    """A split row of linear layer 0, 64 x 32."""
    t = fb.SplitRowT()
    t.index, t.row = index, array(dtype=1, shape=[rows])
    return t


def scales(count: int, symmetric: bool = True) -> Any:
    t = fb.ActivationT()
    t.bits, t.symmetric, t.scales = 8, symmetric, array(dtype=0, shape=[count])
    return t


def setting(path: str, value: Any) -> Callable[[Any], None]:
    """`segments.0.offset`: set an attribute deep in the model."""

    def change(model: Any) -> None:
        *way, last = path.split(".")
        for name in way:
            model = model[int(name)] if name.isdigit() else getattr(model, name)
        setattr(model, last, value(getattr(model, last)) if callable(value) else value)

    return change


def duplicate(vector: str) -> Callable[[Any], None]:
    return lambda model: getattr(model, vector).append(getattr(model, vector)[0])


def array(**values: Any) -> Any:
    return fb.ArrayT(**{"dtype": 2, "shape": [32], "segment": 0, **values})


HOSTILE: dict[str, tuple[Callable[[Any], object], type[EdgeqError], str]] = {
    # segments
    "segment before the data": (setting("segments.0.offset", 0), FormatError, "segment 0 does not follow"),
    "segments overlap": (setting("segments.1.offset", lambda n: n - 64), FormatError, "segment 1 does not follow"),
    "hole between segments": (setting("segments.1.offset", lambda n: n + 64), FormatError, "segment 1 does not follow"),
    "segment leaves the file": (setting("segments.3.length", 2**62), FormatError, "segment 3 .*leaves the file"),
    "segment length overflows": (setting("segments.3.length", 2**64 - 64), FormatError, "segment 3 .*leaves the file"),
    "empty segment": (setting("segments.2.length", 0), FormatError, "segment 2"),
    "last segment short": (setting("segments.0.length", lambda n: n - 64), FormatError, "segment 1 does not follow"),
    "no segments": (lambda m: m.segments.clear(), FormatError, "its 0 segments cannot hold them"),
    "last segment missing": (lambda m: m.segments.pop(), FormatError, "do not cover|cannot hold"),
    "digest too short": (setting("segments.0.digest", [1, 2, 3]), FormatError, "digest has 3 bytes; expected 16"),
    # arrays and segments
    "two arrays share a segment": (setting("linears.0.weights.0.scale.segment", 0), FormatError, "share segment 0"),
    "segment index beyond the list": (setting("arrays.0.array.segment", 4 * 10**9), FormatError, "lies in segment 4000000000"),
    "blob takes a layer's segment": (setting("blobs.0.segment", 0), FormatError, "share segment 0"),
    "segment of nothing": (lambda m: m.blobs.clear(), FormatError, "1 segments belong to nothing"),
    # shapes
    "huge shape": (setting("arrays.0.array.shape", [2**63]), FormatError, "out of range"),
    "shape whose product overflows": (setting("arrays.0.array.shape", [2**40] * 4), FormatError, "attention_norm"),
    "rank of a thousand": (setting("arrays.0.array.shape", [1] * 1000), FormatError, "1000 dimensions .* at most 4"),
    "wrong shape": (setting("arrays.0.array.shape", [31]), FormatError, "layers.0.attention_norm is f32 .31,."),
    "huge rows": (setting("linears.0.weights.0.rows", 2**32 - 1), FormatError, "layers.0.qkv is 4294967295 x 32"),
    "no columns": (setting("linears.0.weights.0.columns", 0), FormatError, "layers.0.qkv is 64 x 0"),
    "transposed": (setting("linears.0.weights.0.q.shape", lambda s: s[::-1]), FormatError, "layers.0.qkv: q is u8"),
    "q of another type": (setting("linears.0.weights.0.q.dtype", 4), FormatError, "q is i8"),
    "unknown array type": (setting("arrays.0.array.dtype", 9), UnsupportedError, "array type 9"),
    "weight without q": (setting("linears.0.weights.0.q", None), FormatError, "weight without data"),
    "weight without scale": (setting("linears.0.weights.0.scale", None), FormatError, "'scale' do not agree"),
    "weight without zero points": (setting("linears.0.weights.0.zero", None), FormatError, "'zero' do not agree"),
    "scale of a float codec": (setting("linears.2.weights.0.scale", array()), FormatError, "'scale' do not agree"),
    "array without data": (setting("arrays.0.array", None), FormatError, "attention_norm.* has no data"),
    "bias of wrong shape": (setting("linears.0.bias", array(shape=[63])), FormatError, "bias is bf16 .63,."),
    "bias of integers": (setting("linears.0.bias", array(dtype=5, shape=[64])), FormatError, "bias is i32"),
    # codecs
    "weight without codec": (setting("linears.0.weights.0.codec", None), FormatError, "layers.0.qkv|damaged"),
    "unknown codec kind": (setting("linears.0.weights.0.codec.kind", 77), UnsupportedError, "codec kind 77"),
    "codec kind after the last": (setting("linears.0.weights.0.codec.kind", 8), UnsupportedError, "codec kind 8"),
    "nine bits": (setting("linears.0.weights.0.codec.bits", 9), UnsupportedError, "9 bits are not supported"),
    "bits of a float codec": (setting("linears.2.weights.0.codec.bits", 9), FormatError, "layers.0.gate_up"),
    "group size 48": (setting("linears.0.weights.0.codec.groupSize", 48), UnsupportedError, "group size 48 is not supported"),
    "group size too large": (
        setting("linears.0.weights.0.codec.groupSize", 64),
        FormatError,
        "scale is f16 .*i4 g64 zero implies",
    ),
    "unknown zero kind": (setting("linears.0.weights.0.codec.zero", 4), UnsupportedError, "zero kind 4"),
    "zero points as offsets": (
        setting("linears.0.weights.0.codec.zero", 2),
        FormatError,
        "i4 g16 offset and array 'offset' do not",
    ),
    "weight without offsets": (setting("linears.4.weights.0.offset", None), FormatError, "'offset' do not agree"),
    "offsets beside zero points": (setting("linears.0.weights.0.offset", array()), FormatError, "'offset' do not agree"),
    "offsets of integers": (setting("linears.4.weights.0.offset.dtype", 3), FormatError, "offset is u8 .*implies f16"),
    "short offsets": (setting("linears.4.weights.0.offset.shape", [4, 1, 16]), FormatError, "offset is f16 .4, 1, 16."),
    # Of a half grid: layers.1.gate_up.
    "zero points of a half grid": (setting("linears.6.weights.0.zero", array()), FormatError, "'zero' do not agree"),
    "offsets of a half grid": (setting("linears.6.weights.0.offset", array()), FormatError, "'offset' do not agree"),
    "zero points as a half grid": (setting("linears.0.weights.0.codec.zero", 3), FormatError, "i4 g16 half and array 'zero'"),
    "a half grid as zero points": (setting("linears.6.weights.0.codec.zero", 1), FormatError, "i2 g16 zero and array 'zero'"),
    "a half grid without scales": (setting("linears.6.weights.0.scale", None), FormatError, "'scale' do not agree"),
    "nine bits of a half grid": (setting("linears.6.weights.0.codec.bits", 9), UnsupportedError, "9 bits are not supported"),
    "a half grid of floats": (setting("linears.2.weights.0.codec.zero", 3), FormatError, "layers.0.gate_up"),
    "a half grid in two levels": (setting("linears.7.weights.0.codec.zero", 3), FormatError, "two levels beside a half grid"),
    # Of scales of four bits: layers.0.down.
    "four bits without a scale of the row": (
        setting("linears.3.weights.0.superScale", None),
        FormatError,
        "'super_scale' do not agree",
    ),
    "four bits with scales of a half grid": (
        setting("linears.3.weights.0.scale.dtype", 1),
        FormatError,
        "scale is f16 .*implies u8",
    ),
    "four bits with a byte a row": (
        setting("linears.3.weights.0.scale.shape", [2, 3, 16]),
        FormatError,
        "scale is u8 .2, 3, 16.*implies u8 .2, 3, 8.",
    ),
    "scales of rows as of two levels": (
        setting("linears.3.weights.0.superScale.shape", [2, 2, 16]),
        FormatError,
        "super_scale is f16 .2, 2, 16.",
    ),
    "four bits with offsets": (setting("linears.3.weights.0.codec.zero", 2), FormatError, "four bits without a half grid"),
    "four bits without a half grid": (setting("linears.3.weights.0.codec.zero", 0), FormatError, "four bits without a half"),
    "four bits of whole rows": (setting("linears.3.weights.0.codec.groupSize", 0), UnsupportedError, "four bits need groups"),
    "four bits as a half grid": (setting("linears.3.weights.0.codec.kind", 3), FormatError, "'super_scale' do not agree"),
    # Of tables: layers.0.o.
    "a table without entries": (setting("linears.1.weights.0.table", None), FormatError, "'table' do not agree"),
    "a table of floats": (setting("linears.1.weights.0.table.dtype", 1), FormatError, "table is f16 .*implies i8"),
    "a short table": (
        setting("linears.1.weights.0.table.shape", [1, 16]),
        FormatError,
        "table is i8 .1, 16.*implies i8 .2, 8.",
    ),
    "a table of five bits": (setting("linears.1.weights.0.codec.bits", 5), UnsupportedError, "choose 1, 2, 3 or 4"),
    "a table with zero points": (setting("linears.1.weights.0.codec.zero", 1), FormatError, "say where zero is"),
    "a table beside offsets": (setting("linears.1.weights.0.offset", array()), FormatError, "'offset' do not agree"),
    "a table of integers": (setting("linears.0.weights.0.table", array()), FormatError, "'table' do not agree"),
    "a table as integers": (setting("linears.1.weights.0.codec.kind", 3), FormatError, "'table' do not agree"),
    "wide integers": (
        setting("linears.0.weights.0.codec.wide", True),
        UnsupportedError,
        "no table whose entries could be wide",
    ),
    # Of a trellis: the head.
    "a trellis without entries": (setting("linears.8.weights.0.table", None), FormatError, "'table' do not agree"),
    "a trellis without scales of rows": (
        setting("linears.8.weights.0.superScale", None),
        FormatError,
        "'super_scale' do not agree",
    ),
    "a table without the bit of neighbours": (
        setting("linears.8.weights.0.table.shape", [2, 4]),
        FormatError,
        "table is i8 .2, 4.*implies i8 .2, 8.",
    ),
    "a trellis of four bits": (setting("linears.8.weights.0.codec.bits", 4), UnsupportedError, "choose 1, 2 or 3"),
    "a trellis with zero points": (setting("linears.8.weights.0.codec.zero", 1), FormatError, "say where zero is"),
    "a trellis on a half grid": (setting("linears.8.weights.0.codec.zero", 3), FormatError, "say where zero is"),
    "a trellis of whole rows": (setting("linears.8.weights.0.codec.groupSize", 0), UnsupportedError, "four bits need groups"),
    "a wide trellis": (
        setting("linears.8.weights.0.codec.wide", True),
        UnsupportedError,
        "no table whose entries could be wide",
    ),
    "a trellis as a table": (
        setting("linears.8.weights.0.codec.kind", 6),
        FormatError,
        "n2 g16 and array 'super_scale' do not agree",
    ),
    "a table as a trellis": (setting("linears.1.weights.0.codec.kind", 7), FormatError, "t3 g16 s4 and array.*do not agree"),
    # Of two levels: layers.1.o with offsets, layers.1.down without.
    "two levels without super scales": (
        setting("linears.5.weights.0.superScale", None),
        FormatError,
        "'super_scale' do not agree",
    ),
    "two levels without super offsets": (
        setting("linears.5.weights.0.superOffset", None),
        FormatError,
        "'super_offset' do not",
    ),
    "super offsets without offsets": (
        setting("linears.7.weights.0.superOffset", array()),
        FormatError,
        "'super_offset' do not",
    ),
    "super scales of one level": (
        setting("linears.0.weights.0.superScale", array()),
        FormatError,
        "'super_scale' do not agree",
    ),
    "unsigned scales of two levels": (setting("linears.7.weights.0.scale.dtype", 3), FormatError, "scale is u8 .*implies i8"),
    "short super scales": (
        setting("linears.7.weights.0.superScale.shape", [1, 1, 16]),
        FormatError,
        "super_scale is f16 .1, 1, 16.",
    ),
    "two levels beside zero points": (
        setting("linears.5.weights.0.codec.zero", 1),
        FormatError,
        "two levels beside zero points",
    ),
    "two levels of whole rows": (setting("linears.7.weights.0.codec.groupSize", 0), UnsupportedError, "two levels need groups"),
    "zero kind of floats": (setting("linears.2.weights.0.codec.zero", 2), FormatError, "layers.0.gate_up"),
    # parts that do not fit their layer: layers.0.o is 32 x 32
    "input_scale of f16": (setting("linears.1.inputScale", array(dtype=1)), FormatError, "input_scale is f16 .*expected f32"),
    "input_scale short": (setting("linears.1.inputScale", array(dtype=0, shape=[31])), FormatError, "input_scale is f32 .31,"),
    "input_order of floats": (setting("linears.1.inputOrder", array()), FormatError, "input_order is bf16"),
    "input_order elsewhere": (setting("linears.1.inputOrder", array(dtype=5, segment=99)), FormatError, "segment 99"),
    "transform that does not fit": (setting("linears.1.transform", fb.TransformT(size=24)), FormatError, "24 channels 1 apart"),
    "transform across too many": (
        setting("linears.1.transform", fb.TransformT(size=4, stride=16)),
        FormatError,
        "4 channels 16 apart does not fit 32",
    ),
    "transform without length": (setting("linears.1.transform", fb.TransformT(size=0)), FormatError, "0 channels"),
    "transform of another order": (
        setting("linears.1.transform", fb.TransformT(size=32, base=array(dtype=0, shape=[3, 3]))),
        FormatError,
        "32 channels is not 3 times a power of two",
    ),
    "transform with a crooked base": (
        setting("linears.1.transform", fb.TransformT(size=32, base=array(dtype=0, shape=[2, 4]))),
        FormatError,
        "base of its transform",
    ),
    "transform with a base of no dimensions": (
        setting("linears.1.transform", fb.TransformT(size=32, base=array(dtype=0, shape=[]))),
        FormatError,
        "base of its transform",
    ),
    "transform with an empty base": (
        setting("linears.1.transform", fb.TransformT(size=32, base=array(dtype=0, shape=[0, 0]))),
        FormatError,
        "base of its transform",
    ),
    "rope of next to nothing": (config(rope={"theta": 1e-300}), FormatError, "rope.theta is 1e-300"),
    "activation of no bits": (setting("linears.1.activation", fb.ActivationT()), FormatError, "0 and 0 activation bits"),
    "activation of a block that is not there": (
        setting("linears.1.activation", fb.ActivationT(bits=4, highBits=8)),
        FormatError,
        "4 and 8 activation bits for 1 weight blocks",
    ),
    "static activation": (
        setting("linears.1.activation", fb.ActivationT(bits=8, granularity=2, staticScales=[1.0])),
        UnsupportedError,
        "granularity group or tensor",
    ),
    "half of a low-rank part": (
        lambda m: setattr(m.linears[1], "lowRankB", m.linears[1].weights[0]),
        FormatError,
        "a low-rank part with one factor",
    ),
    "low rank of integers": (
        lambda m: (
            setattr(m.linears[1], "lowRankB", m.linears[1].weights[0]),
            setattr(m.linears[1], "lowRankA", m.linears[1].weights[0]),
        ),
        FormatError,
        "low-rank parts",
    ),
    "a split row without data": (setting("linears.0.splitRow", fb.SplitRowT()), FormatError, "a split row without data"),
    "a split row beyond the columns": (setting("linears.0.splitRow", split_row(32)), FormatError, "split row 32 of 32 columns"),
    "a split row of another length": (setting("linears.0.splitRow", split_row(0, 5)), FormatError, r"split_row is f16 \(5,\)"),
    "activation scales of three": (
        setting("linears.0.activation", scales(3)),
        FormatError,
        r"activation scales are f32 \(3,\)",
    ),
    "activation scales with a zero point": (
        setting("linears.0.activation", scales(2, False)),
        FormatError,
        "scales need symmetric integers",
    ),
    "master of another shape": (
        lambda m: setattr(m.linears[1], "master", m.linears[0].weights[0]),
        FormatError,
        "its master is",
    ),
    "master that is the weight": (
        lambda m: setattr(m.linears[1], "master", m.linears[1].weights[0]),
        FormatError,
        "share segment",
    ),
    "weight blocks of other rows": (
        lambda m: m.linears[1].weights.append(m.linears[0].weights[0]),
        FormatError,
        "layers.0.o is 32 x 64|blocks differ in rows",
    ),
    "transform of a head that is the embedding": (
        lambda m: setattr(m.linears[-1], "transform", fb.TransformT(size=32)),
        FormatError,
        "a head that is also the embedding",
    ),
    "three weight blocks": (lambda m: m.linears[0].weights.extend(m.linears[0].weights * 2), FormatError, "3 weight blocks"),
    "no weight block": (lambda m: m.linears[0].weights.clear(), FormatError, "without a weight"),
    "cache kind": (setting("kv", fb.KvCacheT(kind=3)), UnsupportedError, "cache kind 3"),
    "cache with more dimensions": (setting("kv", fb.KvCacheT(kind=2, high=17)), FormatError, "17 dimensions in 8 bits"),
    "cache with codes of five bits": (setting("kv", fb.KvCacheT(kind=2, bits=5)), FormatError, "codes of 5 bits"),
    "high dimensions of another cache": (setting("kv", fb.KvCacheT(kind=1, high=2)), FormatError, "int8 cache with 2"),
    "kernels in the segment of a layer": (
        setting("kernels", [fb.KernelsT(target="sm_87", segment=0)]),
        FormatError,
        "kernels for sm_87 and .* share segment 0",
    ),
    "kernels of one architecture twice": (
        setting("kernels", [fb.KernelsT(target="sm_87", segment=0)] * 2),
        FormatError,
        "kernel architecture 'sm_87' twice",
    ),
    "kernels beyond the segments": (
        setting("kernels", [fb.KernelsT(target="sm_87", segment=10**6)]),
        FormatError,
        "kernels for sm_87 lies in segment 1000000",
    ),
    "kernels of an architecture with a long name": (
        setting("kernels", [fb.KernelsT(target="sm_" * 100, segment=0)]),
        FormatError,
        "kernel architecture has 300 bytes",
    ),
    "kernels of no architecture": (
        setting("kernels", [fb.KernelsT(target=None, segment=0)]),
        FormatError,
        "lacks kernel architecture",
    ),
    "kernels of too many architectures": (
        setting("kernels", [fb.KernelsT(target=f"sm_{i}", segment=0) for i in range(65)]),
        FormatError,
        "80 layers, arrays, blobs and kernels; its 33 segments",
    ),
    # names
    "layer twice": (duplicate("linears"), FormatError, "linear layer 'layers.0.qkv' twice"),
    "array twice": (duplicate("arrays"), FormatError, "array 'layers.0.attention_norm' twice"),
    "blob twice": (duplicate("blobs"), FormatError, "blob 'tokenizer.json' twice"),
    "layer missing": (lambda m: m.linears.pop(3), FormatError, "missing .'layers.0.down'"),
    "layer unexpected": (setting("linears.3.name", "layers.9.down"), FormatError, "unexpected .'layers.9.down'"),
    "array missing": (lambda m: m.arrays.pop(), FormatError, "missing .'norm'"),
    "name of a megabyte": (setting("linears.0.name", "x" * MIB), FormatError, "layer name has 1048576 bytes"),
    "unknown mode": (setting("defaultMode", "a2"), UnsupportedError, "default_mode 'a2'"),
    # configuration
    "absurd vocabulary": (config(vocab_size=2**60), FormatError, "vocab_size is 1152921504606846976; expected"),
    "absurd layer count": (config(num_hidden_layers=10**9), FormatError, "num_hidden_layers"),
    "a size that is a boolean": (config(hidden_size=True), FormatError, "hidden_size is True"),
    "a size that is text": (config(hidden_size="32"), FormatError, "hidden_size is '32'"),
    "a negative size": (config(head_dim=-16), FormatError, "head_dim is -16"),
    "a name that is a list": (config(model_type=["llama"]), FormatError, "model_type"),
    "other sizes than the layers'": (config(intermediate_size=64), FormatError, "gate_up is 96 x 32; .* implies 128 x 32"),
    "heads that do not divide": (config(num_attention_heads=3, num_key_value_heads=2), FormatError, "multiple of"),
    "a head of what embeds": (
        config(tie_word_embeddings=False, pooling={"kind": "last", "normalize": True}),
        FormatError,
        r"linear layers do not match its configuration: missing \[\], unexpected \['head'\]",
    ),
    "pooling by an unknown name": (
        config(tie_word_embeddings=False, pooling={"kind": "max", "normalize": True}),
        UnsupportedError,
        "pooling 'max' is not supported; supported: last, mean",
    ),
    "an unknown key": (config(experts=8), UnsupportedError, "unknown keys experts"),
    "an unknown rope key": (config(rope={"beta": 1}), UnsupportedError, "unknown keys beta"),
    "an unknown rope kind": (config(rope={"kind": "dynamic"}), UnsupportedError, "rope kind 'dynamic'"),
    "an infinite theta": (config(rope={"theta": float("inf")}), FormatError, "theta is inf"),
    "an unknown activation": (config(hidden_act="swish"), UnsupportedError, "hidden_act 'swish'"),
    "windows for other layers": (config(sliding_windows=[4]), FormatError, "1 sliding windows for 2 layers"),
    "an absurd window": (config(sliding_windows=[2**70, 0]), FormatError, "sliding_windows"),
    "a million windows": (config(sliding_windows=[0] * 100_000), FormatError, "sliding_windows"),
    "config that is not JSON": (setting("config", "{"), FormatError, "config is not JSON"),
    "config that is a list": (setting("config", "[]"), FormatError, "not a JSON object"),
    "config nested deeply": (setting("config", "[" * 100_000), FormatError, "config is not JSON"),
    "config beyond its limit": (setting("config", " " * (MIB + 1)), FormatError, "config has 1048577 bytes"),
    "provenance nested deeply": (setting("provenance", "[" * 100_000), FormatError, "provenance is nested too deeply"),
    "generation that is a list": (setting("generation", "[]"), FormatError, "generation is not a JSON object"),
    "provenance that is no JSON": (setting("provenance", "{'a': 1}"), FormatError, "provenance|damaged"),
    "a number that JSON does not have": (setting("generation", '{"temperature": NaN}'), FormatError, "the number NaN"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_metadata_with_a_right_digest(forge: Forge, name: str) -> None:
    change, kind, match = HOSTILE[name]
    refused(forge(change), kind, match)
