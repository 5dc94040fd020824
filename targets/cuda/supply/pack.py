"""Generated kernels as data: CUDA text, and how to launch it.  Nothing here needs what generated them.

Parameters are named, because a code generator orders them as it likes and adds values that it computed from others.  Sizes of a
launch and such values are expressions over the scalars of the kernel, as JSON: a whole number, the name of a scalar, or
[operation, operand, operand].
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from edgeq.errors import FormatError

Expression = int | str | list[Any]
Scalars = Mapping[str, int | float]

POINTER, SCALARS = "pointer", ("int32", "int64", "float32")
MAX_DEPTH = 32
MAX_PARAMETERS = 80
MAX_LITERALS = 16
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}", re.ASCII)
DAMAGED = "a stored kernel is damaged; delete it, and it is generated again"
MAX_VALUE = 1 << 62
"""Values of expressions: the sizes of a grid and the scalars of a kernel are below it."""
OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "//": operator.floordiv,
    "%": operator.mod,
    "min": min,
    "max": max,
}


class Variant(NamedTuple):
    """A kernel and the literals it is generated with: what changes its inner loop."""

    kernel: str
    literals: tuple[int | str | bool, ...] = ()

    @property
    def symbol(self) -> str:
        """Its name in CUDA text."""
        return "_".join([self.kernel, *(str(int(v)) if isinstance(v, bool) else str(v) for v in self.literals)])


@dataclass(frozen=True)
class Parameter:
    """type   "pointer" or one of SCALARS;  value: the expression of a scalar, the name of a pointer"""

    type: str
    value: Expression


@dataclass(frozen=True)
class Generated:
    """One kernel.

    text     CUDA C without a preamble, with one kernel, `name`
    grid, block   three expressions each
    image    machine code or PTX of the text, for the device that loads it; empty where it was generated and not compiled
    """

    variant: Variant
    name: str
    text: str
    parameters: tuple[Parameter, ...]
    grid: tuple[Expression, ...]
    block: tuple[Expression, ...]
    image: bytes = field(default=b"", repr=False)

    def bind(self, scalars: Scalars) -> tuple[list[int], list[int], list[int | float]]:
        """Grid, block and arguments of a launch; `scalars` has all scalars and pointers by name, and may have more."""
        arguments = [evaluate(p.value, scalars) for p in self.parameters]
        return [whole(e, scalars) for e in self.grid], [whole(e, scalars) for e in self.block], arguments


def whole(expression: Expression, scalars: Scalars) -> int:
    return int(evaluate(expression, scalars))


def evaluate(expression: Expression, scalars: Scalars, depth: int = 0) -> int | float:
    """The value of an expression.  FormatError: it is none, a name is unknown, it is too deep or too large."""
    if isinstance(expression, str):
        if expression not in scalars:
            raise FormatError(f"a kernel asks for {expression!r}, which no launch has")
        return scalars[expression]
    if isinstance(expression, int) and not isinstance(expression, bool):
        return expression
    if depth == MAX_DEPTH:
        raise FormatError(f"an expression of a launch is more than {MAX_DEPTH} deep")
    if not isinstance(expression, list) or len(expression) != 3 or not isinstance(expression[0], str):
        raise FormatError(f"not an expression of a launch: {str(expression)[:80]}")
    combine = OPERATIONS.get(expression[0])
    if combine is None:
        raise FormatError(f"unknown operation {expression[0]!r} in a launch; supported: {', '.join(OPERATIONS)}")
    a, b = (evaluate(operand, scalars, depth + 1) for operand in expression[1:])
    if expression[0] in ("//", "%") and b == 0:
        raise FormatError("an expression of a launch divides by zero")
    value: int | float = combine(a, b)
    if abs(value) > MAX_VALUE:
        raise FormatError("an expression of a launch is too large")
    return value


def checked(expression: Any, depth: int = 0) -> Expression:
    """An expression of a stranger's, its form checked.  FormatError: it is none."""
    if isinstance(expression, str) and NAME.fullmatch(expression):
        return expression
    if isinstance(expression, int) and not isinstance(expression, bool) and abs(expression) <= MAX_VALUE:
        return expression
    operation = expression[0] if isinstance(expression, list) and len(expression) == 3 and depth < MAX_DEPTH else None
    if not isinstance(operation, str) or operation not in OPERATIONS:
        raise FormatError(f"not an expression of a launch: {str(expression)[:80]}")
    for operand in expression[1:]:
        checked(operand, depth + 1)
    return expression  # type: ignore[no-any-return]


def record(generated: Generated) -> dict[str, Any]:
    """A kernel as JSON has it, without its text and image."""
    fields = asdict(generated) | {"variant": [generated.variant.kernel, *generated.variant.literals]}
    return {name: value for name, value in fields.items() if name not in ("text", "image")}


def of_record(fields: Any, text: str) -> Generated:
    """The inverse of `record`.  FormatError: that is no kernel."""
    try:
        kernel, *literals = fields["variant"]
        parameters = tuple(Parameter(p["type"], p["value"]) for p in fields["parameters"])
        grid, block = (tuple(fields[key]) for key in ("grid", "block"))
        name = fields["name"]
    except (ValueError, KeyError, TypeError):
        raise FormatError(DAMAGED) from None
    if (
        len(parameters) > MAX_PARAMETERS
        or len(literals) > MAX_LITERALS
        or not all(isinstance(text, str) and NAME.fullmatch(text) for text in (kernel, name))
        or not all(isinstance(value, int) or (isinstance(value, str) and NAME.fullmatch(value)) for value in literals)
        or not all(p.type in (POINTER, *SCALARS) for p in parameters)
        or not len(grid) == len(block) == 3
    ):
        raise FormatError(DAMAGED)
    for expression in (*grid, *block, *(p.value for p in parameters)):
        checked(expression)
    return Generated(Variant(kernel, tuple(literals)), name, text, parameters, grid, block)


def encode(generated: Generated) -> str:
    return json.dumps(record(generated) | {"text": generated.text})


def decode(stored: str) -> Generated:
    """The inverse of `encode`.  FormatError: that is no kernel."""
    try:
        found = json.loads(stored)
        text = found["text"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise FormatError(DAMAGED) from None
    if not isinstance(text, str):
        raise FormatError(DAMAGED)
    return of_record(found, text)
