"""A file is there whole or not at all, whoever writes it and whatever interrupts."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from threading import Barrier, Thread

import pytest

from edgeq.system.whole_file import write_whole


@pytest.mark.parametrize(("parts", "read"), [("é\n", "é\n".encode()), (b"\x00\xff", b"\x00\xff"), ([b"a", b"", b"bc"], b"abc")])
def test_text_bytes_and_parts_are_written(tmp_path: Path, parts: str | bytes | list[bytes], read: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"what was there before")
    write_whole(path, parts, durable=True)
    assert path.read_bytes() == read and list(tmp_path.iterdir()) == [path]


def _failing() -> Iterator[bytes]:
    yield b"begun"
    raise KeyboardInterrupt


def test_what_was_there_stays_when_writing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"before")
    with pytest.raises(KeyboardInterrupt):
        write_whole(path, _failing())

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(path, b"after", durable=True)
    assert path.read_bytes() == b"before" and list(tmp_path.iterdir()) == [path]


def test_threads_do_not_write_into_each_others_file(tmp_path: Path) -> None:
    path, start = tmp_path / "file", Barrier(4)

    def write(letter: bytes) -> None:
        start.wait()
        for _ in range(20):
            write_whole(path, (letter * 1000 for _ in range(20)))

    threads = [Thread(target=write, args=(letter,)) for letter in (b"a", b"b", b"c", b"d")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = path.read_bytes()
    assert found == found[:1] * 20_000 and list(tmp_path.iterdir()) == [path]


def test_processes_with_the_same_numbers_do_not_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of two containers, which may share a cache: one writes while the other does."""
    path = tmp_path / "file"
    monkeypatch.setattr("threading.get_native_id", lambda: 1)
    monkeypatch.setattr("os.getpid", lambda: 1)

    def parts() -> Iterator[bytes]:
        yield b"ab"
        write_whole(path, b"whole")
        assert path.read_bytes() == b"whole"
        yield b"cd"

    write_whole(path, parts())
    assert path.read_bytes() == b"abcd" and list(tmp_path.iterdir()) == [path]


def test_a_durable_file_has_its_name_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced, fsync = list[tuple[bool, bool]](), os.fsync

    def spy(descriptor: int) -> None:
        synced.append((os.path.samestat(os.fstat(descriptor), tmp_path.stat()), (tmp_path / "file").exists()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", spy)
    write_whole(tmp_path / "file", b"text", durable=True)
    assert synced == [(False, False), (True, True)]


def test_a_link_in_the_place_of_the_unfinished_file_is_not_followed(tmp_path: Path) -> None:
    """A stranger may have put it there, in a folder where all may write."""
    victim, through = tmp_path / "victim", tmp_path / "file.new"
    victim.write_bytes(b"precious")
    through.symlink_to(victim)
    with pytest.raises(OSError, match=os.strerror(errno.ELOOP)):
        write_whole(tmp_path / "file", b"text", through=through)
    assert victim.read_bytes() == b"precious"
