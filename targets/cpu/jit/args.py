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
from numba import types
from numba.core.typing import signature
from numba.core.typing.templates import AttributeTemplate
from numba.extending import infer_getattr, lower_builtin, lower_getattr_generic, models, register_model, type_callable

from edgeq.targets.cpu.jit.simd import F32, I64, get_i64, load

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
        _register(cls)

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


class View(types.Type):  # type: ignore[misc]
    """Numba's type of the address of an op record that is read as a kind of `Args`, which begins `shift` slots after it."""

    def __init__(self, kind: type[Args], shift: int = 0) -> None:
        self.kind, self.shift = kind, shift
        super().__init__(f"{kind.__module__}.{kind.__qualname__}+{shift}")  # type: ignore[no-untyped-call]

    def within(self, field: Nested) -> View:
        """The type of a record within this one, or after it."""
        return View(field.kind, self.shift + (RECORD_SLOTS if isinstance(field, Following) else field.slot))


@register_model(View)
class ViewModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, fe_type: Any) -> None:
        super().__init__(manager, fe_type, I64)  # type: ignore[no-untyped-call]


@infer_getattr
class ViewAttributes(AttributeTemplate):  # type: ignore[misc]
    key = View

    def generic_resolve(self, view: View, name: str) -> Any:  # type: ignore[override]
        field = view.kind.fields.get(name)
        if isinstance(field, Nested):
            return view.within(field)
        return field and (types.float32 if isinstance(field, Float32) else types.int64)


@lower_getattr_generic(View)  # type: ignore[misc]
def load_field(context: Any, b: Any, view: View, record: Any, name: str) -> Any:
    """A load in a function of its own: one in line would count when LLVM decides what else it inlines and unrolls."""
    field = view.kind.fields[name]
    if isinstance(field, Nested):
        return record
    offset = ir.Constant(I64, SLOT_BYTES * (view.shift + field.slot))
    if isinstance(field, Float32):
        return load(b, b.add(record, offset), F32, 4)
    return context.compile_internal(b, _get_slot, signature(types.int64, types.intp, types.intp), [record, offset])


def _get_slot(record: int, offset: int) -> Any:
    return get_i64(record + offset)


def _register(kind: type[Args]) -> None:
    """Tell Numba that `kind(record)` is a view of the record at that address."""

    @type_callable(kind)  # type: ignore[misc]
    def typed(context: Any) -> Any:
        return lambda record: View(kind) if isinstance(record, types.Integer) else None

    @lower_builtin(kind, types.Integer)  # type: ignore[misc]
    def lowered(context: Any, b: Any, signature: Any, values: Any) -> Any:
        return context.cast(b, values[0], signature.args[0], types.int64)


Args.fields["rows"].slot = Args.first
_register(Args)
