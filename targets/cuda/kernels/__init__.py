"""The kernels, in native TIRx, by name: functions from literals to a PrimFunc.

This folder alone imports tvm.  Sizes are scalars of a launch; only what changes an inner loop is a literal, so a new model
generates nothing.  A vector load wants its multiple visible where it is: `buffer[unit * 8 + v]`.
"""

from edgeq.targets.cuda.kernels.attention import attend, cache_write, rope
from edgeq.targets.cuda.kernels.form import form
from edgeq.targets.cuda.kernels.product import few, many
from edgeq.targets.cuda.kernels.rows import embed, rms_norm, select, swiglu

FUNCTIONS = {
    "few": few,
    "many": many,
    "form": form,
    "embed": embed,
    "rms_norm": rms_norm,
    "swiglu": swiglu,
    "select": select,
    "rope": rope,
    "cache_write": cache_write,
    "attend": attend,
}
RESIDENT = {"few": 6, "many": 2}
"""Blocks that a multiprocessor is to hold.  Left to itself, the compiler aimed at 12 of `few` or 3 of `many`, and spilled
registers of some variants for them."""
