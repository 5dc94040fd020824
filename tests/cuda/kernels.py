"""`python -m tests.cuda.kernels sm_87,sm_90`: the kernels of the tests in build/kernels, for a machine with a GPU (real.py)."""

from __future__ import annotations

import sys

from edgeq.targets.cuda import build, nvrtc, pack_file, parallel
from edgeq.targets.cuda.pack_file import Pack
from edgeq.tools.terminal import note, progress
from edgeq.whole_file import write_whole
from tests.cuda.real import PACK
from tests.cuda.test_generated import VARIANTS


def main(archs: list[str]) -> None:
    variants = sorted({each.values[0] for each in VARIANTS}, key=lambda variant: variant.symbol)
    with progress() as report:
        made, compiled = parallel.compiled(variants, [*archs, nvrtc.VIRTUAL], report)
    data = pack_file.encode(Pack(build.versions(), build.source_digest(), made))
    PACK.parent.mkdir(parents=True, exist_ok=True)
    write_whole(PACK, data)
    note(f"{PACK}: {len(variants)} kernels for {', '.join(archs)}, {len(data) / 1e6:.1f} MB, {compiled} compiled")


if __name__ == "__main__":
    main(sys.argv[1].split(","))
