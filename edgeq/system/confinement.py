"""Work in a child process with limits on memory and time: for libraries that a stranger's file can make do anything.

Limits inside a language do not hold for what its library does in one call: `'a'.center(10**9)` of a chat template, or a table
of 8 GiB that a tokenizer of 64 bytes asks for, after which the library aborts the process.  The kernel's limits hold for all.

The child is a fork, so that it starts in a few milliseconds and has what the work needs.  It does the work alone, without
kernels and threads, and can write no file.  Without /proc (macOS) its memory is not limited; without fork (Windows) the work is
done in this process, unlimited.
"""

from __future__ import annotations

import faulthandler
import os
import select
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from threading import Lock

from edgeq import errors
from edgeq.errors import EdgeqError

Work = Callable[[], bytes]
_forking = Lock()


class LimitError(Exception):
    """The work was stopped: it needs more memory or time than it may have, or it ended the process."""


class StallError(LimitError):
    """The wall clock stopped it, and not its processor time: the machine is busy."""


@dataclass(frozen=True)
class ConfinementLimits:
    """Bytes of memory beyond those of the process, and seconds of processor time; the wall clock has ten times as many.

    nice   how much less urgent it is than the process, as nice(1) has it
    """

    memory: int
    seconds: int
    nice: int = 0

    @property
    def wall_seconds(self) -> int:
        return 10 * self.seconds


def confined(work: Callable[[], str], limits: ConfinementLimits) -> str:
    """`confined_bytes` of a text."""
    return confined_bytes(lambda: work().encode("utf-8", "surrogatepass"), limits).decode("utf-8", "surrogatepass")


def confined_bytes(work: Work, limits: ConfinementLimits, keep: Sequence[int] = ()) -> bytes:
    """The bytes that `work` returns, computed in a child process.

    keep   descriptors of files that the work reads; it has no others of this process

    LimitError: a limit was reached, or the child died.  An EdgeqError of the work is raised here again; any other exception
    becomes a LimitError that names it.
    """
    if not hasattr(os, "fork"):
        return _result(_answer(work, limits), "")
    # A child of another thread that had this pipe too would keep it open beyond the end of this one.
    with _forking:
        read, write = os.pipe()
        child = os.fork()
        if child:
            os.close(write)
    if child == 0:
        try:
            _run(work, limits, write, keep)
        finally:
            # No handler, no buffer of the parent: they are the parent's to run and to write.
            os._exit(0)
    try:
        data = _receive(read, limits)
    finally:
        os.close(read)
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    return _result(data, _death(status, limits))


def _result(answer: bytes, death: str) -> bytes:
    """What a child answered; `death` says why, where it did not."""
    kind, _, data = answer.partition(b"\0")
    if kind == b"result":
        return data
    text = data.decode("utf-8", "surrogatepass")
    found = getattr(errors, kind.decode("ascii", "replace"), None)
    if isinstance(found, type) and issubclass(found, EdgeqError):
        raise found(text)
    raise LimitError(text or death)


def _receive(read: int, limits: ConfinementLimits) -> bytes:
    """All that the child sends before it ends; LimitError when the time is over."""
    end, parts = time.monotonic() + limits.wall_seconds, list[bytes]()
    while True:
        ready, _, _ = select.select([read], [], [], max(0.0, end - time.monotonic()))
        if not ready:
            raise StallError(f"it takes more than {limits.wall_seconds} s")
        part = os.read(read, 1 << 16)
        if not part:
            return b"".join(parts)
        parts.append(part)


def _death(status: int, limits: ConfinementLimits) -> str:
    """Why a child without a result ended."""
    number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    if number == signal.SIGXCPU:
        return f"it takes more than {limits.seconds} s of processor time"
    # Rust and C libraries abort where memory cannot be had.
    return f"it needs more than {limits.memory >> 20} MiB of memory" if number == signal.SIGABRT else "it ends its process"


def _run(work: Work, limits: ConfinementLimits, write: int, keep: Sequence[int]) -> None:
    """In the child: set the limits, work, send the result."""
    # A panic of a Rust library prints to standard error; the error that the parent raises is one line.
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    # A connection that the process closes ends for its client only when the child has closed it too.
    first = 3
    for kept in sorted({write, *keep}):
        os.closerange(first, kept)
        first = kept + 1
    os.closerange(first, os.sysconf("SC_OPEN_MAX"))
    faulthandler.disable()
    _limit(limits)
    data = memoryview(_answer(work, limits))
    while data:
        data = data[os.write(write, data) :]


def _answer(work: Work, limits: ConfinementLimits) -> bytes:
    """The result of the work, or its error, after the name of its kind."""
    try:
        return b"result\0" + work()
    except EdgeqError as error:
        kind, text = type(error).__name__, str(error)
    except MemoryError:
        kind, text = "LimitError", f"it needs more than {limits.memory >> 20} MiB of memory"
    except RecursionError:
        kind, text = "LimitError", "it is nested too deeply"
    except BaseException as error:
        # A bare Exception, or a panic of Rust code, which is none.
        if not isinstance(error, Exception) and type(error).__module__ != "pyo3_runtime":
            raise
        kind, text = "LimitError", f"{type(error).__name__}: {str(error)[:200]}"
    return f"{kind}\0{text}".encode("utf-8", "surrogatepass")


def _limit(limits: ConfinementLimits) -> None:
    import resource

    os.nice(limits.nice)
    wanted = {resource.RLIMIT_CPU: limits.seconds, resource.RLIMIT_CORE: 0, resource.RLIMIT_FSIZE: 0}
    with suppress(OSError, ValueError), open("/proc/self/statm", "rb") as file:
        wanted[resource.RLIMIT_AS] = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE") + limits.memory
    for kind, value in wanted.items():
        _, hard = resource.getrlimit(kind)
        with suppress(OSError, ValueError):
            resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))
