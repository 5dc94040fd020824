"""Kernels that were compiled elsewhere: what is taken, and what is refused before anything of it is kept."""

from __future__ import annotations

import io
import json
import os
import random
import struct
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from edgeq.errors import EdgeqError, FormatError, InputError, UnsupportedError
from edgeq.system import machine
from edgeq.system.devices import DEVICES, DeviceSpec
from edgeq.system.trust import digest_of
from edgeq.targets.cpu.jit import archive, compile, pipeline
from edgeq.targets.cpu.jit.archive import Archive
from edgeq.targets.cpu.jit.args import RECORD_SLOTS
from edgeq.targets.cpu.jit.parallel import compile_by
from edgeq.targets.cpu.jit.processor import of_device
from edgeq.targets.cpu.kernels.rows.norms import ScaleArgs, scale
from edgeq.targets.cpu.threads.threadpool import ThreadPool
from edgeq.targets.target import no_progress


def like_this_machine() -> DeviceSpec | None:
    for device in DEVICES.values():
        if (
            device.supported
            and of_device(device).arch == machine.cpu().arch
            and of_device(device).features <= machine.cpu().features
        ):
            return device
    return None


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A file of one kernel for a device that is like this machine."""
    device = like_this_machine()
    if device is None:
        pytest.skip("this processor runs the kernels of no device")
    folder = tmp_path_factory.mktemp("kernels")
    assert compile_by(1, [(scale, ())], folder, device, no_progress) == []
    archive.write(folder.parent / "kernels.zip", folder, device)
    return (folder.parent / "kernels.zip").read_bytes()


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(machine, "cache_folder", lambda: tmp_path / "cache")
    monkeypatch.setattr(compile, "cache_folder", lambda: tmp_path / "cache" / "kernels")
    compile.address.cache_clear()
    return tmp_path / "kernels.zip"


def test_what_was_compiled_elsewhere_runs_once_it_is_trusted(whole: bytes, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_bytes(whole)
    found = Archive(path)
    assert len(found) == 1 and not found.trusted and len(found.digest) == 64 and found.digest == digest_of(path.read_bytes())
    with pytest.raises(InputError, match="not trusted"):
        found.install()
    assert not (path.parent / "cache").exists()
    found.trust()
    assert Archive(path).trusted and found.install() == 1 and found.install() == 0
    monkeypatch.setattr(pipeline, "compiled", None)
    x, count = np.arange(32, dtype=np.float32).reshape(2, 16), np.array([2], np.int64)
    args = ScaleArgs(
        rows=count.ctypes.data, x=x.ctypes.data, x_stride=64, width=16, factor=0.5, out=x.ctypes.data, out_stride=64
    )
    place = compile.address(scale)
    monkeypatch.undo()
    ThreadPool(1, 1, RECORD_SLOTS).run(np.array([args.record(place)], np.int64), 1)
    assert np.array_equal(x.ravel(), np.arange(32) / 2)


def test_machine_code_calls_nothing_of_python(whole: bytes, path: Path) -> None:
    """So it does not matter which Python compiled it."""
    with zipfile.ZipFile(io.BytesIO(whole)) as files:
        heads = [json.loads(files.read(name).split(b"\n")[0]) for name in files.namelist()[1:]]
    assert heads and not any(name.startswith(("Py", "_Py", "NRT", "numba")) for head in heads for name in head["needs"])


def changed(whole: bytes, **values: object) -> bytes:
    """The same kernels with another description."""
    with zipfile.ZipFile(io.BytesIO(whole)) as files:
        contents = {name: files.read(name) for name in files.namelist()}
    about = json.loads(contents["kernels.json"]) | values
    contents["kernels.json"] = json.dumps(about).encode()
    return zipped(contents)


def zipped(contents: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w", compression) as files:
        for name, data in contents.items():
            files.writestr(name, data)
    return written.getvalue()


def nested(count: int, nbytes: int) -> bytes:
    """Entries of which each lies in those before it; a few bytes a piece more than the first."""
    plain = zipped({"kernels.json": b"{}", **{f"a-b{i:03}.o": b"" for i in range(count)}, "a-c.o": bytes(nbytes)})
    written = bytearray(plain)
    at = plain.index(b"PK\1\2")
    while (at := plain.find(b"PK\1\2", at)) >= 0:
        if plain[at + 46 : at + 49] == b"a-b":
            struct.pack_into("<2I", written, at + 20, nbytes, nbytes)
        at += 1
    return bytes(written)


def of(name: str, data: bytes = b"") -> Callable[[bytes], bytes]:
    """A file with an entry that `write` never makes."""
    return lambda whole: zipped({"kernels.json": b"{}", name: data})


REFUSED: dict[str, tuple[Callable[[bytes], bytes], type[EdgeqError], str]] = {
    "empty": (lambda whole: b"", FormatError, "not a whole file of kernels"),
    "truncated": (lambda whole: whole[:-1], FormatError, "not a whole file of kernels"),
    "cut in the middle": (lambda whole: whole[: len(whole) // 2], FormatError, "not a whole file of kernels"),
    "its head cut off": (lambda whole: whole[100:], FormatError, "damaged file"),
    "text": (lambda whole: b"hello\n" * 100, FormatError, "not a whole file of kernels"),
    "a comment": (lambda whole: whole[:-2] + b"\1\0x", FormatError, "not a whole file of kernels"),
    "another zip": (lambda whole: zipped({"a.txt": b""}), FormatError, "not a whole file of kernels"),
    "no entries": (lambda whole: zipped({}), FormatError, "not a whole file of kernels"),
    "a path that leads out": (of("../elementwise-norm.o"), FormatError, "no name of a kernel"),
    "an absolute path": (of("/etc/cron.d/a-b.o"), FormatError, "no name of a kernel"),
    "a folder": (of("a-b.o/"), FormatError, "no name of a kernel"),
    "an endless name": (of("a-" + "b" * 60000 + ".o"), FormatError, "no name of a kernel"),
    "a name with a line break": (of("a-b.o\n"), FormatError, "no name of a kernel"),
    "a large entry": (of("a-b.o", bytes(archive.MAX_FILE_BYTES + 1)), FormatError, "at most 4,194,304 are read"),
    "a large description": (
        lambda whole: zipped({"kernels.json": bytes(archive.MAX_DESCRIPTION_BYTES + 1)}), FormatError, "at most 1,048,576",
    ),
    "many entries": (
        lambda whole: zipped({"kernels.json": b"", **{f"a-{i}.o": b"" for i in range(5000)}}), FormatError, "not a whole file",
    ),
    "a bomb": (
        lambda whole: zipped({"kernels.json": b"{}", "a-b.o": bytes(1 << 20)}, zipfile.ZIP_DEFLATED), FormatError, "compressed",
    ),
    "a description that is no JSON": (lambda whole: zipped({"kernels.json": b"{"}), FormatError, "damaged file"),
    "a description without end": (lambda whole: zipped({"kernels.json": b"[" * 100000}), FormatError, "damaged file"),
    "a description that is a list": (lambda whole: zipped({"kernels.json": b"[]"}), UnsupportedError, "another version"),
    "another version": (lambda whole: changed(whole, version=2), UnsupportedError, "another version of edgeq"),
    "no list of features": (lambda whole: changed(whole, features={"a": 1}), FormatError, "not sound"),
    "a name that steers the terminal": (lambda whole: changed(whole, device="\x1b[2Jpi"), FormatError, "not sound"),
    "a feature that steers the terminal": (lambda whole: changed(whole, features=["a\n"]), FormatError, "not sound"),
    "many features": (lambda whole: changed(whole, features=["a"] * 1000), FormatError, "not sound"),
    "entries in one another": (lambda whole: nested(20, archive.MAX_FILE_BYTES), FormatError, "bytes together"),
    "numbers for names": (lambda whole: changed(whole, device=5), FormatError, "not sound"),
    "a kernel too few": (lambda whole: changed(whole, files={}), FormatError, "do not agree"),
    "another architecture": (lambda whole: changed(whole, arch="riscv64"), UnsupportedError, r"\(riscv64\); this processor is"),
    "another processor": (lambda whole: changed(whole, features=["sve9"]), UnsupportedError, "this processor lacks sve9"),
    "other sources": (lambda whole: changed(whole, sources="0" * 16), UnsupportedError, "install the same versions"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_other_files_are_refused(what: str, whole: bytes, path: Path) -> None:
    change, error, message = REFUSED[what]
    path.write_bytes(change(whole))
    with pytest.raises(error, match=message):
        Archive(path)


def test_flipped_bits_are_found_or_change_the_digest(whole: bytes, path: Path) -> None:
    path.write_bytes(whole)
    digest, rng = Archive(path).digest, random.Random(0)
    for _ in range(200):
        wrong = bytearray(whole)
        wrong[rng.randrange(len(wrong))] ^= 1 << rng.randrange(8)
        path.write_bytes(wrong)
        with suppress(EdgeqError):
            assert Archive(path).digest != digest


def test_what_is_no_file_is_refused_without_waiting(path: Path) -> None:
    os.mkfifo(path)
    with pytest.raises(InputError, match="not a file"):
        Archive(path)
    path.unlink()
    before = set(os.listdir("/dev/fd"))
    with pytest.raises(InputError, match="Is a directory"):
        Archive(path.parent)
    assert set(os.listdir("/dev/fd")) == before
    with pytest.raises(InputError, match="cannot read it"):
        Archive(path)
    with open(path, "wb") as file:
        file.truncate(archive.MAX_BYTES + 1)
    with pytest.raises(FormatError, match="at most 67,108,864"):
        Archive(path)


def test_kernels_are_for_processors_not_for_gpus() -> None:
    with pytest.raises(
        InputError, match="computes on a GPU .sm_89.; kernels are compiled for neon, neon-dotprod, avx2, avx512-vnni"
    ):
        of_device(DEVICES["rtx-4090"])
