"""The costs of a vision-language model, measured on files of a tiny shape."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from edgeq.container import ModelFile
from edgeq.tools.lab.vision_costs import main, spread

pytestmark = pytest.mark.exhaustive


def test_files_differ_in_what_is_compared_and_every_part_is_measured(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, [str(tmp_path), "--shape", "qwen2-vl-tiny", "--rounds", "1", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    names = {part: [line["name"] for line in found[part]["lines"]] for part in ("prefill", "order", "decode")}
    assert names == {
        "prefill": ["static", "token", "block", "no transform"],
        "order": ["sequence", "modality"],
        "decode": ["text", "with a tower"],
    }
    assert all(found[part]["lines"][0]["ratio"] == [1, 1, 1] for part in names)
    assert all(3 < taken < 10 for taken in found["memory"]["reading_bytes_per_pixel"].values())
    files = {path.stem: ModelFile.open(path).metadata for path in tmp_path.glob("*.edgeq")}
    downs = {name: metadata.linears["layers.0.down"] for name, metadata in files.items()}
    assert {name: down.transform is not None for name, down in downs.items()} == {
        "plain": False, "static": True, "token": True, "block": True, "static-plain": False, "text": True
    }  # fmt: skip
    activations = {name: down.activation for name, down in downs.items()}
    assert activations["block"] is None and activations["token"].scales is None and activations["static"].scales is not None
    assert files["text"].config.vision is None and not any(name.startswith("vision.") for name in files["text"].linears)


def test_an_unknown_part_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, [str(tmp_path), "--only", "prefill,speed"])
    assert result.exit_code == 2 and "speed: choose from prefill, order, decode, memory" in result.output


def test_a_spread_is_median_and_range() -> None:
    assert spread([3.0, 1.0, 2.0]) == [2.0, 1.0, 3.0]
