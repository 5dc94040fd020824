"""`python -m tests.cuda.first_run.bundle`: what has to be carried to a machine with a GPU, as build/gpu-bundle.tar.xz.

It has this tree without documentation, and build/kernels.  Unpacked it is a folder from which `python` imports edgeq: nothing
has to be built or installed there but edgeq's dependencies and pytest.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path

from edgeq.tools.cli.terminal import note
from tests.cuda.first_run import carried

ROOT = Path(__file__).parents[3]
BUNDLE = ROOT / "build" / "gpu-bundle.tar.xz"
FOLDER = "edgeq-gpu"
MAX_BYTES = 64 << 20
CARRIED = ("edgeq/", "runtime/", "converters/", "targets/", "tools/", "tests/", "models/tiny-llama/")
FILES = ("pyproject.toml", "constraints.txt", "Makefile", "LICENSE", "README.md", "docs/cuda.md")


def paths(root: Path = ROOT) -> list[Path]:
    """Files of the tree that travel, as git lists them: neither caches nor what was built."""
    listed = subprocess.run(["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=root, capture_output=True, check=True)
    names = [name for name in listed.stdout.decode().split("\0") if name.startswith(CARRIED) or name in FILES]
    return [root / name for name in sorted(names) if (root / name).is_file()]


def write(path: Path, pack: Path, root: Path = ROOT) -> int:
    """The archive; returns its bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:xz", preset=6) as archive:
        for each in paths(root):
            archive.add(each, f"{FOLDER}/{each.relative_to(root)}")
        archive.add(pack, f"{FOLDER}/{carried.PACK.relative_to(ROOT)}")
    return path.stat().st_size


def main() -> None:
    if not carried.PACK.exists():
        sys.exit(f"{carried.PACK} is not there; make it with: make kernels")
    size = write(BUNDLE, carried.PACK)
    note(f"{BUNDLE}: {size / 1e6:.1f} MB; on the other machine: tar -xf {BUNDLE.name} && cd {FOLDER} && "
         "python -m tests.cuda.first_run --out ../first-run")  # fmt: skip
    if size > MAX_BYTES:
        sys.exit(f"more than the {MAX_BYTES >> 20} MiB that can be carried")


if __name__ == "__main__":
    main()
