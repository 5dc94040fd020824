"""Which spread of fused products is fastest on this GPU: `python -m tests.cuda.first_run.tuning SHAPE`.

The products of four layers of the shape are timed by the device's clock, with the results of any spread the same.
"""

from __future__ import annotations

import statistics
import sys
from itertools import product

import numpy as np

from edgeq.runtime.network.decoder import decoder
from edgeq.targets.cuda.device.discover import find
from edgeq.targets.cuda.device.driver import DriverDevice
from edgeq.targets.cuda.lowering.context import Tuning
from edgeq.targets.cuda.run.program import CudaProgram
from edgeq.targets.cuda.supply.supply import Supply
from edgeq.targets.graph import Linear
from edgeq.targets.rows import Rows
from edgeq.targets.target import Options
from tests.cuda.first_run.results import write
from tests.cuda.first_run.shapes import random_model

LAYERS = 4
GRID = [
    Tuning(resident, in_flight << 10, per_block)
    for resident, in_flight, per_block in product((2, 4, 6, 8), (16, 44, 96, 192), (4, 8, 16))
]
ROUNDS, REPETITIONS = 8, 7


def main(shape: str) -> None:
    gpus = find()
    if gpus.first is None:
        sys.exit(gpus.refused or "no GPU")
    device, seconds = DriverDevice(gpus.first.ordinal), dict[Tuning, float]()
    grid = [Tuning(), *(GRID[:3] if shape == "tiny" else GRID)]
    with random_model(shape, None if shape == "tiny" else LAYERS) as file:
        graph, options = decoder(file.metadata), Options("a16", max_rows=16, max_logits=1)
        source = Supply(file, device.sm, gpus.driver)
        for each in dict.fromkeys(grid):
            program = CudaProgram(device, graph, file, options, kernel_source=source, tuning=each)
            none = np.zeros(1, np.int32)
            rows = Rows(none, none[None], none, none, [[program.new_page()]], none)
            program.run(rows)
            taken = program.seconds_of(Linear, rows, ROUNDS, REPETITIONS)
            seconds[each] = statistics.median(taken) / ROUNDS
            write("tuning", {"shape": shape, **vars(each), "us": 1e6 * seconds[each], "least_us": 1e6 * min(taken) / ROUNDS})
    best = min(seconds, key=seconds.__getitem__)
    write("tuning", {"shape": shape, "best": vars(best), "gain": seconds[Tuning()] / seconds[best]})


if __name__ == "__main__":
    main(sys.argv[1])
