"""Writing: resuming gives the same bytes, and only a finished, checked file gets its name."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeq.errors import FormatError, InputError, ResourceError
from edgeq.format import writer as writer_module
from edgeq.format.container import ModelFile
from edgeq.format.metadata_codec import MAX_KERNELS
from edgeq.format.partial import Partial, partial_path
from edgeq.format.writer import Writer
from tests.edgeq.format.sample_file import write_body


def test_the_same_model_gives_the_same_bytes(tmp_path: Path, sample: bytes) -> None:
    writer = Writer(tmp_path / "a.edgeq")
    file = writer.finish(write_body(writer))
    assert (tmp_path / "a.edgeq").read_bytes() == sample and file.size == len(sample)
    assert not partial_path(file.path).exists()


@pytest.mark.parametrize("kept", [0, 1, 7, 20])
@pytest.mark.parametrize("tail", [b"", b"half a segment that was never recorded" * 50])
def test_a_killed_run_goes_on_behind_the_last_recorded_segment(tmp_path: Path, sample: bytes, kept: int, tail: bytes) -> None:
    path = tmp_path / "a.edgeq"
    first = Writer(path)
    write_body(first)
    recorded = first.sync()[:kept]
    first.close()
    with open(partial_path(path), "ab") as file:
        file.write(tail)
    again = Writer(path, recorded)
    assert again.segments == recorded
    full = Writer(tmp_path / "b.edgeq")
    metadata = write_body(full)
    for s in full.segments[kept:]:
        again.append([sample[s.offset : s.offset + s.length]])
    again.finish(metadata)
    assert path.read_bytes() == sample


def test_nothing_has_the_final_name_before_the_end(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "a.edgeq")
    metadata = write_body(writer)
    writer.sync()
    assert not (tmp_path / "a.edgeq").exists() and partial_path(tmp_path / "a.edgeq").exists()
    writer.finish(metadata)
    assert (tmp_path / "a.edgeq").exists()


def test_an_existing_file_stays_as_it_is_until_the_new_one_is_finished(tmp_path: Path, sample: bytes) -> None:
    path = tmp_path / "a.edgeq"
    path.write_bytes(sample)
    before = ModelFile.open(path)
    writer = Writer(path)
    metadata = write_body(writer)
    assert path.read_bytes() == sample
    writer.finish(metadata)
    list(before.verify())  # a map opened before the replacement still holds the old bytes


def test_a_file_that_does_not_fit_its_metadata_is_not_given_the_name(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "a.edgeq")
    metadata = write_body(writer)
    writer.append([b"a segment that nothing owns"])
    with pytest.raises(FormatError, match="belong to nothing"):
        writer.finish(metadata)
    assert not (tmp_path / "a.edgeq").exists()


def test_streamed_parts_must_fill_the_shape(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "a.edgeq")
    halves = [np.zeros(8, np.float32), np.ones(8, np.float32)]
    assert writer.stream(halves, "f32", (4, 4)).nbytes == 64
    with pytest.raises(ValueError, match="64 bytes written for f32"):
        writer.stream(halves, "f32", (4, 5))


def test_every_block_is_written_whole_also_after_a_sync_and_by_a_run_that_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    block, last = 1 << 15, dict[int, int]()
    monkeypatch.setattr(writer_module, "BLOCK_BYTES", block)
    random = np.random.default_rng(4)

    def watched(writer: Writer) -> Writer:
        write = writer._file.write

        def noted(data: Any) -> int:
            at = writer._file.tell()
            last.update({at + offset: min(block, len(data) - offset) for offset in range(0, len(data), block)})
            return write(data)

        monkeypatch.setattr(writer._file, "write", noted, raising=False)
        return writer

    writer = watched(Writer(tmp_path / "a.edgeq"))
    arrays = [random.integers(0, 256, n, dtype=np.uint8) for n in (5, 100, 1 << 15, 70_001, 3, 200_000, 64, (1 << 16) - 64)]
    for i, a in enumerate(arrays):
        writer.append([a[: len(a) // 3], a[len(a) // 3 :]])
        if i == 4:
            # Killed before the next array.
            segments = writer.sync()
            writer.close()
            writer = watched(Writer(tmp_path / "a.edgeq", segments))
        elif i % 2:
            writer.sync()
    segments = writer.sync()
    writer.close()
    data = writer.partial.read_bytes()
    assert all(data[s.offset : s.offset + s.length] == a.tobytes() for s, a in zip(segments, arrays, strict=True))
    assert sorted(last) == list(range(0, len(data), block))
    assert [last[at] for at in sorted(last)][:-1] == [block] * (len(last) - 1), "the last write to a block is all of it"


def test_a_full_disk_is_told_and_leaves_nothing_under_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = Writer(tmp_path / "a.edgeq")

    class Full:
        def write(self, data: bytes) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(writer, "_file", Full())
    with pytest.raises(ResourceError, match="a.edgeq: the disk is full after .* bytes; free some space and run the same"):
        writer.append([bytes(writer_module.BLOCK_BYTES)])
    assert not (tmp_path / "a.edgeq").exists()


LIMITED = """
import resource, signal, sys
from dataclasses import replace
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from tests.edgeq.format.sample_file import write_body
from edgeq.errors import ResourceError
from edgeq.format.writer import Writer
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]), int(sys.argv[3])))
try:
    writer = Writer(Path(sys.argv[2]))
    writer.finish(write_body(writer))
except ResourceError as error:
    print(error)
else:
    print("finished")
"""


def sizes(length: int) -> Iterator[int]:
    yield from (16384, 20000, length - 4000, length - 1)


def test_a_limit_met_anywhere_in_the_file_leaves_nothing_under_the_name(tmp_path: Path, sample: bytes) -> None:
    """A real limit of the system, met in the first segment, in the middle, and in the metadata."""
    path = tmp_path / "a.edgeq"
    for limit in sizes(len(sample)):
        command = [sys.executable, "-c", LIMITED, str(Path(__file__).parents[3]), str(path), str(limit)]
        result = subprocess.run(command, capture_output=True, text=True, check=True)
        assert "the disk is full" in result.stdout, result.stdout
        assert not path.exists()
    command = [sys.executable, "-c", LIMITED, str(Path(__file__).parents[3]), str(path), str(len(sample))]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "finished\n"
    assert path.read_bytes() == sample


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot write it: No such file or directory"):
        Writer(tmp_path / "none" / "a.edgeq")


def test_compiled_kernels_travel_with_a_file_and_are_left_alone(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "a.edgeq")
    metadata = write_body(writer)
    kernels = {name: writer.append([name.encode()]) for name in ("sm_80", "sm_87")}
    file = writer.finish(replace(metadata, kernels=kernels))
    assert file.metadata.kernels == kernels and file.segment(kernels["sm_87"]).tobytes() == b"sm_87"
    assert file.owner(kernels["sm_80"]) == "kernels for sm_80"
    assert list(file.verify())
    at = file.segments[kernels["sm_80"]].offset
    path = tmp_path / "damaged.edgeq"
    whole = bytearray(file.path.read_bytes())
    whole[at] ^= 1
    path.write_bytes(whole)
    with pytest.raises(FormatError, match="kernels for sm_80 is damaged"):
        list(ModelFile.open(path).verify())


@pytest.mark.parametrize("count", [MAX_KERNELS, MAX_KERNELS + 1])
def test_a_file_has_kernels_of_so_many_architectures(tmp_path: Path, count: int) -> None:
    writer = Writer(tmp_path / "a.edgeq")
    metadata = write_body(writer)
    metadata = replace(metadata, kernels={f"sm_{i}": writer.append([b"code"]) for i in range(count)})
    if count > MAX_KERNELS:
        with pytest.raises(FormatError, match=f"claims {count} kernel architectures; at most {MAX_KERNELS} are possible"):
            writer.finish(metadata)
        writer.close()
    else:
        assert len(writer.finish(metadata).metadata.kernels) == count


FOREIGN = ("a text", "a folder", "a link", "a link to nothing", "a device", "a pipe")


def put(kind: str, path: Path, victim: Path) -> None:
    """Something at `path` that is not an .edgeq file."""
    victim.write_bytes(b"dear to somebody")
    if kind == "a text":
        path.write_bytes(b"dear to somebody")
    elif kind == "a folder":
        path.mkdir()
    elif kind == "a link":
        path.symlink_to(victim)
    elif kind == "a link to nothing":
        path.symlink_to(path.parent / "nothing")
    elif kind == "a pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/null")


@pytest.mark.parametrize("kind", FOREIGN)
def test_only_a_model_file_is_replaced(tmp_path: Path, kind: str, sample: bytes) -> None:
    path, victim = tmp_path / "a.edgeq", tmp_path / "victim"
    put(kind, path, victim)
    with pytest.raises(InputError, match="not replaced|a folder|a symbolic link"):
        Writer(path)
    assert (
        not partial_path(path).exists() and victim.read_bytes() == b"dear to somebody" and not (tmp_path / "nothing").exists()
    )
    # What comes there while the file is written stays as well.
    other = Writer(tmp_path / "b.edgeq")
    put(kind, tmp_path / "b.edgeq", victim)
    with pytest.raises(InputError, match="not replaced|a folder|a symbolic link"):
        other.finish(write_body(other))
    assert victim.read_bytes() == b"dear to somebody" and partial_path(tmp_path / "b.edgeq").read_bytes() == sample
    other.close()


@pytest.mark.parametrize("kind", [*FOREIGN, "a second name"])
def test_a_partial_file_that_is_something_else_is_not_written(tmp_path: Path, kind: str) -> None:
    partial, victim = partial_path(tmp_path / "a.edgeq"), tmp_path / "victim"
    if kind == "a second name":
        victim.write_bytes(bytes(64))
        partial.hardlink_to(victim)
    else:
        put(kind, partial, victim)
    before = victim.read_bytes()
    with pytest.raises(InputError, match="a.edgeq.partial: (a symbolic link|not the rest|cannot write it: Is a directory)"):
        Writer(tmp_path / "a.edgeq")
    assert victim.read_bytes() == before and not (tmp_path / "nothing").exists()


def test_two_writers_of_one_file_do_not_meet(tmp_path: Path, sample: bytes) -> None:
    path = tmp_path / "a.edgeq"
    first = Writer(path)
    metadata = write_body(first)
    with pytest.raises(InputError, match="another conversion is writing this file"):
        Writer(path)
    first.finish(metadata)
    assert path.read_bytes() == sample
    # The lock went with the file: the next writer gets one of its own.
    second = Writer(path)
    second.finish(write_body(second))
    assert path.read_bytes() == sample


def test_a_lock_taken_on_a_file_that_was_just_finished_is_taken_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, lock, calls = tmp_path / "a.edgeq", fcntl.flock, 0

    def finished_meanwhile(file: int, how: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            os.replace(partial_path(path), path)
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", finished_meanwhile)
    partial = Partial(path)
    assert calls == 2 and partial.path.samefile(partial_path(path)) and not partial.path.samefile(path)
    partial.close()
    assert path.exists() and not partial_path(path).exists()
