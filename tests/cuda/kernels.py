"""`python -m tests.cuda.kernels sm_87,sm_90`: the kernels of the tests in build/kernels, for a machine with a GPU (real.py)."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from edgeq.system.whole_file import write_whole
from edgeq.targets.cuda.supply import build, nvrtc, pack_file, parallel
from edgeq.targets.cuda.supply.pack import Variant
from edgeq.targets.cuda.supply.pack_file import Pack
from edgeq.tools.cli.terminal import note, progress
from tests.cuda import asked
from tests.cuda.real import PACK


def main(archs: Sequence[str], variants: Sequence[Variant], path: Path) -> None:
    with progress() as report:
        made, compiled = parallel.compiled(variants, [*archs, nvrtc.VIRTUAL], report)
    data = pack_file.encode(Pack(build.versions(), build.source_digest(), made))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, data)
    note(f"{path}: {len(variants)} kernels for {', '.join(archs)}, {len(data) / 1e6:.1f} MB, {compiled} compiled")
    if spilled := [f"{v.symbol} for {image.arch}" for v in variants for image in made[v].images.values() if image.spilled]:
        sys.exit(f"registers are spilled by {', '.join(spilled)}")


if __name__ == "__main__":
    main(sys.argv[1].split(","), asked.every(), PACK)
