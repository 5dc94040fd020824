"""Threads that read ahead: what they give, and that nobody waits for them at the end."""

from __future__ import annotations

import subprocess
import sys
from threading import Event

import pytest

from edgeq.runtime.batching.read_ahead import Readers


def test_what_is_read_and_what_is_raised_reach_who_asked() -> None:
    readers = Readers[int](2, "test")

    def fail() -> int:
        raise OSError("gone")

    results = [readers.submit(lambda number=number: number) for number in range(20)]
    assert [result.result(60) for result in results] == [*range(20)]
    with pytest.raises(OSError, match="gone"):
        readers.submit(fail).result(60)
    readers.close()


def test_what_was_submitted_before_the_end_is_read_and_what_comes_after_is_cancelled() -> None:
    readers, go = Readers[bool](1, "test"), Event()
    before = readers.submit(lambda: go.wait(60))
    readers.close()
    readers.close()
    after = readers.submit(lambda: True)
    go.set()
    assert before.result(60) and after.cancelled()


HANGS = """
from threading import Event
from edgeq.runtime.batching.read_ahead import Readers
readers, begun = Readers(2, "test"), Event()
readers.submit(lambda: (begun.set(), Event().wait()))
begun.wait()
readers.close()
"""


def test_a_process_ends_while_a_file_cannot_be_read() -> None:
    assert subprocess.run([sys.executable, "-c", HANGS], timeout=120).returncode == 0
