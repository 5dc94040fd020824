"""Kernels as machine code with one signature, compiled on first use and kept on disk.

A kernel is `void (row address, part, parts, thread)`: it reads its arguments from an int64 row of the program's table, so a new
model compiles nothing.  Numba's cache does not notice edits in imported files, therefore the cache folder is named by a
digest of this package's sources, of the versions of Numba and LLVM and of the processor.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite
import numba
from numba import cfunc, njit, types

from edgeq import codec
from edgeq.targets import machine
from edgeq.targets.cpu import arm
from edgeq.targets.cpu.vector import get_i64

# Before the first function is made: Numba fixes its processor then.
arm.configure()

SIGNATURE = types.void(types.intp, types.intp, types.intp, types.intp)
FUNCTION, COUNT = 0, 1
"""Words of every table row: the kernel's address, and the address of the number of rows it runs over."""


@cache
def cache_folder() -> Path:
    sources = [*sorted(Path(__file__).parent.rglob("*.py")), Path(codec.__file__)]
    seen = hashlib.blake2b(digest_size=8)
    for part in (*(path.read_bytes() for path in sources), *(v.encode() for v in (numba.__version__, llvmlite.__version__))):
        seen.update(part)
    seen.update(" ".join(sorted(machine.cpu().features)).encode())
    return machine.cache_folder() / f"kernels-{seen.hexdigest()}"


@contextmanager
def _cache_in(folder: Path) -> Iterator[None]:
    """Numba takes the cache folder of a function from its configuration at the moment the function is made."""
    before = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = str(folder)
    try:
        yield
    finally:
        numba.config.CACHE_DIR = before


def on_disk(function: Callable[..., Any], *signatures: Any) -> Any:
    """`function` compiled without the GIL, from the cache if it was compiled before."""
    with _cache_in(cache_folder()):
        return njit(list(signatures), cache=True, nogil=True, boundscheck=False, error_model="numpy")(function)


@cache
def address(factory: Callable[..., Callable[[int, int, int, int], None]], *literals: int) -> int:
    """Address of the kernel that `factory(*literals)` defines.  Literals become constants of the machine code.

    A factory's closure may hold nothing but these numbers: Numba hashes it for its cache.
    """
    with _cache_in(cache_folder()):
        compiled = cfunc(SIGNATURE, cache=True, boundscheck=False, error_model="numpy")(factory(*literals))
    _kept.append(compiled)
    assert compiled.address is not None
    return compiled.address


# Machine code lives as long as the object that made it.
_kept: list[Any] = []

inline = njit(boundscheck=False, error_model="numpy")
"""For functions that kernels are made of."""


@inline
def word(row, index):  # type: ignore[no-untyped-def]
    """Argument `index` of a table row."""
    return get_i64(row + 8 * index)
