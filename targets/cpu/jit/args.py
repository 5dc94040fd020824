"""Named argument records: a kernel declares its arguments once; the lowering fills them in by name, the kernel reads them so.

    class ScaleArgs(Args):
        x = pointer()
        x_stride = nbytes()
        factor = float32()

    ScaleArgs(x=..., x_stride=..., factor=0.5)      the arguments; a missing or an unknown name is a TypeError
    args = ScaleArgs(record)                        in a kernel: a view of the record at that address; `args.factor` is a load

A record is a row of int64 in the op table: FUNCTION, ROWS, the arguments in the order of their declaration, and in the last
place PARTS.  A record within a record (`nested`) has its arguments in a row at that place; in a kernel it is a view as well.
"""

from __future__ import annotations

import struct
from typing import Any, ClassVar

from llvmlite import ir

from edgeq.targets.cpu.jit.simd import I64, load

SLOT_BYTES = 8
RECORD_SLOTS = 32
RECORD_BYTES = SLOT_BYTES * RECORD_SLOTS
FUNCTION = 0
"""Slot of a record: the address of the kernel."""
PARTS = RECORD_SLOTS - 1
"""Slot of a record: into how many parts the operation is cut."""


class Field:
    """One argument.  On a class it is this declaration, on an object with arguments their value."""

    name: str
    slot: int
    size = 1

    def __init__(self, default: Any = None) -> None:
        self.default = default

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, instance: Any, owner: type) -> Any:
        return self if instance is None else instance.values[self.name]

    def words(self, value: Any) -> list[int]:
        """The value as the record holds it."""
        return [int(value)]

    def load(self, b: Any, record: Any) -> Any:
        """Emit LLVM IR that loads the argument from the record at address `record`: for what is written in IR."""
        return load(b, b.add(record, ir.Constant(I64, SLOT_BYTES * self.slot)), I64, SLOT_BYTES)


class Float32(Field):
    """The bits of a float32 in the low half of the slot."""

    def words(self, value: Any) -> list[int]:
        return [int(struct.unpack("<i", struct.pack("<f", value))[0])]


class Nested(Field):
    """A record within a record."""

    def __init__(self, kind: type[Args], default: Any = None) -> None:
        super().__init__(default)
        self.kind, self.size = kind, sum(field.size for field in kind.fields.values())

    def words(self, value: Any) -> list[int]:
        if type(value) is not self.kind:
            raise TypeError(f"{self.name} is a {self.kind.__name__}, not {value!r}")
        return list(value.words())


class Following(Nested):
    """The next op record, not a part of this one."""

    def __init__(self, kind: type[Args]) -> None:
        super().__init__(kind, 0)
        self.size = 0

    def words(self, value: Any) -> list[int]:
        return []


def pointer(default: int | None = None) -> Any:
    """An address; by convention 0 is none."""
    return Field(default)


def nbytes(default: int | None = None) -> Any:
    """A number of bytes, such as from one row to the next."""
    return Field(default)


def number(default: int | None = None) -> Any:
    """A count, an index or a flag."""
    return Field(default)


def float32(default: float | None = None) -> Any:
    return Float32(default)


def nested(kind: type[Args], default: Args | None = None) -> Any:
    return Nested(kind, default)


def following(kind: type[Args]) -> Any:
    """In a kernel a view of the next op record; nothing to fill in."""
    return Following(kind)


kinds: list[type[Args]] = []
"""Those that Numba has not been told of."""


class Args:
    """Base of all argument records; not for changing once made."""

    first: ClassVar[int] = 1
    """Slot of the first field."""

    rows = pointer(0)
    """Address of the number of rows, an int64, that the operation runs over."""

    fields: ClassVar[dict[str, Field]] = {"rows": rows}

    def __init_subclass__(cls, part: bool = False, **options: Any) -> None:
        """`part`: a record that occurs within others only, without `rows`."""
        super().__init_subclass__(**options)
        declared = {name: value for name, value in vars(cls).items() if isinstance(value, Field)}
        cls.fields = declared if part else {**cls.fields, **declared}
        cls.first = 0 if part else 1
        slot = cls.first
        if clash := declared.keys() & {"fields", "first", "record", "replaced", "values", "words"}:
            raise TypeError(f"{cls.__name__}: {sorted(clash)} would hide what every record has")
        for field in cls.fields.values():
            field.slot = slot
            slot += field.size
        if slot > PARTS:
            raise TypeError(f"{cls.__name__} takes {slot} slots of a record; there are {PARTS}")
        kinds.append(cls)

    def __init__(self, record: int | None = None, **values: Any) -> None:
        """The arguments by name.  In a kernel instead: a view of those in the op record at an address."""
        if record is not None:
            raise TypeError(f"only a kernel reads {type(self).__name__} from a record")
        defaults = {name: field.default for name, field in self.fields.items() if field.default is not None}
        self.values = defaults | values
        missing, unknown = self.fields.keys() - self.values.keys(), values.keys() - self.fields.keys()
        if missing or unknown:
            raise TypeError(f"{type(self).__name__}: missing {sorted(missing)}, unknown {sorted(unknown)}")

    def replaced(self, **values: Any) -> Args:
        """The same with other values of some fields."""
        return type(self)(**{**self.values, **values})

    def words(self) -> list[int]:
        """The fields as a record holds them, in order."""
        return [word for name, field in self.fields.items() for word in field.words(self.values[name])]

    def record(self, function: int = 0, parts: int = 1) -> list[int]:
        """A whole op record."""
        words = [function, *self.words()]
        return [*words, *[0] * (PARTS - len(words)), parts]


Args.fields["rows"].slot = Args.first
kinds.append(Args)
