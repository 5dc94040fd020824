"""`edgeq bench`."""

from __future__ import annotations

import csv
import io
import time
from pathlib import Path
from typing import Any

import pytest

from edgeq import __version__
from edgeq.runtime import Model
from edgeq.system import machine
from tests.cli.running import REFERENCE, TARGETS, Run, objects


def test_bench_prints_rows_as_llama_bench_names_them(edgeq: Run, demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # That of a real machine is another one at the next look.
    monkeypatch.setattr(machine, "temperature", lambda: 41.5)
    options = ("-p", "8,0", "-n", "4", "-d", "0,16", "-t", "1", "-r", 2, "--target", TARGETS[0])
    rows = objects(edgeq("bench", demo, *options, "-o", "json"))
    assert [row["test"] for row in rows] == ["pp8", "pp8 @ d16", "tg4", "tg4 @ d16"]
    again = objects(edgeq("bench", demo, "-p", 0, "-n", 2, "-t", 1, "-r", 1, "--json", *REFERENCE))
    assert [row.keys() for row in again] == [rows[0].keys()]
    for row in rows:
        assert len(row["samples_s"]) == 2 and min(row["samples_s"]) <= row["tokens"] / row["tokens_per_s"]
        assert len(row["step_s"]) == (8 if row["kind"] == "tg" else 0)
    assert rows[3]["bytes_per_s"] > 0 and rows[0]["bytes_per_s"] is None
    assert min(rows[0]["samples_s"]) <= rows[0]["p50"] <= max(rows[0]["samples_s"]) and rows[0]["context"] == 24
    assert rows[0]["version"] == __version__ and rows[0]["processor"] and rows[0]["load_s"] > 0
    assert rows[0]["codec"] == "i4 g128 zero" and rows[0]["threads"] == 1 and "facts" not in rows[0]
    assert all(0 <= row["compile_s"] <= row["load_s"] for row in rows) and rows[0]["celsius"] == 41.5


def test_bench_tells_how_warm_the_machine_was_and_how_long_kernels_were_compiled(
    edgeq: Run, demo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("bench", demo, "-p", 0, "-n", 2, "-t", 1, "-r", 1, *REFERENCE)
    assert " °C " not in edgeq(*words).stdout and "compiling" not in edgeq(*words).stdout
    monkeypatch.setattr(machine, "temperature", lambda: 71.5)
    plain = Model.load

    def load(path: Path, *, on_progress: Any, **options: Any) -> Model:
        for done in range(4):
            on_progress(done, 3, "compiling matmul")
            time.sleep(0.02)
        return plain(path, **options)

    monkeypatch.setattr(Model, "load", load)
    (row,) = objects(edgeq(*words, "--json"))
    assert row["celsius"] == 71.5 and 0.05 < row["compile_s"] < 60
    lines = edgeq(*words).stdout.splitlines()
    assert " s compiling" in lines[1] and " °C " in lines[3] and " 72 " in lines[5]


def test_bench_tables_have_one_line_per_row(edgeq: Run, demo: Path) -> None:
    options = ("-p", 0, "-n", "2,3", "-t", 1, "-r", 1, *REFERENCE)
    lines = edgeq("bench", demo, *options).stdout.strip().splitlines()
    about, table = lines[:2], lines[3:]
    assert len(table) == 4 and len({len(line) for line in table}) == 1 and "tg3" in table[3] and len(table[0]) <= 100
    assert about[0].startswith("tiny-llama, i4 g128 zero, head i8 g128, 3.2 MB; reference, a16; cache f16, ")
    assert about[1].startswith(f"edgeq {__version__}, {machine.cpu().name}, 20")
    table = list(csv.DictReader(io.StringIO(edgeq("bench", demo, *options, "-o", "csv").stdout)))
    assert [row["test"] for row in table] == ["tg2", "tg3"]


def test_bench_decodes_more_texts_at_once_than_a_chunk_has_rows(edgeq: Run, demo: Path) -> None:
    result = edgeq("bench", demo, "-p", 0, "-n", 2, "--batch", 600, "-r", 1, "-t", 1)
    assert result.exit_code == 0 and "tg2 x600" in result.stdout
