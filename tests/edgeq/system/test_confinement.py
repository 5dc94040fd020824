"""Work in a child process ends at its limits, whatever it does, and leaves nothing in this process."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest

from edgeq.errors import MAX_MESSAGE, EdgeqError, FormatError, InputError
from edgeq.system.confinement import ConfinementLimits, LimitError, StallError, confined, confined_bytes

MIB = 1 << 20
TRIAL_LIMITS = ConfinementLimits(memory=64 * MIB, seconds=1)
linux = pytest.mark.skipif(sys.platform != "linux", reason="the size of the process is read from /proc")


def spin(seconds: float) -> str:
    while time.process_time() < seconds:
        pass
    return "done"


def test_the_text_comes_back_as_it_is() -> None:
    long = "naïve 日本 🙂 \0 \ud800 \x1b\n" * 100_000
    assert confined(lambda: long, TRIAL_LIMITS) == long
    assert confined(lambda: "", TRIAL_LIMITS) == ""


ALLOCATE = """
import sys
from edgeq.system.confinement import LimitError, ConfinementLimits, confined
try:
    print(confined(lambda: str(len(bytearray(int(sys.argv[1]) << 20))), ConfinementLimits(64 << 20, 1)))
except LimitError as error:
    print(error)
"""


@linux
@pytest.mark.parametrize(("size", "answer"), [(48, str(48 * MIB)), (65, "it needs more than 64 MiB of memory")])
def test_memory_has_its_limit(size: int, answer: str) -> None:
    """In a process of its own: one that has freed much finds room in what it has."""
    found = subprocess.run([sys.executable, "-c", ALLOCATE, str(size)], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == answer


def test_processor_time_has_its_limit() -> None:
    assert confined(lambda: spin(0.7), TRIAL_LIMITS) == "done"
    with pytest.raises(LimitError, match="more than 1 s of processor time"):
        confined(lambda: spin(2.1), TRIAL_LIMITS)


def test_the_clock_has_its_limit() -> None:
    class Short(ConfinementLimits):
        wall_seconds = 1  # type: ignore[assignment]

    # Its end would never come.
    with pytest.raises(StallError, match="more than 1 s"):
        confined(lambda: str(time.sleep(1e6)), Short(64 * MIB, 10))


@pytest.mark.parametrize(
    ("work", "reason"),
    (
        (lambda: str(os.abort()), "memory"),
        (lambda: ctypes.string_at(1).decode(), "ends its process"),
        (lambda: str(os.kill(os.getpid(), signal.SIGKILL)), "ends its process"),
        (lambda: str(os._exit(0)), "ends its process"),
        (lambda: str(1 // 0), "ZeroDivisionError: .*by zero"),
    ),
    ids=("abort", "segmentation fault", "kill", "exit", "exception"),
)
def test_a_child_that_dies_is_an_error(work: Callable[[], str], reason: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(LimitError, match=reason):
        confined(work, TRIAL_LIMITS)
    assert capfd.readouterr() == ("", "")


def test_an_error_for_the_user_keeps_its_kind() -> None:
    def refuse() -> str:
        raise InputError("not this one")

    with pytest.raises(InputError, match="^not this one$"):
        confined(refuse, TRIAL_LIMITS)


def test_a_child_writes_no_file(tmp_path: object) -> None:
    def write() -> str:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        with open(f"{tmp_path}/file", "w") as file:
            file.write("x")
        return "written"

    with pytest.raises(LimitError, match="too large"):
        confined(write, TRIAL_LIMITS)


def test_nothing_is_left_over() -> None:
    before = open_files()
    for _ in range(20):
        confined(lambda: "x", TRIAL_LIMITS)
        with pytest.raises(LimitError):
            confined(lambda: str(1 // 0), TRIAL_LIMITS)
    # Fewer may be open now: an earlier test's may have been closed meanwhile.
    assert open_files() <= before


def open_files() -> set[str]:
    return set(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else set()


def test_threads_can_confine_at_the_same_time() -> None:
    found: list[str] = []
    threads = [threading.Thread(target=lambda i=i: found.append(confined(lambda: str(i), TRIAL_LIMITS))) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [str(i) for i in range(8)]


def test_a_system_without_fork_does_the_work_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "fork")
    assert confined(lambda: str(os.getpid()), TRIAL_LIMITS) == str(os.getpid())
    with pytest.raises(LimitError, match="ZeroDivisionError"):
        confined(lambda: str(1 // 0), TRIAL_LIMITS)


def test_a_message_is_one_printable_line_of_bounded_length() -> None:
    assert str(FormatError("naïve 日本: a\x1b[2J\r\nb\u202e\x7f\ud800")) == r"naïve 日本: a\x1b[2J\r\nb\u202e\x7f\ud800"
    assert str(EdgeqError("x" * MAX_MESSAGE)) == "x" * MAX_MESSAGE
    cut = str(EdgeqError("a" * MAX_MESSAGE + "b"))
    assert len(cut) == MAX_MESSAGE and cut.endswith("b") and " ... " in cut


def test_a_child_of_another_thread_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has its own pipe alone: one that another inherits stays open until that one ends."""
    fork, forked = os.fork, threading.Event()
    wait, go_on = os.pipe()

    def slow() -> bytes:
        return os.read(wait, 1)

    def forking() -> int:
        if threading.current_thread() is other:
            forked.set()
            return fork()
        child = fork()
        if child:
            other.start()
            forked.wait(0.2)
        return child

    other = threading.Thread(target=lambda: confined_bytes(slow, TRIAL_LIMITS, keep=(wait,)))
    monkeypatch.setattr(os, "fork", forking)
    assert confined(lambda: "done", TRIAL_LIMITS) == "done"
    os.write(go_on, b".")
    other.join()
    os.close(wait)
    os.close(go_on)


def test_the_child_keeps_no_connection_of_the_process_open() -> None:
    """A client waited for the end of its connection as long as a schema of somebody else was tried."""
    ours, theirs = socket.socketpair()
    with ours, theirs:

        def work() -> str:
            try:
                os.fstat(ours.fileno())
            except OSError:
                return "closed"
            return "open"

        assert confined(work, ConfinementLimits(memory=256 << 20, seconds=5)) == "closed"
        os.fstat(ours.fileno())
