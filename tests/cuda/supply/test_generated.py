"""What TVM generates: the same text each time, compiled for every GPU; test_generated_products.py has the products."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from edgeq.errors import UnsupportedError
from edgeq.format.codec import BITS
from edgeq.format.records import KV_KINDS
from edgeq.targets.cuda.lowering.attention import MAX_CODED_HEAD, PART
from edgeq.targets.cuda.lowering.largest import DRAW_NUMBERS, MAX_COUNT, SLICE
from edgeq.targets.cuda.supply import build, nvrtc
from edgeq.targets.cuda.supply.pack import Variant, encode
from edgeq.targets.graph import Function
from tests.cuda.compiling import compiles_for_every_gpu

pytestmark = pytest.mark.cuda

HEADS = (20, 32, 64, 72, 80, 96, 128, 256, 512)
ATTENDED = (20, 80, 100, 128, 256, 512)
"""Two of these have no whole words of 16 bytes, one an odd number of chunks; the last four take the most registers.  Each comes
with each kind of cache, with either for one row or for a block of them in turn."""
INPUTS = [Variant("quantize_input", (integer, group)) for integer in (False, True) for group in (16, 32, 64, 128)]
EMBEDS = [Variant("embed", (bits, zero)) for bits in BITS for zero in (False, True)]
EMBEDS += [
    Variant("embed", each) for each in ((7, "half"), (2, "s4"), (1, "table"), (4, "table"), (2, "trellis"), (3, "trellis"))
]
FUNCTIONS = (
    "rms_norm", "layer_norm", "head_norm", "value_norm", "activate_clamped", "scale", "array_scale", "soft_cap", "limit",
    "row_mean", "scale_shift", "inject", "select", "rope", "cache_write", "cache_write_int8", "cache_write_int4", "share_scale",
    "arrange", "butterflies", "split_row", "add_squares", "route", "route_by_sigmoids", "scatter", "gather_add", "gated_add",
    "low_rank_add", "read_memory",
)  # fmt: skip
"""Kernels without literals."""
CODECS = [
    *((bits, True, False, 128) for bits in BITS),
    *((4, False, group in (16, 64), group) for group in (16, 32, 64, 128)),
    (2, True, True, 32),
    (8, True, True, 64),
    (3, "trellis", False, 128),
]
TWO = (4, False, True, 128, 8, False, False, 128)
FUSED = [
    *(Variant("fused_rows", ("group", *codec)) for codec in CODECS),
    *(Variant("fused_rows", (rule, *TWO[:4])) for rule in ("token", "static")),
    *(Variant("fused_activate", (f, f != "relu", "group", *CODECS[2])) for f in ("silu", "gelu", "relu")),
    Variant("fused_activate", ("silu", True, "token", *TWO)),
    *(Variant("fused_heads", (kv, rotated, "group", *CODECS[2])) for kv in KV_KINDS for rotated in (False, True)),
    *(Variant("fused_heads", (kv, True, "token", *TWO)) for kv in KV_KINDS),
    *(Variant("fused_heads", ("int4", True, "group", *(4, True, False, group) * 2)) for group in (16, 64)),
]
"""One or two of each kind: their inner loop is that of `matvec`."""
MASTERS = [
    *(("int", bits, zero) for bits in (4, 5, 8) for zero in (False, True)),
    *((kind, 0, False) for kind in ("f16", "bf16", "f32")),
]
OTHERS = [
    *(
        Variant("attend", (head_dim, kv, PART, packed))
        for at, head_dim in enumerate(ATTENDED)
        for which, kv in enumerate(KV_KINDS)
        for packed in (False, True)
        if (at + which) % 2 == packed or head_dim > MAX_CODED_HEAD
        if head_dim <= MAX_CODED_HEAD or kv == "f16"
    ),
    Variant("attend", (256, "f16", PART, False, True, False)),
    *(Variant("head_rotate", (head_dim,)) for head_dim in HEADS),
    *(Variant("quantize_input_token", (integer, group)) for integer in (False, True) for group in (16, 32, 64, 128)),
    *(Variant("quantize_input_static", (group,)) for group in (16, 32, 64, 128)),
    *(Variant(name, (kind,)) for name in ("float_product", "embed_float", "low_rank") for kind in ("f16", "bf16", "f32")),
    *(Variant("activate", (function, gated)) for function in get_args(Function) for gated in (False, True)),
    *(Variant("gate", (function,)) for function in ("sigmoid", "silu", "none")),
    *(Variant("requantize", (*master, 4, zero)) for master in MASTERS for zero in (False, True)),
    *(Variant("requantize", (*MASTERS[-1], bits, zero)) for bits in BITS if bits != 4 for zero in (False, True)),
    *(Variant("largest", (first, SLICE)) for first in (True, False)),
    Variant("draw", (MAX_COUNT, DRAW_NUMBERS)),
    *(Variant(name, (kind,)) for name in ("short_conv", "row_before", "gated_norm") for kind in (False, True)),
    *(Variant("state_scan", (delta, 128, keeps)) for delta in (False, True) for keeps in (False, True)),
    *(Variant("state_keep", (delta, 128)) for delta in (False, True)),
    *(Variant(name) for name in FUNCTIONS),
]
SHARE = {
    Variant("embed", (8, False)),
    Variant("attend", (32, "f16", PART, False)),
    *(Variant(name) for name in ("rms_norm", "select", "rope", "cache_write")),
}
"""What `make test` compiles; the rest is for `make test-cuda`."""
EVERY = (*INPUTS, *FUSED, *EMBEDS, *OTHERS)
FIRST = {v for v in EVERY if v == next(each for each in EVERY if each.kernel == v.kernel)}
"""One of each kind, which is compiled for every GPU whatever it takes."""
VARIANTS = [pytest.param(v, marks=() if v in SHARE else pytest.mark.exhaustive, id=v.symbol) for v in EVERY]


@pytest.fixture(autouse=True)
def needed(needs_generator: None) -> None:
    if reason := nvrtc.refusal():
        pytest.skip(reason)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_kernel_compiles_for_every_gpu_and_spills_nothing(variant: Variant) -> None:
    compiles_for_every_gpu(variant, every=variant in FIRST)


def test_no_source_is_looked_for_when_an_inline_function_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """To look for that of each frame in each loaded module takes longer than all else that makes a kernel."""
    from edgeq.targets.cuda.kernels.generate import generate

    variant = Variant("matvec", (4, True, True, 128))
    (wanted,) = build.kernels([variant])
    monkeypatch.delattr("inspect.getouterframes")
    monkeypatch.setattr("inspect.stack", lambda *_, **__: [])
    assert generate(variant) == wanted


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "variant", [Variant("cache_write_int4"), Variant("matvec", (4, True, False, 128))], ids=lambda variant: variant.symbol
)
def test_a_text_is_the_one_that_tvm_makes_by_itself(variant: Variant, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without what generate.py remembers and looks up; of a kernel whose inline function has another one in it, too."""
    from edgeq.targets.cuda.kernels import generate

    wanted = generate.generate(variant)
    read = list[str]()

    def as_ast(source: generate.Source) -> object:
        read.append(source.source)
        return generate.doc.parse(source.source)

    monkeypatch.setattr(generate.Source, "as_ast", as_ast)
    monkeypatch.setattr(generate.evaluator, "_eval_expr", generate.compiled_expression)
    assert generate.generate(variant) == wanted and len(read) > len(set(read))


@pytest.mark.exhaustive
def test_text_and_machine_code_are_the_same_each_time(tmp_path: Path) -> None:
    """In processes of their own, whose hashes of strings differ, with nothing kept."""
    variant = Variant("matvec", (3, True, True, 16))
    code = (
        "from edgeq.targets.cuda.kernels.generate import generate; from edgeq.targets.cuda.supply.pack import Variant, encode;"
        f"print(encode(generate(Variant({variant.kernel!r}, {variant.literals!r}))))"
    )
    (generated,) = build.kernels([variant])
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert json.loads(other) == json.loads(encode(generated))
    assert nvrtc.compiled(generated, "sm_87") == nvrtc.compiled(generated, "sm_87")


def test_a_kernel_is_kept_and_a_damaged_one_is_generated_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    variant = Variant("select")
    first = build.kernels([variant])
    (path,) = (tmp_path / "edgeq" / "cuda").iterdir()
    stored = path.read_text()
    assert build.kernels([variant]) == first
    for damage in ("", stored[:-20], stored.replace("select", "s")):
        path.write_text(damage)
        assert build.kernels([variant]) == first
        assert path.read_text() == stored
    path.unlink()
    path.parent.rmdir()
    path.parent.write_text("a file where the folder should be")
    assert build.kernels([variant]) == first


def test_without_tvm_the_kernel_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "refusal", lambda: "apache-tvm is not installed; run: pip install edgeq[build]")
    with pytest.raises(UnsupportedError, match=r"matvec_4_1_0_128 .* pip install edgeq\[build\]"):
        build.kernels([Variant("matvec", (4, True, False, 128))])
