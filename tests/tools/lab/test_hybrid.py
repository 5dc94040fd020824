"""What is said of states and of the layer that drafts is of runs that happened."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner

from edgeq.network.config import ModelConfig
from edgeq.tools.lab.hybrid import shapes
from edgeq.tools.lab.hybrid.__main__ import main
from edgeq.tools.measure.random_file import bytes_per_token

TINY = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 24,
    "linear_value_head_dim": 20,
}


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(shapes.SHAPES, "qwen3.5-0.8b", shapes.SHAPES["qwen3.5-0.8b"] | TINY)


def result(*words: str) -> Any:
    found = CliRunner().invoke(main, [*words, "--layers", "4", "-r", "1", "--json"])
    assert found.exit_code == 0, found.output
    return json.loads(found.stdout)


def test_drafts_are_right_as_often_as_was_asked() -> None:
    plain, *drafting = result("gain", "--drafted", "256", "--gamma", "3", "-n", "41")
    assert plain["share"] is None and plain["tokens_per_cycle"] == 1.0
    # A cycle gives one token and those of the draft that hold.
    assert [gain["share"] for gain in drafting] == [0.0, 0.5, 0.8, 1.0]
    assert drafting[0]["accepted"] == 0.0 and drafting[0]["tokens_per_cycle"] == 1.0
    assert drafting[3]["accepted"] == 1.0 and drafting[3]["tokens_per_cycle"] == 4.0
    assert 0.0 < drafting[1]["accepted"] < drafting[2]["accepted"] < 1.0


def test_states_are_read_beside_weights_and_kept_on_disk() -> None:
    prompt, token = result("scan", "-p", "32")
    config: ModelConfig = shapes.shape("qwen3.5-0.8b", 4)
    states = 3 * 4 * (6 * 24 * 20 * 1.125)
    assert prompt["rows"] == 32 and token["bytes_ratio"] > 1 + states / bytes_per_token(config, shapes.CODEC) * 0.9
    continued = result("continue", "-n", "256")
    assert continued["tokens"] == 256 and continued["snapshots"] and continued["disk_ms"] > 0
    heads = result("cost", "--heads", "512,64")
    assert [cost["drafted"] for cost in heads] == [512, 64]
