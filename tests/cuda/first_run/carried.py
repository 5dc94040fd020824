"""The kernels that were carried to a machine with a GPU: one pack, packed with xz, and its way into a cache folder."""

from __future__ import annotations

import lzma
import os
import subprocess
import sys
from pathlib import Path

from edgeq.errors import InputError
from edgeq.format import kernel_pack
from edgeq.targets.cuda.supply import build, pack_file
from edgeq.targets.cuda.supply.pack_file import Pack

PACK = Path(__file__).parents[3] / "build" / "kernels" / "tests.kernels.xz"


def write(pack: Pack) -> bytes:
    """Machine code of one kernel resembles that of the next: xz leaves a fifteenth of it."""
    return lzma.compress(pack_file.encode(pack), preset=6)


def read(path: Path) -> Pack:
    """InputError: it is not there, or damaged.  FormatError: what it packs is."""
    try:
        with lzma.open(path) as file:
            data = file.read(kernel_pack.MAX_BYTES + 1)
    except FileNotFoundError:
        raise InputError(f"{path} is not there; make it with: make kernels") from None
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise InputError(f"{path}: cannot be unpacked: {error}") from None
    if len(data) > kernel_pack.MAX_BYTES:
        raise InputError(kernel_pack.too_large(path, len(data)))
    return pack_file.decode(data, str(path))


def put(path: Path, cache: Path) -> str:
    """Put the kernels of a pack into a cache folder, by a process whose cache that is; what it says.

    Without a pack the run goes on: what needs none is tested all the same.
    """
    command = [sys.executable, "-m", "tests.cuda.first_run.carried", str(path)]
    here = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    done = subprocess.run(command, env=here, capture_output=True, text=True, cwd=Path(__file__).parents[3])
    return (done.stdout or done.stderr).strip()


def main(path: Path) -> None:
    try:
        pack = read(path)
    except InputError as error:
        sys.exit(str(error))
    for variant, kernel in pack.kernels.items():
        build.keep(variant, kernel)
    sys.stdout.write(f"{len(pack.kernels)} kernels for {', '.join(pack.archs)} from {path}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
