"""Argument records: what a launch gives is what the kernel declares, by name and type."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

import pytest

from edgeq.targets.cuda.arguments import RECORDS
from edgeq.targets.cuda.arguments.products import ProductArguments
from edgeq.targets.cuda.arguments.record import Address, Arguments, check_parameters, parameters, suffixed
from edgeq.targets.cuda.arguments.rows import ActivateArguments, SelectArguments, SelectedArguments
from edgeq.targets.cuda.arguments.weights import WeightArguments
from edgeq.targets.cuda.lowering.attention import PART
from edgeq.targets.cuda.lowering.context import Launch
from edgeq.targets.cuda.lowering.largest import DRAW_NUMBERS, MAX_COUNT, SLICE
from edgeq.targets.cuda.supply.pack import POINTER, Variant
from edgeq.targets.graph import Scale

pytestmark = pytest.mark.cuda

CODEC = (4, True, False, 64)
LITERALS = {
    "matvec": CODEC,
    "matmul": CODEC,
    "fused_rows": ("group", *CODEC),
    "fused_activate": ("silu", True, "token", *CODEC),
    "fused_heads": ("int4", True, "group", *CODEC),
    "quantize_input": (True, 64),
    "quantize_input_token": (True, 64),
    "quantize_input_static": (64,),
    "float_product": ("f16",),
    "low_rank": ("f16",),
    "requantize": ("f16", 0, False, 4, True),
    "embed": (4, True),
    "embed_float": ("f16",),
    "activate": ("silu", True),
    "gate": ("none",),
    "largest": (True, SLICE),
    "draw": (MAX_COUNT, DRAW_NUMBERS),
    "head_rotate": (64,),
    "attend": (64, "int4", PART, True),
    "short_conv": (True,),
    "row_before": (True,),
    "state_scan": (True, 32, True),
    "state_keep": (True, 32),
    "gated_norm": (True,),
}
"""Those of kernels that have some."""
ACTIVATE = ActivateArguments(x=256, out=512, stride=16, width=8)


@dataclass(frozen=True, kw_only=True)
class PairArguments(Arguments, run=()):
    x: Address
    weight: WeightArguments
    second: WeightArguments | None = suffixed("2", default=None)


@dataclass(frozen=True, kw_only=True)
class TwiceArguments(Arguments, run=("tokens", "pool")):
    x: Address
    pool: Address
    rows: SelectedArguments


def declared(kernel: str) -> dict[str, str]:
    from edgeq.targets.cuda.kernels import FUNCTIONS
    from edgeq.targets.cuda.kernels.generate import declared

    return dict(declared(FUNCTIONS[kernel](*LITERALS.get(kernel, ()))))


@pytest.mark.exhaustive
def test_every_kernel_declares_what_its_record_has(needs_generator: None) -> None:
    from edgeq.targets.cuda.kernels import FUNCTIONS

    assert FUNCTIONS.keys() == RECORDS.keys()
    family: dict[type[Arguments], set[tuple[str, str]]] = defaultdict(set)
    for kernel, record in RECORDS.items():
        parameters_of_kernel = declared(kernel)
        family[record] |= parameters_of_kernel.items()
        check_parameters(record, kernel, parameters_of_kernel)
    assert {record: names for record, names in family.items() if names != parameters(record).items()} == {}


def test_a_kernel_with_another_parameter_is_not_generated(needs_generator: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from edgeq.targets.cuda.kernels.generate import generate

    monkeypatch.setattr("edgeq.targets.cuda.kernels.generate.RECORDS", {**RECORDS, "scale": ActivateArguments})
    with pytest.raises(TypeError, match="ActivateArguments does not have what scale takes: add: int32, factor: float32"):
        generate(Variant("scale"))


def test_a_type_that_differs_is_told() -> None:
    names = {"x": "int32", "out": POINTER, "width": "float32", "widht": "int32", "tokens": "int32"}
    with pytest.raises(TypeError, match="activate takes: x: int32, width: float32, widht: int32"):
        check_parameters(ActivateArguments, "activate", names)


def test_records_within_a_record_have_their_names_in_it() -> None:
    first, second = SelectedArguments(x=1, out=2, width=3), SelectedArguments(x=4, out=5, width=6)
    arguments = SelectArguments(wanted=9, first=first, second=second)
    assert arguments.by_name == {"wanted": 9, "x": 1, "out": 2, "width": 3, "x2": 4, "out2": 5, "width2": 6}
    assert parameters(SelectArguments).keys() == arguments.by_name.keys() | {"tokens"}

    weight = WeightArguments(q=1, s=2, z=3, u=4, chunks=5)
    pair = PairArguments(x=5, weight=weight)
    assert pair.by_name == {"x": 5, "q": 1, "s": 2, "z": 3, "u": 4, "chunks": 5}
    assert replace(pair, second=weight).by_name == {**pair.by_name, "q2": 1, "s2": 2, "z2": 3, "u2": 4, "chunks2": 5}
    assert parameters(PairArguments) == {
        **dict.fromkeys(("x", "q", "s", "z", "u", "q2", "s2", "z2", "u2"), POINTER), "chunks": "int32", "chunks2": "int32",
    }  # fmt: skip


def test_a_name_that_occurs_twice_is_refused() -> None:
    with pytest.raises(TypeError, match="TwiceArguments has a name twice: out, pool, pool, tokens, width, x, x"):
        parameters(TwiceArguments)


def test_a_launch_has_the_record_of_its_kernel() -> None:
    op, variant = Scale(0, "x", 2.0, "y"), Variant("activate", ("silu", True))
    launch = Launch(op, 0, variant, ACTIVATE)
    assert launch.arguments.by_name == {"x": 256, "out": 512, "stride": 16, "width": 8}
    with pytest.raises(TypeError, match="scale takes no ActivateArguments"):
        Launch(op, 0, Variant("scale"), ACTIVATE)
    with pytest.raises(TypeError, match="matmul takes no ActivateArguments"):
        replace(launch, matmul=Variant("matmul", CODEC))
    with pytest.raises(TypeError, match="ActivateArguments has no scale"):
        replace(launch, moved={"scale": ("factors", 0)})


def test_a_missing_or_unknown_argument_is_refused() -> None:
    with pytest.raises(TypeError, match="width"):
        ActivateArguments(x=1, out=2, stride=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="widht"):
        ActivateArguments(x=1, out=2, stride=3, width=4, widht=5)  # type: ignore[call-arg]
    assert RECORDS["matvec"] is RECORDS["matmul"] is ProductArguments
