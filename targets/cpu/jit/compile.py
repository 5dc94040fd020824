"""Kernels as machine code with one signature, compiled on first use and kept on disk.

A kernel is `void (record address, part, parts, thread)`: it reads its arguments from an op record of the program's table
(args.py), so a new model compiles nothing.  The folder of the machine code is named by a digest of this package's sources, of
the versions of Numba and LLVM and of the processor: whatever could change it.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import platform
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite
import llvmlite.binding as llvm
import numba
from numba import _helperlib, cfunc, njit, types
from numba.core.base import _load_global_helpers
from numba.core.intrinsics import INTR_MATH
from numba.core.runtime import _nrt_python

from edgeq import codec, machine, quantization
from edgeq.targets import rows
from edgeq.targets.cpu.jit import arm

# Before the first function is made: Numba fixes its processor then.
arm.configure()
llvm.initialize_native_target()
llvm.initialize_native_asmprinter()
# For the one line of assembly that reads the clock of an Arm processor.
llvm.initialize_native_asmparser()

SIGNATURE = types.void(types.intp, types.intp, types.intp, types.intp)
Kernel = Callable[[int, int, int, int], None]
"""A Python function (row address, part, parts, thread) that becomes machine code."""


@cache
def cache_folder() -> Path:
    # The modules outside of this package whose numbers become constants of the machine code.
    outside = [Path(str(module.__file__)) for module in (codec, quantization, rows)]
    sources = [*sorted(Path(__file__).parents[1].rglob("*.py")), *outside]
    seen = hashlib.blake2b(digest_size=8)
    for part in (*(path.read_bytes() for path in sources), *(v.encode() for v in (numba.__version__, llvmlite.__version__))):
        seen.update(part)
    seen.update(" ".join(sorted(machine.cpu().features)).encode())
    return machine.cache_folder() / f"kernels-{seen.hexdigest()}"


@cache
def address(factory: Callable[..., Kernel], *literals: int) -> int:
    """Address of the kernel that `factory(*literals)` defines.  Literals become constants of the machine code."""
    return _loaded(_file(factory, *literals)) or _compiled(_file(factory, *literals), factory(*literals), SIGNATURE)


def is_kept(factory: Callable[..., Any], *literals: int) -> bool:
    """Whether the kernel needs no compilation."""
    return os.path.exists(_file(factory, *literals))


def assembly(factory: Callable[..., Kernel], *literals: int) -> str:
    """The kernel's machine code as text; compiled for it, because what is kept on disk is an object file."""
    return str(_made(factory(*literals), SIGNATURE)._library.get_asm_str())


def entry(function: Callable[..., Any], arguments: int) -> Callable[..., None]:
    """`function` of that many numbers as machine code, to be called from Python without the GIL."""
    path = _file(function)
    place = _loaded(path) or _compiled(path, function, types.void(*[types.intp] * arguments))
    return ctypes.CFUNCTYPE(None, *[ctypes.c_ssize_t] * arguments)(place)


def _file(function: Callable[..., Any], *literals: int) -> Path:
    module = function.__module__.rpartition(".")[2]
    return cache_folder() / ("-".join([module, function.__name__.strip("_"), *map(str, literals)]) + ".o")


def _made(function: Callable[..., Any], signature: Any) -> Any:
    return cfunc(signature, boundscheck=False, error_model="numpy")(function)


def _compiled(path: Path, function: Callable[..., Any], signature: Any) -> int:
    """Address of `function`, compiled by Numba; its machine code goes to `path`."""
    made = _made(function, signature)
    _kept.append(made)
    library = made._library
    module = library._final_module
    code = library._codegen._tm.emit_object(module)
    values = (*module.functions, *module.global_variables)
    names = {value.name for value in values if value.is_declaration and not value.name.startswith("llvm.")}
    about = {"symbol": made.native_name, "needs": sorted(names), "digest": hashlib.blake2b(code).hexdigest()}
    # Best effort: where the folder cannot be written, the next process compiles again.
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.name}.{os.getpid()}")
        temporary.write_bytes(json.dumps(about).encode() + b"\n" + code)
        os.replace(temporary, path)
    assert made.address is not None
    return int(made.address)


def _loaded(path: Path) -> int | None:
    """Address of the machine code in `path`; None if there is none, it is damaged, or needs what this process does not have.

    LLVM links it alone: Numba's own cache would first set up its compiler, a tenth of a second and tens of megabytes.
    """
    try:
        head, code = path.read_bytes().split(b"\n", 1)
        about = json.loads(head)
        symbol, needs, digest = about["symbol"], about["needs"], about["digest"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    _name_helpers()
    # LLVM ends the process where a name is missing.
    if hashlib.blake2b(code).hexdigest() != digest or not all(llvm.address_of_symbol(name) for name in needs):
        return None
    target = llvm.Target.from_default_triple().create_target_machine(jit=True, codemodel="jitdefault")
    # Far branches of Arm: its code and data must lie together.
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), target, use_lmm=platform.machine() == "aarch64")
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    _kept.append(engine)
    return int(engine.get_function_address(symbol))


@cache
def _name_helpers() -> None:
    """Tell LLVM where the functions are that Numba's machine code may call: to raise an exception, and the C library's maths.

    Numba does so when it sets up its compiler.
    """
    _load_global_helpers()
    names = {f"NRT_{name}": place for name, place in _nrt_python.c_helpers.items()}
    names |= {name: _helperlib.c_helpers[name] for name in INTR_MATH}
    for name, place in names.items():
        if not llvm.address_of_symbol(name):
            llvm.add_symbol(name, place)


# Machine code lives as long as the object that made it.
_kept: list[Any] = []

inline = njit(boundscheck=False, error_model="numpy")
"""For functions that kernels are made of."""
