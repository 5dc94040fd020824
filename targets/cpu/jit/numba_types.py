"""Types that kernels have beside Numba's: sixteen floats, and the view of an op record."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core.datamodel import models, register_default
from numba.core.typing import signature
from numba.core.typing.templates import AttributeTemplate
from numba.extending import infer_getattr, lower_builtin, lower_getattr_generic, register_model, type_callable

from edgeq.targets.cpu.jit.args import RECORD_SLOTS, SLOT_BYTES, Args, Float32, Following, Nested, kinds
from edgeq.targets.cpu.jit.simd import F32, I64, VF32, f32x16, get_i64, load


class VectorType(types.Type):  # type: ignore[misc]
    """Sixteen float32 in a register."""


@register_default(VectorType)
class VectorModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, fe_type: Any) -> None:
        super().__init__(manager, fe_type, VF32)  # type: ignore[no-untyped-call]


f32x16.made = VectorType("f32x16")  # type: ignore[no-untyped-call]


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


def register_kinds() -> None:
    """Tell Numba of the kinds of records that it does not know yet."""
    while kinds:
        # Taken off the list last: an interrupt must not lose one.
        _register(kinds[0])
        kinds.pop(0)


def _register(kind: type[Args]) -> None:
    """Tell Numba that `kind(record)` is a view of the record at that address."""

    @type_callable(kind)  # type: ignore[misc]
    def typed(context: Any) -> Any:
        return lambda record: View(kind) if isinstance(record, types.Integer) else None

    @lower_builtin(kind, types.Integer)  # type: ignore[misc]
    def lowered(context: Any, b: Any, signature: Any, values: Any) -> Any:
        return context.cast(b, values[0], signature.args[0], types.int64)
