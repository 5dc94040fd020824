"""Machine code that is kept on disk."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from edgeq.errors import ResourceError
from edgeq.system.whole_file import write_whole
from edgeq.targets.cpu.jit import compile, pipeline
from edgeq.targets.cpu.jit.args import RECORD_SLOTS
from edgeq.targets.cpu.jit.compile import Entry, address, is_kept
from edgeq.targets.cpu.jit.deferred import inline
from edgeq.targets.cpu.jit.parallel import compile_missing
from edgeq.targets.cpu.kernels.rows.elementwise import SelectArgs, select
from edgeq.targets.cpu.kernels.rows.norms import scale
from edgeq.targets.cpu.threads.threadpool import ThreadPool, publish
from edgeq.targets.target import no_progress


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty folder for machine code, and a process that has loaded none of it."""
    monkeypatch.setattr(compile, "cache_folder", lambda: tmp_path)
    return tmp_path


def call(place: int) -> np.ndarray:
    """The kernel `select` at that address, choosing rows 2 and 0 of three."""
    x, out = np.arange(48, dtype=np.float32).reshape(3, 16), np.zeros((2, 16), np.float32)
    indices, count = np.array([2, 0], np.int32), np.array([2], np.int64)
    args = SelectArgs(
        rows=count.ctypes.data, x=x.ctypes.data, x_stride=64, width=16,
        out=out.ctypes.data, out_stride=64, indices=indices.ctypes.data,
    )  # fmt: skip
    pool = ThreadPool(1, 1, RECORD_SLOTS)
    pool.run(np.array([args.record(place)], np.int64), 1)
    assert np.array_equal(out, x[[2, 0]])
    return out


def test_kept_machine_code_runs_without_being_compiled_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_kept(select)
    call(address.__wrapped__(select))
    # The threads' own code may be loaded already, by another test.
    made = {path.name for path in folder.iterdir()} - {"threadpool-walk_alone.o"}
    assert is_kept(select) and made == {"elementwise-select.o"}
    monkeypatch.setattr(pipeline, "compiled", None)
    call(address.__wrapped__(select))


AT_ONCE = """
import sys, threading, time
from pathlib import Path
from edgeq.targets.cpu.jit import compile, processor
from edgeq.targets.cpu.kernels.rows.elementwise import inject, select

here = processor.current()
processor.current = lambda: time.sleep(0.5) or here
threads = [threading.Thread(target=compile.keep, args=(Path(sys.argv[1]), each)) for each in (inject, select)]
for each in threads:
    each.start()
for each in threads:
    each.join()
"""


def test_threads_may_be_the_first_to_compile_at_once(tmp_path: Path) -> None:
    """Kernels with a part in common; the compiler is set up slowly."""
    ran = subprocess.run([sys.executable, "-c", AT_ONCE, str(tmp_path)], capture_output=True, text=True)
    assert {path.name for path in tmp_path.iterdir()} == {"elementwise-inject.o", "elementwise-select.o"}, ran.stderr


def test_an_interrupt_loses_no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(function: object) -> None:
        raise KeyboardInterrupt

    pipeline.settle()
    part = inline(lambda x: x)
    with monkeypatch.context() as patch:
        patch.setitem(pipeline._MAKE, "inline", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pipeline.settle()
    pipeline.settle()
    assert part in pipeline._made


def test_damaged_machine_code_is_compiled_again(folder: Path) -> None:
    address.__wrapped__(select)
    path = folder / "elementwise-select.o"
    sound = path.read_bytes()
    for wrong in (
        b"",
        b"{}\n",
        sound[:100],
        sound[:-1],
        sound[:-1] + b"\1",
        sound.replace(b'"needs": [', b'"needs": ["no_such_name", '),
    ):
        path.write_bytes(wrong)
        assert compile._read(path) is None
        call(address.__wrapped__(select))
        assert path.read_bytes() != wrong and compile._read(path)


def test_a_folder_that_cannot_be_written_only_costs_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "file").write_text("")
    monkeypatch.setattr(compile, "cache_folder", lambda: folder / "file" / "below")
    call(address.__wrapped__(select))
    assert not is_kept(select)


def test_what_cannot_be_written_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(tmp_path / "kernel.o", b"code")
    assert not list(tmp_path.iterdir())


KILLED = """
import os, signal, sys
from pathlib import Path
from edgeq.system.whole_file import write_whole
os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
write_whole(Path(sys.argv[1]) / "elementwise-select.o", b"code")
"""


def test_what_a_killed_process_had_begun_to_write_is_removed_later(folder: Path) -> None:
    """What another process began is left alone for an hour, in which it may still be written."""
    # Other tests may have loaded these kernels, from another folder.
    compile.address.cache_clear()
    subprocess.run([sys.executable, "-c", KILLED, str(folder)], check=False)
    (begun,) = folder.iterdir()
    assert begun.name.startswith("elementwise-select.o.")
    others = [folder / "elementwise-norm-4.o", folder / "a.o.txt"]
    for path in others:
        path.write_bytes(b"code")
    compile_missing([(select, ())], no_progress)
    assert begun.exists() and is_kept(select)
    for path in folder.iterdir():
        os.utime(path, (0, time.time() - compile.REMAINS_SECONDS - 60))
    compile_missing([(select, ())], no_progress)
    assert begun.exists(), "nothing is looked for where nothing is compiled"
    compile_missing([(scale, ())], no_progress)
    assert not begun.exists() and is_kept(select) and is_kept(scale) and all(path.exists() for path in others)


def test_a_process_whose_file_was_removed_meanwhile_runs_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def removed(source: Path, target: Path) -> None:
        os.unlink(source)
        rename(source, target)

    rename = os.replace
    monkeypatch.setattr(os, "replace", removed)
    call(address.__wrapped__(select))
    assert not list(folder.glob("elementwise-select*"))


def test_a_cache_that_cannot_be_listed_has_no_remains(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for place in (tmp_path / "none", Path(os.devnull) / "edgeq"):
        monkeypatch.setattr(compile, "cache_folder", lambda place=place: place)
        compile.remove_remains()


def _sum(a, b, place):  # type: ignore[no-untyped-def]
    publish(place, a + b)


def test_python_calls_machine_code(folder: Path) -> None:
    for _ in range(2):
        result = np.zeros(1, np.int64)
        Entry(_sum, 3)(1 << 40, -3, result.ctypes.data)
        assert result[0] == (1 << 40) - 3


def test_threads_that_the_system_does_not_give_are_an_error_and_those_it_gave_end(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[threading.Thread] = []
    start = threading.Thread.start

    def limited(self: threading.Thread) -> None:
        if len(given) == 3:
            raise RuntimeError("can't start new thread")
        given.append(self)
        start(self)

    monkeypatch.setattr(threading.Thread, "start", limited)
    with pytest.raises(ResourceError, match="gives only 4 of 9 threads; pass fewer `threads`"):
        ThreadPool(9, 4, 9)
    assert len(given) == 3 and not any(thread.is_alive() for thread in given)


def test_an_interrupt_between_the_start_of_a_thread_and_its_entry_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[threading.Thread] = []
    start = threading.Thread.start

    def interrupted(self: threading.Thread) -> None:
        given.append(self)
        start(self)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with suppress(KeyboardInterrupt):
        ThreadPool(2, 4, 9)
    given[0].join(120)
    assert not given[0].is_alive()
