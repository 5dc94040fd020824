"""A file whose parts have different widths and group sizes runs on both targets alike, in every mode."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from edgeq.converters.convert import convert
from edgeq.converters.planning.options import ConvertOptions
from edgeq.format.container import ModelFile
from edgeq.format.records import Mode
from edgeq.runtime import Model
from edgeq.tools.commands.inspect import layers

TWO_WIDTHS = {
    f"layers.{layer}.{part}": codec
    for layer in range(2)
    for part, codec in (("qkv", "i4 g64 zero"), ("o", "i8 g32 zero"), ("gate_up", "i4 g32 zero"), ("down", "i8 g128 zero"))
} | {"layers.1.qkv": "i8 g64 zero", "layers.1.down": "i4 g16 zero", "head": "i4 g128 zero"}
ALL_WIDTHS = {
    "layers.0.qkv": "i3 g16 zero",
    "layers.0.o": "i2 g64 zero",
    "layers.0.gate_up": "i5 g32 zero",
    "layers.0.down": "i8 g128 zero",
    "layers.1.qkv": "i4 g32 zero",
    "layers.1.o": "i7 g16 zero",
    "layers.1.gate_up": "i2 g32 zero",
    "layers.1.down": "i6 g64 zero",
    "head": "i3 g32 zero",
}
TOKENS = [5, 17, 300, 41, 8, 1999, 77, 12, 640]


def made(folder: Path, path: Path, plan: dict[str, str]) -> Path:
    convert(str(folder), path, ConvertOptions(method="rtn", allocation=plan), lambda *_: None)
    return path


@pytest.mark.parametrize(
    "plan, mode",
    [
        (TWO_WIDTHS, "a16"),
        # Every width compiles kernels of its own.
        pytest.param(ALL_WIDTHS, "a16", marks=pytest.mark.exhaustive),
        pytest.param(ALL_WIDTHS, "a8", marks=pytest.mark.exhaustive),
    ],
    ids=lambda x: x if isinstance(x, str) else f"{len({codec.split()[0] for codec in x.values()})} widths",
)
def test_both_targets_compute_the_same(
    checkpoint: Callable[..., Path], tmp_path: Path, plan: dict[str, str], mode: Mode
) -> None:
    path, found = made(checkpoint("llama_gqa"), tmp_path / "mixed.edgeq", plan), []
    for target in ("cpu", "reference"):
        with Model.load(path, context=32, target=target, mode=mode, threads=1) as model:
            session = model.session()
            prompt = session.prefill(TOKENS[:-1]).copy()
            found.append((prompt, session.decode(TOKENS[-1]).copy()))
    for ours, theirs in zip(*found, strict=True):
        assert np.abs(ours - theirs).max() < 2e-3 * np.abs(theirs).max()


def test_bytes_per_token_and_inspection_count_every_part_in_its_own_width(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    metadata = ModelFile.open(made(checkpoint("llama_gqa"), tmp_path / "mixed.edgeq", ALL_WIDTHS)).metadata
    sizes, linears = metadata.bytes_per_token(), metadata.linears
    norms = sum(array.nbytes for array in metadata.arrays.values())
    assert sizes["weights"] == sum(x.nbytes for name, x in linears.items() if name != "head") + norms
    assert sizes["head"] == linears["head"].nbytes
    shown = layers(list(linears.values()))
    assert {(group["part"], group["codec"]) for group in shown} == {
        (name.split(".")[-1], codec) for name, codec in ALL_WIDTHS.items()
    }
    assert sum(group["bytes"] for group in shown) == sum(linear.nbytes for linear in linears.values())
