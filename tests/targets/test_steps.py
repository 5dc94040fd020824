"""The steps that a program times: which of them read a layer's weights, and what a benchmark makes of that."""

from __future__ import annotations

import numpy as np
import pytest
from cases import Arrays, recording, rows_of, weight

from edgeq.format.codec import Codec
from edgeq.format.records import LinearSpec, LowRank
from edgeq.targets import load
from edgeq.targets.graph import CacheSpec, Embed, Graph, Linear
from edgeq.targets.target import Options
from edgeq.tools.measure.breakdown import TimedRun, lines


@pytest.mark.parametrize("target", ["cpu", "reference"])
def test_work_of_a_layer_of_two_blocks_is_counted_once(target: str) -> None:
    rng, arrays, i4, f16 = np.random.default_rng(0), Arrays(), Codec("int", 4, 0), Codec("f16")
    wide, narrow = (arrays.add(rng.standard_normal((9, width)).astype(np.float32), "f32") for width in (112, 16))
    low_rank = LowRank(weight(arrays, rng, f16, 48, 2), weight(arrays, rng, f16, 2, 112))
    blocks = tuple(weight(arrays, rng, i4, 48, columns) for columns in (96, 16))
    layers = [LinearSpec("0.two", blocks, low_rank=low_rank), LinearSpec("1.two", blocks), LinearSpec("0.one", blocks[1:])]
    reads = [Linear(0, "x", layers[0], "y"), Linear(0, "x", layers[1], "y"), Linear(0, "z", layers[2], "y")]
    graph = Graph(
        {"x": 112, "y": 48, "z": 16}, (Embed(-1, wide, "x"), Embed(-1, narrow, "z"), *reads), "y", (CacheSpec(1, 2, 2),)
    )
    program = load(target).compile(graph, arrays, Options("a8", threads=1, max_rows=4, max_logits=4))
    for rows, decoded in ((1, True), (4, False)):
        with recording(program) as times:
            program.run(rows_of(program, rows))
        reading = [step.operation for step in times[0].steps if step.reads_weights]
        assert list(dict.fromkeys(map(id, reading))) == list(map(id, reads))
        found = {line.name: line for line in lines([TimedRun(1.0, rows, times)], decoded)}
        for name, some in (("two", layers[:2]), ("one", layers[2:])):
            line = found[name]
            rate = line.bytes_per_s if decoded else line.operations_per_s
            assert rate is not None
            work = sum(layer.nbytes if decoded else 2 * 48 * layer.columns for layer in some)
            assert rate * line.seconds == pytest.approx(work)
