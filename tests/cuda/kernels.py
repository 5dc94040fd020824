"""`python -m tests.cuda.kernels sm_87,sm_90`: the kernels that a machine with a GPU needs for its tests (real.py) and for the
first run on it (first_run), in build/kernels."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from edgeq.format.records import KvCodec
from edgeq.runtime.load_options import MAX_LOGITS
from edgeq.runtime.network.decoder import decoder
from edgeq.system.whole_file import write_whole
from edgeq.targets.cuda.run import plan
from edgeq.targets.cuda.supply import build, nvrtc, parallel
from edgeq.targets.cuda.supply.pack import Variant
from edgeq.targets.cuda.supply.pack_file import Pack
from edgeq.targets.target import Options
from edgeq.tools.cli.terminal import note, progress
from tests.cuda import asked
from tests.cuda.first_run import carried
from tests.cuda.first_run.shapes import random_model
from tests.cuda.first_run.steps import SHAPES


def of_shapes(shapes: Sequence[str] = SHAPES) -> set[Variant]:
    """Those of the models that the first run measures; sizes are arguments, so one layer has all."""
    found = set[Variant]()
    for name in shapes:
        with random_model(name, 1) as file:
            options = Options("a16", max_logits=MAX_LOGITS, kv=KvCodec())
            found.update(plan.variants(decoder(file.metadata), file, options, ("a16", "a8")))
    return found


def main(archs: Sequence[str], variants: Sequence[Variant], path: Path) -> None:
    with progress() as report:
        made, compiled = parallel.compiled(variants, [*archs, nvrtc.VIRTUAL], report)
    data = carried.write(Pack(build.versions(), build.source_digest(), made))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, data)
    note(f"{path}: {len(variants)} kernels for {', '.join(archs)}, {len(data) / 1e6:.1f} MB, {compiled} compiled")
    if spilled := [f"{v.symbol} for {image.arch}" for v in variants for image in made[v].images.values() if image.spilled]:
        sys.exit(f"registers are spilled by {', '.join(spilled)}")


if __name__ == "__main__":
    every = {*asked.every(), *of_shapes()}
    main(sys.argv[1].split(","), sorted(every, key=lambda variant: variant.symbol), carried.PACK)
