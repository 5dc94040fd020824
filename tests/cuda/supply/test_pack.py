"""Generated kernels as data: expressions are evaluated, never executed, and a damaged kernel is one error."""

from __future__ import annotations

import json

import pytest

from edgeq.errors import FormatError
from edgeq.targets.cuda.supply.pack import Generated, Parameter, Variant, decode, encode, evaluate

pytestmark = pytest.mark.cuda

KERNEL = Generated(
    Variant("matvec", (4, True, 128)),
    "matvec_4_1_128_kernel",
    "text",
    (Parameter("pointer", "x"), Parameter("int32", ["*", "heads", "pairs"]), Parameter("float32", "eps")),
    (["//", ["+", "rows", 15], 16], 1, 1),
    (128, 1, 1),
)


def test_a_launch_is_bound_by_name() -> None:
    grid, block, arguments = KERNEL.bind({"rows": 33, "x": 1 << 40, "heads": 3, "pairs": 16, "eps": 1e-5, "unused": 1})
    assert (grid, block, arguments) == ([3, 1, 1], [128, 1, 1], [1 << 40, 48, 1e-5])


def test_a_kernel_is_stored_and_read() -> None:
    assert decode(encode(KERNEL)) == KERNEL
    assert KERNEL.variant.symbol == "matvec_4_1_128"


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("nothing", "no launch has"),
        (["**", 9, 9], "unknown operation"),
        (["__import__('os')", 1, 1], "unknown operation"),
        (["//", 1, 0], "divides by zero"),
        (["%", 1, ["-", 2, 2]], "divides by zero"),
        (["*", 1 << 40, 1 << 40], "too large"),
        (["+", 1], "not an expression"),
        (["+", 1, 2, 3], "not an expression"),
        ({"+": 1}, "not an expression"),
        (True, "not an expression"),
        (1.5, "not an expression"),
        (None, "not an expression"),
    ],
)
def test_a_wrong_expression_is_refused(expression: object, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        evaluate(expression, {"rows": 1})  # type: ignore[arg-type]


def test_a_deep_expression_is_refused() -> None:
    expression: object = 1
    for _ in range(2000):
        expression = ["+", expression, 1]
    with pytest.raises(FormatError, match="deep"):
        evaluate(expression, {})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "change",
    [
        {"grid": [1, 1]},
        {"parameters": [{"type": "int8", "value": "x"}]},
        {"parameters": [{"type": "int32", "value": "x"}] * 1000},
        {"variant": []},
        {"text": 5},
        {"name": None},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_damaged_kernel_is_refused(change: dict[str, object]) -> None:
    stored = json.loads(encode(KERNEL)) | change
    with pytest.raises(FormatError, match="damaged"):
        decode(json.dumps(stored))


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "[" * 100000, '{"variant": 3}'])
def test_what_is_no_kernel_is_refused(text: str) -> None:
    with pytest.raises(FormatError, match="damaged"):
        decode(text)
