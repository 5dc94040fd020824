"""Kernels in one file, compiled on one machine for another: a zip of object files with a description.

It is machine code, which a file may hold only if its user trusts it: `Archive` reads and checks without running anything, and
says the digest by which a user knows the file; `install` puts the code where kernels are looked for.  Nothing in the code
depends on the version of Python.
"""

from __future__ import annotations

import io
import json
import os
import re
import stat
import struct
import zipfile
from pathlib import Path
from typing import Any

from edgeq.errors import FormatError, InputError, UnsupportedError
from edgeq.system import machine, trust
from edgeq.system.devices import DeviceSpec
from edgeq.system.trust import digest_of
from edgeq.system.whole_file import write_whole
from edgeq.targets.cpu.jit import compile, processor

MAX_BYTES, MAX_FILES, MAX_FILE_BYTES, MAX_DESCRIPTION_BYTES = 64 << 20, 4096, 4 << 20, 1 << 20
_END = struct.Struct("<4s4H2LH")
"""The end of a zip without a comment: signature, disks, entries, bytes of the directory, its place, length of the comment."""
_NAME = re.compile(r"[a-z0-9_]{1,40}(-[a-z0-9_]{1,40}){1,16}\.o", re.ASCII)
_WORD = re.compile(r"[A-Za-z0-9_.-]{1,64}", re.ASCII)
"""Words of the description, which messages show: no control characters, which would steer the user's terminal."""
MAX_FEATURES = 256
_DESCRIPTION = "kernels.json"
_VERSION = 1
_NOT_ONE = "not a whole file of kernels; make one with: edgeq warm MODEL --for DEVICE -o FILE"


def write(path: Path, folder: Path, device: DeviceSpec) -> None:
    """Write all object files of `folder`, compiled for `device`, to `path`.  InputError: it cannot be written."""
    chosen = processor.of_device(device)
    files = {each.name: each.read_bytes() for each in sorted(folder.iterdir())}
    about = {
        "version": _VERSION, "device": device.name, "arch": chosen.arch, "features": sorted(chosen.features),
        "sources": compile.source_digest(), "files": {name: digest_of(data) for name, data in files.items()},
    }  # fmt: skip
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w") as archive:
        for name, data in {_DESCRIPTION: json.dumps(about, indent=1).encode(), **files}.items():
            # A fixed date: the same kernels are the same file.
            archive.writestr(zipfile.ZipInfo(name), data)
    try:
        write_whole(path, written.getvalue())
    except OSError as error:
        raise InputError(f"{path}: cannot write it: {error.strerror}") from None


class Archive:
    """Such a file, whole and for this machine.

    digest   of all its bytes, in hexadecimal
    device   the name of the device that it was made for
    """

    def __init__(self, path: Path) -> None:
        """InputError: it cannot be read.  FormatError: damaged.  UnsupportedError: of another version or processor."""
        self.path = path
        data = _read(path)
        self.digest = digest_of(data)
        self._check_end(data)
        try:
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                self._check_entries(archive)
                about = json.loads(archive.read(_DESCRIPTION))
                self._files = {entry.filename: archive.read(entry) for entry in archive.infolist()[1:]}
        except (zipfile.BadZipFile, ValueError, EOFError, NotImplementedError, RecursionError) as error:
            raise FormatError(f"{path}: a damaged file of kernels ({error}); copy it again") from None
        self._check(about)
        self.device: str = about["device"]

    def _check_end(self, data: bytes) -> None:
        """FormatError: no zip as `write` makes it, or a directory too long to be listed."""
        signature, entries, nbytes, comment = b"", 0, 0, 0
        if len(data) >= _END.size:
            signature, _, _, _, entries, nbytes, _, comment = _END.unpack(data[-_END.size :])
        # A second end record of 64 bits would count instead of this one.
        extended = data[-_END.size - 20 :][:4] == b"PK\6\7"
        if signature != b"PK\5\6" or comment or extended or entries > MAX_FILES or nbytes > 128 * MAX_FILES:
            raise FormatError(f"{self.path}: {_NOT_ONE}")

    def _check_entries(self, archive: zipfile.ZipFile) -> None:
        """FormatError: entries that `write` never makes.  Before anything is read: sizes are those of a stranger."""
        entries = archive.infolist()
        names = [entry.filename for entry in entries]
        if not entries or names[0] != _DESCRIPTION or len(names) > MAX_FILES or len(set(names)) < len(names):
            raise FormatError(f"{self.path}: {_NOT_ONE}")
        for entry in entries:
            most = MAX_DESCRIPTION_BYTES if entry is entries[0] else MAX_FILE_BYTES
            if entry is not entries[0] and not _NAME.fullmatch(entry.filename):
                raise FormatError(f"{self.path}: {entry.filename!r} is no name of a kernel")
            if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1 or entry.file_size != entry.compress_size:
                raise FormatError(f"{self.path}: {entry.filename} is compressed or encrypted; kernels are stored as they are")
            if entry.file_size > most:
                raise FormatError(f"{self.path}: {entry.filename} has {entry.file_size:,} bytes; at most {most:,} are read")
        # Entries that lie in one another, which not every version of Python refuses, would multiply the memory.
        if (total := sum(entry.file_size for entry in entries)) > MAX_BYTES:
            raise FormatError(f"{self.path}: entries of {total:,} bytes together; at most {MAX_BYTES:,} are read")

    def _check(self, about: Any) -> None:
        strings = ("device", "arch", "sources")
        if not isinstance(about, dict) or about.get("version") != _VERSION:
            raise UnsupportedError(f"{self.path}: kernels of another version of edgeq; make the file again with this one")
        features, files = about.get("features"), about.get("files")
        if not (
            isinstance(features, list)
            and len(features) <= MAX_FEATURES
            and all(isinstance(each, str) and _WORD.fullmatch(each) for each in (*map(about.get, strings), *features))
            and isinstance(files, dict)
        ):
            raise FormatError(f"{self.path}: its description is not sound")
        if files != {name: digest_of(data) for name, data in self._files.items()}:
            raise FormatError(f"{self.path}: kernels and description do not agree; copy it again")
        cpu = machine.cpu()
        if about["arch"] != cpu.arch:
            raise UnsupportedError(
                f"{self.path}: kernels for {about['device']} ({about['arch']}); this processor is {cpu.arch}"
            )
        if missing := sorted(set(features) - cpu.features):
            raise UnsupportedError(f"{self.path}: kernels for {about['device']}; this processor lacks {', '.join(missing)}")
        if about["sources"] != compile.source_digest():
            raise UnsupportedError(
                f"{self.path}: made by another version of edgeq, numba or llvmlite; install the same versions here and there"
            )

    def __len__(self) -> int:
        return len(self._files)

    @property
    def trusted(self) -> bool:
        """Whether the user has accepted exactly these bytes before."""
        return trust.trusted(self.digest)

    def trust(self) -> None:
        """Remember the digest.  OSError: the cache folder cannot be written."""
        trust.trust(self.digest)

    def install(self) -> int:
        """Put the kernels where they are looked for; those that are there stay.  Returns how many were added.

        InputError: they are not trusted.  OSError: the cache folder cannot be written.
        """
        if not self.trusted:
            raise InputError(f"{self.path}: machine code that is not trusted; nothing was installed")
        folder, added = compile.cache_folder(), 0
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in self._files.items():
            if not (folder / name).exists():
                write_whole(folder / name, data)
                added += 1
        return added


def _read(path: Path) -> bytes:
    try:
        # A pipe without a writer would wait.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise InputError(f"{path}: not a file")
            if found.st_size > MAX_BYTES:
                raise FormatError(f"{path}: {found.st_size:,} bytes; a file of kernels has at most {MAX_BYTES:,}")
            return file.read(MAX_BYTES)
    except OSError as error:
        raise InputError(f"{path}: cannot read it: {error.strerror}") from None
