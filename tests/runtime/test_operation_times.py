"""The time of every operation, and what the benchmark makes of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from edgeq.runtime import Model
from edgeq.targets.graph import Linear, Select
from edgeq.targets.rows import Rows
from edgeq.tools.cli.main import main
from edgeq.tools.measure import breakdown
from tests.targets.cases import recording


def rows(model: Model, count: int) -> Rows:
    places = np.arange(count, dtype=np.int32)
    pages = [[model.program.new_page() for _ in range(2)]]
    return Rows(places, places[None], places, np.zeros(count, np.int32), pages, np.array([count - 1], np.int32))


@pytest.mark.parametrize(("target", "threads"), [("cpu", 1), ("cpu", 2), ("reference", 1)])
def test_every_operation_is_timed_and_the_times_fit_into_the_run(tiny_path: Path, target: str, threads: int) -> None:
    model = Model.load(tiny_path, target=target, threads=threads)
    for count in (1, 70):
        with recording(model.program) as times:
            for _ in range(3):
                logits = model.program.run(rows(model, count)).copy()
        assert np.array_equal(logits, model.program.run(rows(model, count)))
        steps, run = times[-1].steps, times[-1].run
        seconds = run.threads[0, :, 1:]
        assert len(times) == 3 and seconds.shape == (len(steps), 2) and (seconds >= 0).all()
        # Sums of differences have errors of rounding.
        assert 0 < seconds.sum() <= (1 + 1e-6) * run.inside and run.inside <= run.ended - run.began
        order = {id(operation): i for i, operation in enumerate(model.graph.operations)}
        places = [order[id(operation)] for operation, *_ in steps]
        assert places == sorted(places)
        named = {id(operation) for operation, *_ in steps}
        assert all(id(o) in named for o in model.graph.operations if isinstance(o, (Linear, Select)))


def test_lines_add_up_to_the_token_and_a_product_reads_its_weights(tiny_path: Path) -> None:
    model = Model.load(tiny_path, target="cpu", threads=2)
    for found in (breakdown.decode(model, [1, 2, 3], 8), breakdown.prefill(model, list(range(200)), 20, 2)):
        assert sum(line.share for line in found) == pytest.approx(1)
        assert [line.name for line in found[-2:]] == [breakdown.WAITING, breakdown.OUTSIDE]
        assert {"qkv", "o", "gate_up", "down", "head", "attend"} <= {line.name for line in found}
    assert type(model.program).__name__ == "CpuProgram"
    decoded = {line.name: line for line in breakdown.decode(model, [], 4)}
    down = decoded["down"]
    layers = [x.nbytes for name, x in model.file.metadata.linears.items() if name.endswith("down")]
    assert down.bytes_per_s is not None and down.bytes_per_s * down.seconds == pytest.approx(sum(layers))
    assert down.operations_per_s is None and decoded["attend"].bytes_per_s is None


def test_bench_shows_where_the_time_goes(model_path: Callable[..., Path]) -> None:
    path = model_path("tiny-llama", method="rtn")
    arguments = ["bench", str(path), "-p", "32", "-n", "4", "-r", "1", "-t", "1", "--operations"]
    shown = CliRunner().invoke(main, arguments)
    assert shown.exit_code == 0, shown.stderr
    tables = shown.stdout.split("\n\n")
    assert len(tables) == 6 and "pp32, 1 thread:" in tables[2] and "GOPS" in tables[3] and "GB/s" in tables[5]
    assert all(breakdown.OUTSIDE in tables[i] and "gate_up" in tables[i] for i in (3, 5))
    result = json.loads(CliRunner().invoke(main, [*arguments, "-o", "json"]).stdout)
    assert [row["test"] for row in result] == ["pp32", "tg4"]
    for row in result:
        assert sum(line["share"] for line in row["operations"]) == pytest.approx(1)
    without = CliRunner().invoke(main, [*arguments[:-1], "-o", "csv"])
    assert without.exit_code == 0 and "operations" not in without.stdout


def test_a_model_loads_without_reading_its_tokenizer(tiny_path: Path) -> None:
    model = Model.load(tiny_path, target="cpu")
    list(breakdown.prefill(model, [1, 2, 3], 0, 1))
    assert "text" not in vars(model)
    assert "".join(model.generate("def", max_tokens=2)) and "text" in vars(model)
