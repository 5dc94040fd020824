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
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import llvmlite

from edgeq.format import codec, quantization
from edgeq.network import delta_net
from edgeq.system import machine
from edgeq.system.whole_file import write_whole
from edgeq.targets import rows, states
from edgeq.targets.cpu.jit import linking, processor
from edgeq.targets.cpu.jit.deferred import SYMBOL, ObjectFile

Kernel = Callable[[int, int, int, int], None]
"""A Python function (row address, part, parts, thread) that becomes machine code."""
ARGUMENTS = 4
REMAINS_SECONDS = 3600
"""Writing machine code takes milliseconds: a file that was begun so long ago is one of a process that was killed."""


@cache
def source_digest() -> str:
    """What decides about machine code beside the processor: this package's sources, the versions of Numba and LLVM."""
    # The modules outside of this package whose numbers become constants of the machine code.
    outside = [Path(str(module.__file__)) for module in (codec, delta_net, quantization, rows, states)]
    sources = [*sorted(Path(__file__).parents[1].rglob("*.py")), *outside]
    seen = hashlib.blake2b(digest_size=8)
    versions = (metadata.version("numba").encode(), llvmlite.__version__.encode())
    for part in (*(path.read_bytes() for path in sources), *versions):
        seen.update(part)
    return seen.hexdigest()


@cache
def cache_folder() -> Path:
    made_for = processor.current()
    seen = hashlib.blake2b(" ".join([source_digest(), made_for.label, *sorted(made_for.features)]).encode(), digest_size=8)
    return machine.cache_folder() / f"kernels-{seen.hexdigest()}"


@cache
def address(factory: Callable[..., Kernel], *literals: int) -> int:
    """Address of the kernel that `factory(*literals)` defines.  Literals become constants of the machine code."""
    path = cache_folder() / file_name(factory, *literals)
    if not (made := _read(path)):
        made = _compiled(factory, *literals)
        # Where the folder cannot be written, the next process compiles again.
        with suppress(OSError):
            _write(path, made)
    return _loaded(made)


def keep(folder: Path, factory: Callable[..., Kernel], *literals: int) -> None:
    """Compile the kernel and write its machine code, without loading it.  OSError: the folder cannot be written."""
    _write(folder / file_name(factory, *literals), _compiled(factory, *literals))


def remove_remains() -> None:
    """Remove from the cache what killed processes had begun to write.

    By age and not by the number of the process, which may be one of another container.  A process that was stopped meanwhile
    finds its file missing: like one that cannot write it compiles again.
    """
    with suppress(OSError):
        for path in list(cache_folder().glob("*.o.[0-9]*")):
            with suppress(OSError):
                if time.time() - path.stat().st_mtime > REMAINS_SECONDS:
                    path.unlink()


def is_kept(factory: Callable[..., Any], *literals: int) -> bool:
    """Whether the kernel needs no compilation."""
    return os.path.exists(cache_folder() / file_name(factory, *literals))


def assembly(factory: Callable[..., Kernel], *literals: int) -> str:
    """The kernel's machine code as text; compiled for it, because what is kept on disk is an object file."""
    from edgeq.targets.cpu.jit import pipeline

    return pipeline.assembly(factory(*literals), ARGUMENTS)


class Entry:
    """`function` of so many numbers as machine code, to be called from Python without the GIL; compiled when first called."""

    def __init__(self, function: Callable[..., Any], arguments: int) -> None:
        self.function, self.arguments = function, arguments
        self.__module__, self.__name__ = function.__module__, function.__name__.strip("_")
        self._called: Any = None

    def __call__(self, *values: int) -> None:
        if self._called is None:
            self._called = ctypes.CFUNCTYPE(None, *[ctypes.c_ssize_t] * self.arguments)(address(self))
        self._called(*values)


def file_name(factory: Callable[..., Any], *literals: int) -> str:
    return "-".join([factory.__module__.rpartition(".")[2], factory.__name__, *map(str, literals)]) + ".o"


def _compiled(factory: Callable[..., Any], *literals: int) -> ObjectFile:
    # Numba takes a second to import and 14 MB: not where all kernels are kept.
    from edgeq.targets.cpu.jit import pipeline

    if isinstance(factory, Entry):
        return pipeline.compiled(factory.function, factory.arguments)
    return pipeline.compiled(factory(*literals), ARGUMENTS)


def _write(path: Path, made: ObjectFile) -> None:
    about = {"needs": made.needs, "digest": hashlib.blake2b(made.code).hexdigest()}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, [json.dumps(about).encode(), b"\n", made.code])


def _read(path: Path) -> ObjectFile | None:
    """The machine code in `path`; None if there is none, it is damaged, or needs what this process does not have."""
    try:
        head, code = path.read_bytes().split(b"\n", 1)
        about = json.loads(head)
        needs, digest = about["needs"], about["digest"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    # LLVM ends the process where a name is missing.
    if hashlib.blake2b(code).hexdigest() != digest or not all(linking.address_of(name) for name in needs):
        return None
    return ObjectFile(code, needs)


def _loaded(made: ObjectFile) -> int:
    """Address of machine code."""
    return linking.linked(made.code, SYMBOL) or _linked_by_llvm(made)


def _linked_by_llvm(made: ObjectFile) -> int:
    """The same, of what linking.py leaves; without Numba, which would first set up its compiler, a tenth of a second."""
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_default_triple().create_target_machine(jit=True, codemodel="jitdefault")
    # Far branches of Arm: its code and data must lie together.
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), target, use_lmm=processor.current().is_arm)
    engine.add_object_file(llvm.ObjectFileRef.from_data(made.code))
    engine.finalize_object()
    _kept.append(engine)
    return int(engine.get_function_address(SYMBOL))


# Machine code of LLVM lives as long as the object that made it.
_kept: list[Any] = []
