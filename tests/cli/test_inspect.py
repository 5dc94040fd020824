"""`edgeq inspect`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from edgeq.format.container import ModelFile
from edgeq.format.writer import Writer
from tests.cli.running import Run, objects


def test_inspect_shows_parts_codecs_bits_and_provenance(edgeq: Run, demo: Path) -> None:
    result = edgeq("inspect", demo, "--verify")
    assert result.exit_code == 0
    for fact in ("every byte verified", "i4 g128 zero", "gate_up", "4.188", "decoder 4.188, head 8.125", '  method: "rtn"'):
        assert fact in result.stdout, fact


def test_inspect_json_adds_up(edgeq: Run, demo: Path) -> None:
    facts = objects(edgeq("inspect", demo, "--json"))
    assert facts["bytes"] == demo.stat().st_size and facts["verified"] is False
    layers = sum(g["bytes"] for g in facts["layers"])
    sizes = facts["bytes_per_token"]
    assert sizes["weights"] + sizes["head"] == layers + facts["arrays"]["bytes"]
    assert facts["bits_per_weight"]["decoder"] == pytest.approx(4 + 24 / 128)


@pytest.mark.exhaustive
def test_inspect_lists_every_part_and_a_total_that_is_the_file(edgeq: Run, tiny_llama: Path, tmp_path: Path) -> None:
    seen = {}
    short = ("--calibration-rows", 5, "--calibration-length", 64, "--head", 8)
    for name, given in (("ttq", ("--bits", 3)), ("resq", ("--bits", "4/4/4", *short))):
        out = tmp_path / f"{name}.edgeq"
        assert edgeq("convert", tiny_llama, "-o", out, "--method", name, *given).exit_code == 0
        facts = objects(edgeq("inspect", out, "--json"))
        blobs = sum(facts["blobs"].values())
        parts = sum(group["bytes"] for group in facts["layers"])
        assert parts + facts["arrays"]["bytes"] + blobs + facts["other_bytes"] == facts["bytes"] == out.stat().st_size
        assert 16384 < facts["other_bytes"] < 60_000
        lines = edgeq("inspect", out).stdout.splitlines()
        assert any(line.split() == ["total", f"{out.stat().st_size / 1e6:.2f}"] for line in lines)
        seen[name] = {(group["component"], group["codec"]) for group in facts["layers"]}
    assert {("weights", "i3 g32 zero"), ("low rank", "f16"), ("master", "i8 g128")} <= seen["ttq"]
    assert {("weights", "i4 row"), ("second block", "i8 row"), ("transform", "f32"), ("input order", "i32")} <= seen["resq"]


def test_a_file_with_compiled_kernels_is_listed_whole_and_runs_as_before(edgeq: Run, demo: Path, tmp_path: Path) -> None:
    file = ModelFile.open(demo)
    writer = Writer(tmp_path / "with.edgeq")
    for index in range(len(file.segments)):
        writer.append([file.segment(index)])
    kernels = {"sm_87": writer.append([b"code" * 5000]), "sm\x1b[7m": writer.append([b"?"])}
    out = writer.finish(replace(file.metadata, kernels=kernels)).path
    before, facts = (objects(edgeq("inspect", path, "--json", "--verify")) for path in (demo, out))
    assert facts["kernels"] == {"sm_87": 20_000, "sm\x1b[7m": 1} and before["kernels"] == {}
    assert abs(facts["other_bytes"] - before["other_bytes"]) < 500
    rows = [line.split() for line in edgeq("inspect", out).stdout.splitlines()]
    assert ['"sm_87"', "kernels", "0.02"] in rows and ['"sm\\u001b[7m"', "kernels", "0.00"] in rows
    texts = [edgeq("run", path, "-p", "def main", "-n", 8, "--target", "reference").stdout for path in (demo, out)]
    assert texts[0] == texts[1] and texts[0].strip()


def test_inspect_shows_a_text_of_the_file_and_keeps_names_whole(
    edgeq: Run, demo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert json.loads(edgeq("inspect", demo, "--show", "tokenizer.json").stdout)["model"]
    missing = edgeq("inspect", demo, "--show", "chat_template")
    assert missing.exit_code == 1 and "no chat_template in the file; it has tokenizer.json" in missing.stderr
    monkeypatch.setenv("COLUMNS", "40")
    assert "metadata, padding" in edgeq("inspect", demo).stdout
