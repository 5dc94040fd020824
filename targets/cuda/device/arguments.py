"""The arguments of a kernel, as the driver takes them."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

from edgeq.targets.cuda.supply.pack import POINTER, Parameter

CTYPES: Mapping[str, Any] = {
    POINTER: ctypes.c_void_p,
    "int32": ctypes.c_int32,
    "int64": ctypes.c_int64,
    "float32": ctypes.c_float,
}
MAX_VALUES = {"int32": 1 << 31, "int64": 1 << 63, POINTER: 1 << 63}


def packed(parameters: Sequence[Parameter], arguments: Sequence[int | float]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Values and their C types, as cuLaunchKernel takes them.  ValueError: a value that its type cannot hold.

    A type of C would cut it off, and the kernel would run with another number.
    """
    for parameter, value in zip(parameters, arguments, strict=True):
        limit = MAX_VALUES.get(parameter.type)
        if limit is not None and not (isinstance(value, int) and -limit <= value < limit):
            raise ValueError(f"{parameter.value} = {value!r} is no {parameter.type}")
    return tuple(arguments), tuple(CTYPES[parameter.type] for parameter in parameters)
