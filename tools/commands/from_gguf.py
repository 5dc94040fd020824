"""GGUF files where a command takes an .edgeq file: converted once, as they are, into the cache folder.

Each GGUF file, by its path, has a folder there with the conversion in it, and its path in a text file beside it.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from edgeq.errors import InputError
from edgeq.system.machine import cache_folder
from edgeq.tools.cli.terminal import note, progress
from edgeq.version import __version__

FOLDER = "gguf"
ORIGIN = "origin"
ALONE = "alone"
"""What the name of a folder begins with that has a conversion without a tower; else the digest of the tower's path."""
MAX_PATH = 4096
SAMPLED = 1 << 20
"""Bytes at the beginning of a file that count for whether it is the same: those of the header."""


def converted(path: Path, mmproj: Path | None = None) -> Path:
    """The .edgeq file of a GGUF file, with every weight as it is there; made now if it is not in the cache.

    mmproj   the file of its vision tower, if that is wanted too

    InputError: the cache cannot be written, or there is no `mmproj`.  Otherwise as edgeq.converters.convert.convert: what is
    not supported, a full disk.
    """
    from edgeq.converters.convert import carry_out, preflight
    from edgeq.converters.planning.options import ConvertOptions

    if mmproj and not mmproj.is_file():
        raise InputError(f"{mmproj}: no such file")
    own = _own(path)
    kind = _digest(str(mmproj.resolve())) if mmproj else ALONE
    output = own / f"{kind}-{_key(path, mmproj)}" / f"{path.stem}.edgeq"
    if output.exists():
        return output
    tower = ["--mmproj", str(mmproj)] if mmproj else []
    command = shlex.join(["edgeq", "convert", str(path), *tower, "-o", f"{path.stem}.edgeq"])
    instead = f"convert it to another place: {command}"
    try:
        # Files of what this path was before, or what other code made of it.
        for old in own.iterdir() if own.is_dir() else ():
            if old.is_dir() and old != output.parent and old.name.startswith(f"{kind}-"):
                shutil.rmtree(old, ignore_errors=True)
        output.parent.mkdir(parents=True, exist_ok=True)
        (own / ORIGIN).write_bytes(os.fsencode(path.absolute()))
        with progress() as bar:
            plan = preflight(str(path), ConvertOptions(method="as-stored", mmproj=mmproj))
            note(f"{path}: converting it once, into {output} ({plan.output_bytes / 1e6:,.1f} MB)")
            carry_out(plan, output, bar, note)
    except OSError as error:
        raise InputError(f"{path}: cannot be converted into {output.parent}: {error.strerror or error}; {instead}") from None
    return output


@dataclass(frozen=True)
class Conversion:
    """What is kept of one GGUF file: `folder` has `size` bytes, `file` is the finished .edgeq file; None: it was not finished.

    origin   the path of the GGUF file when it was converted
    """

    folder: Path
    origin: Path
    file: Path | None
    size: int

    def remove(self) -> None:
        """Remove all of it; it is made again when the GGUF file is used."""
        shutil.rmtree(self.folder)


def conversions() -> list[Conversion]:
    """All that are kept, in the order of their GGUF files."""
    base = cache_folder() / FOLDER
    found = [_conversion(own) for own in base.iterdir()] if base.is_dir() else []
    return sorted((each for each in found if each), key=lambda each: each.origin)


def conversion_of(path: Path) -> Conversion | None:
    """What is kept of the GGUF file that is at `path`, or was; None: nothing."""
    return _conversion(_own(path))


def _conversion(own: Path) -> Conversion | None:
    """What the folder of one GGUF file holds; None: nothing."""
    files = [path for path in own.rglob("*") if path.is_file() and path.name != ORIGIN]
    if not files:
        return None
    finished = [path for path in files if path.suffix == ".edgeq"]
    origin = own
    with suppress(OSError), open(own / ORIGIN, "rb") as file:
        origin = Path(os.fsdecode(file.read(MAX_PATH)))
    return Conversion(own, origin, next(iter(finished), None), sum(path.stat().st_size for path in files))


def _own(path: Path) -> Path:
    return cache_folder() / FOLDER / _digest(str(path.resolve()))


def _key(path: Path, mmproj: Path | None) -> str:
    """Differs when the file, its tower, or the code that converts it, does."""
    from edgeq.converters.planning.code_digest import quantizing_code

    found = f"{__version__} {quantizing_code()}"
    for each in filter(None, (path, mmproj)):
        status = os.stat(each)
        with open(each, "rb") as file:
            start = hashlib.sha256(file.read(SAMPLED)).hexdigest()
        found = f"{status.st_size} {status.st_mtime_ns} {start} {found}"
    return _digest(found)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:16]
