"""What kernels are written with, without importing Numba: that takes a second and 14 MB, and only compiling needs it.

A function that kernels call is kept as a Part, a type by its name.  Before pipeline.py compiles, it makes Numba's own of them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, update_wrapper
from importlib import import_module
from typing import Any, Literal, NamedTuple

Make = Literal["inline", "always_inline", "intrinsic", "literal_intrinsic"]
SYMBOL = "kernel"
"""Name of the function in an object file."""


class ObjectFile(NamedTuple):
    """An object file; `needs`: the names of the C library that it uses."""

    code: bytes
    needs: list[str]


class DeferredFunction:
    """A function that kernels call.  Called by Python it is what it was.

    make            which of Numba's decorators in pipeline.py makes its own of the function
    targetoptions   where Numba looks whether to put the function into who calls it
    """

    def __init__(self, function: Callable[..., Any], make: Make) -> None:
        update_wrapper(self, function)
        self.py_func, self.make = function, make
        self.targetoptions = {"inline": "always"} if make == "always_inline" else {}
        parts.append(self)

    def __call__(self, *arguments: Any) -> Any:
        return self.py_func(*arguments)


parts: list[DeferredFunction] = []
"""Those that Numba has not been told of."""


def inline(function: Callable[..., Any]) -> Any:
    """For functions that kernels are made of."""
    return DeferredFunction(function, "inline")


def always_inline(function: Callable[..., Any]) -> Any:
    """The same, but into the kernel before it is typed: a function of its own would be compiled twice."""
    return DeferredFunction(function, "always_inline")


def intrinsic(function: Callable[..., Any]) -> Any:
    """For a function of Numba's typing context and types of arguments, which gives a signature and what emits code."""
    return DeferredFunction(function, "intrinsic")


def literal_intrinsic(function: Callable[..., Any]) -> Any:
    """The same; constants come as types of their own, with their values."""
    return DeferredFunction(function, "literal_intrinsic")


class Type:
    """One of Numba's types by its name, or of ours, which numba_types.py makes; called with types it is a signature."""

    def __init__(self, name: str) -> None:
        self._name = name

    @cached_property
    def made(self) -> Any:
        return getattr(import_module("numba.types"), self._name)

    def __call__(self, *arguments: Any) -> Any:
        return self.made(*(each.made if isinstance(each, Type) else each for each in arguments))


class _Types:
    def __getattr__(self, name: str) -> Type:
        return Type(name)


class _Cgutils:
    def __getattr__(self, name: str) -> Any:
        return getattr(import_module("numba.core.cgutils"), name)


types: Any = _Types()
cgutils: Any = _Cgutils()
"""Numba's module of this name, which emits loops and slots of the stack."""
