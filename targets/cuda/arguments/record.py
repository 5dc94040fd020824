"""Named argument records: what a kernel takes, declared once, by name and type.

    @dataclass(frozen=True, kw_only=True)
    class ScaleArguments(Arguments):
        x: Address
        out: Address
        width: Int32
        factor: Float32

    ScaleArguments(x=..., out=..., width=64, factor=0.5)     a launch; a missing or an unknown name is a TypeError

The generator of a kernel refuses one whose parameters are not those of its record (`check_parameters`).  A field that is a
record itself has its arguments in this place, with a suffix after their names where one is declared; None: without them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Annotated, Any, ClassVar, get_args, get_type_hints

from edgeq.targets.cuda.supply.pack import POINTER

Address = Annotated[int, POINTER]
"""Address of an array on the device; 0 where a kernel does not read it."""
Int32 = Annotated[int, "int32"]
Float32 = Annotated[float, "float32"]
Value = int | float

OF_A_RUN: Mapping[str, str] = {
    "tokens": "int32", "sessions": "int32", "pool": POINTER, "numbers": POINTER, "parts": "int32", "taken": "int32",
}  # fmt: skip
"""What a kernel gets of the run, beside its record.

tokens    token rows;  sessions: those of the run, some of which may have no rows
pool      the address from which entries of page tables count, in the type of a cached key; `numbers`: the same address, f32,
          from which states count too
parts     of the longest context, which are taken side by side; 0: one after the other.  taken: by each block of threads
"""


def suffixed(suffix: str, **default: Any) -> Any:
    """A field that is a record whose names get `suffix`; with `default=None` it may be left out."""
    return field(metadata={"suffix": suffix}, **default)


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Base of all records.  `run`: those of OF_A_RUN that the kernel takes too."""

    run: ClassVar[frozenset[str]] = frozenset({"tokens"})

    def __init_subclass__(cls, run: Iterable[str] = ("tokens",)) -> None:
        cls.run = frozenset(run)

    @cached_property
    def by_name(self) -> Mapping[str, Value]:
        """The arguments by the names of the kernel's parameters."""
        values = dict[str, Value]()
        for each in fields(self):
            value, suffix = getattr(self, each.name), each.metadata.get("suffix", "")
            if isinstance(value, Arguments):
                values |= {name + suffix: number for name, number in value.by_name.items()}
            elif value is not None:
                values[each.name] = value
        return values


def parameters(record: type[Arguments]) -> Mapping[str, str]:
    """Names and types of the parameters that a kernel of this record may have.  TypeError: a name occurs twice."""
    names = [*_declared(record), *((name, OF_A_RUN[name]) for name in record.run)]
    if len(dict(names)) < len(names):
        raise TypeError(f"{record.__name__} has a name twice: {', '.join(sorted(name for name, _ in names))}")
    return dict(names)


def check_parameters(record: type[Arguments], kernel: str, declared: Mapping[str, str]) -> None:
    """TypeError: a kernel declares a parameter that its record does not have, or has with another type."""
    known = parameters(record)
    strange = [f"{name}: {kind}" for name, kind in declared.items() if known.get(name) != kind]
    if strange:
        raise TypeError(f"{record.__name__} does not have what {kernel} takes: {', '.join(strange)}")


def _declared(record: type[Arguments]) -> Iterator[tuple[str, str]]:
    hints = get_type_hints(record, include_extras=True)
    for each in fields(record):
        hint = hints[each.name]
        nested = [kind for kind in (hint, *get_args(hint)) if isinstance(kind, type) and issubclass(kind, Arguments)]
        if nested:
            suffix = each.metadata.get("suffix", "")
            yield from ((name + suffix, kind) for name, kind in _declared(nested[0]))
        else:
            yield each.name, get_args(hint)[1]
