"""Actions of a float32 file equal those of transformers' `sample_actions`, keys and values rounded to f16 on both sides."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

from edgeq.converters.families.vision.pi0 import with_statistics
from edgeq.errors import FormatError, InputError, ResourceError
from edgeq.format.container import ModelFile
from edgeq.network.config import ModelConfig
from edgeq.runtime import Model
from edgeq.runtime.network.compiled import beside
from edgeq.runtime.network.policy import reading_decoder
from edgeq.runtime.session.context_size import cache_bytes
from edgeq.targets.reference import ReferenceTarget
from edgeq.targets.target import Options
from edgeq.tools.cli.main import main
from tests.runtime.policy.cases import STATE, Actions, Case
from tests.runtime.policy.policy_checkpoint import OWN

TOLERANCE = 1e-4


def far(found: Actions, wanted: Actions) -> float:
    """How far they are apart, in spreads of what was wanted."""
    return float(np.abs(found - wanted).max() / wanted.std())


@pytest.mark.parametrize("target", ["reference", "cpu"])
def test_actions_equal_transformers(case: Case, target: str) -> None:
    found = case.act(target)
    assert found.shape == (OWN["chunk_size"], OWN["max_action_dim"])
    assert far(found, case.wanted) < TOLERANCE


@pytest.mark.parametrize("method", ["rtn", pytest.param("awq+gptq", marks=pytest.mark.exhaustive)])
def test_a_file_of_few_bits_acts_from_the_command_line(case: Case, tmp_path: Path, method: str) -> None:
    for i, picture in enumerate(case.pictures):
        picture.save(tmp_path / f"{i}.png")
    path, run = tmp_path / "m.edgeq", CliRunner()
    rows = ("--calibration-rows", "4", "--calibration-length", "64") if "awq" in method else ()
    few = ("--bits", "8", "--method", method, *rows)
    result = run.invoke(main, ["convert", str(case.folder), "-o", str(path), *few])
    assert result.exit_code == 0, result.stderr
    images = [part for i in range(2) for part in ("--image", str(tmp_path / f"{i}.png"))]
    asked = ["act", str(path), *images, "-p", "pick up", "--state", str(STATE), "--seed", "3", "--mode", "a16"]
    result = run.invoke(main, asked)
    assert result.exit_code == 0, result.stderr
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    with Model.load(case.path, target="cpu", mode="a16") as model:
        wanted = model.act(case.pictures, "pick up", STATE, seed=3)
    assert 0 < far(np.array(lines, np.float32), wanted) < 0.2
    shown = run.invoke(main, ["inspect", str(path), "--json"]).stdout
    check_inspected(json.loads(shown), run.invoke(main, ["inspect", str(path)]).stdout)
    compared = run.invoke(main, ["compare", str(path), str(case.path), "--against", str(case.path), "--mode", "a16", "--json"])
    check_compared(json.loads(compared.stdout))
    result = run.invoke(main, ["compare", str(path), "--against", str(case.folder)])
    assert result.exit_code == 1 and "a policy is compared with a file of it" in result.stderr
    provenance = ModelFile.open(path).metadata.provenance["draft"]
    assert isinstance(provenance, dict) and provenance["method"] == method
    found = json.loads(run.invoke(main, [*asked, "--json"]).stdout)
    assert found["actions"] == lines
    result = run.invoke(main, [*asked[:-6], "--state", "{}"])
    assert result.exit_code == 1


def check_compared(facts: dict[str, Any]) -> None:
    """A file of 8 bits is not far from the source, which is where it is."""
    few, same = facts["files"]
    assert facts["situations"] == 16 and len(facts["source"]["spreads"]) == 5
    assert 0 < few["rms"] < few["largest"] < 0.3 and few["largest"] == max(few["largest_of_numbers"])
    assert few["rms"] == pytest.approx(np.sqrt(np.mean(np.square(few["rms_of_numbers"]))))
    assert same["rms"] == same["largest"] == 0


def check_inspected(facts: dict[str, Any], text: str) -> None:
    """The expert's layers are a part of their own: none of the decoder's."""
    groups = {group["part"]: group for group in facts["layers"] if group["component"] == "weights"}
    assert groups["expert qkv"]["count"] == groups["qkv"]["count"] == 3
    assert groups["expert qkv"]["columns"] == 48 and groups["qkv"]["columns"] == 72
    weights = [group for name, group in groups.items() if name.startswith("expert ")]
    assert {group["part"] for group in weights} >= {"expert state_in", "expert action_out"}
    assert facts["expert_bytes"] > sum(group["bytes"] for group in weights)
    of_expert = [g for g in facts["layers"] if g["part"].startswith("expert ")]
    numbers = sum(group["count"] * group["rows"] * group["columns"] for group in weights)
    assert facts["bits_per_weight"]["expert"] == pytest.approx(8 * sum(g["bytes"] for g in of_expert) / numbers)
    assert facts["bits_per_weight"]["all"] < facts["bits_per_weight"]["expert"]
    assert "expert: 3 layers, hidden 48" in text and "7 actions of 5 numbers from a state of 9, in 4 steps: " in text


WRONG: dict[str, Callable[[ModelConfig], ModelConfig]] = {
    "other periods": lambda c: of_expert(c, min_period=0.02),
    "other steps": lambda c: of_expert(c, steps=5),
    "another base": lambda c: of_expert(c, rope=replace(c.rope, theta=9000.0)),
    "another activation": lambda c: of_expert(c, hidden_act="silu"),
}


def of_expert(config: ModelConfig, **fields: Any) -> ModelConfig:
    assert config.policy
    return replace(config, policy=replace(config.policy, **fields))


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_choice_shows(case: Case, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = ModelFile.open

    def other(path: Path) -> ModelFile:
        file = opened(path)
        file.metadata = replace(file.metadata, config=WRONG[name](file.metadata.config))
        return file

    monkeypatch.setattr(ModelFile, "open", other)
    assert far(case.act("reference"), case.wanted) > 10 * TOLERANCE


def test_what_cannot_be_acted_on_is_refused(case: Case) -> None:
    with Model.load(case.path, target="reference", context=192) as model:
        seeded = model.act(case.pictures, "pick up", STATE, seed=5)
        assert np.array_equal(seeded, model.act(case.pictures, "pick up", STATE, seed=5))
        refused: list[tuple[dict[str, Any], str]] = [
            ({"images": []}, "a picture of each camera"),
            ({"images": [Image.new("RGB", (9, 8))]}, "as wide as high"),
            ({"state": [0.0] * 10}, "1 to 9 finite numbers"),
            ({"state": [float("nan")]}, "1 to 9 finite numbers"),
            ({"noise": np.zeros((1, 5), np.float32)}, "an array of 7 x 5 numbers"),
            ({"steps": 0}, "steps"),
        ]
        for changed, says in refused:
            with pytest.raises(InputError, match=says):
                model.act(**({"images": case.pictures, "text": "pick up", "state": STATE} | changed))
        with pytest.raises(InputError, match="makes actions and continues no texts"):
            model.generate("def main():")


def test_with_statistics_a_robot_has_its_own_units(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many numbers of a state and of an action, the first ones, as the data have."""
    config = ModelFile.open(case.path).metadata.config
    assert config.policy
    stats: dict[str, Any] = {"observation.state": {"mean": [5.0, -3.0, 0.5], "std": [2.0, 0.5, 0.0], "count": [7]}}
    stats["action"] = {"mean": [10.0, -20.0], "std": [3.0, 0.1]}
    policy = with_statistics(config.policy, stats)
    assert ModelConfig.from_json(replace(config, policy=policy).to_json()).policy == policy
    read = [0.5, -1.0, 0.0]
    made = case.act("reference", state=read)
    opened = ModelFile.open

    def other(path: Path) -> ModelFile:
        file = opened(path)
        file.metadata = replace(file.metadata, config=replace(config, policy=policy))
        return file

    monkeypatch.setattr(ModelFile, "open", other)
    found = case.act("reference", state=[6.0, -3.5, 0.5])
    assert found.shape == (OWN["chunk_size"], 2)
    assert np.allclose(found, made[:, :2] * np.array([3, 0.1], np.float32) + np.array([10, -20], np.float32), rtol=1e-6)
    with pytest.raises(InputError, match="3 finite numbers, as many as the file has statistics of"):
        case.act("reference", state=[6.0, -3.5])


@pytest.mark.parametrize(
    "stats, says",
    [
        ({"action": {"mean": [0.0], "std": [1.0]}}, "mean of observation.state is None; expected a list of numbers"),
        ({"observation.state": {"mean": [0.0], "std": [1.0, 2.0]}}, "state_mean has 1 numbers, state_std 2"),
        ({"observation.state": {"mean": [0.0] * 10, "std": [1.0] * 10}}, "at most 9"),
        ({"observation.state": {"mean": [0.0], "std": [-1.0]}}, "no std below 0"),
        ({"observation.state": {"mean": [float("nan")], "std": [1.0]}}, "no number from -1e12 to 1e12"),
        ({"observation.state": {"mean": "x", "std": [1.0]}}, "expected a list of numbers"),
    ],
)
def test_statistics_that_are_none_are_refused(case: Case, stats: dict[str, Any], says: str) -> None:
    policy = ModelFile.open(case.path).metadata.config.policy
    assert policy
    with pytest.raises(FormatError, match=says):
        with_statistics(policy, {"action": {"mean": [0.0], "std": [1.0]}} | stats)


def test_memory_of_expert_and_tower_is_asked_for_before_anything_is_compiled(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = ModelFile.open(case.path)
    graph, options = reading_decoder(file.metadata), Options("a16", max_rows=192)
    alone = ReferenceTarget().room(graph, file, options).needed + cache_bytes(graph, options, 192)
    weights = file.metadata.policy_bytes() + file.metadata.vision_bytes()
    available = alone + weights
    monkeypatch.setattr("edgeq.targets.host.available_bytes", lambda: available)
    with pytest.raises(ResourceError, match="a context of 192 positions needs"):
        Model.load(case.path, target="reference", mode="a16", context=192, max_rows=192, max_logits=1)
    # The buffers of three programs.
    available += 1 << 18
    with Model.load(case.path, target="reference", mode="a16", context=192, max_rows=192, max_logits=1) as model:
        assert model.context == 192 and model.policy is not None
    alone = sum(each.own_bytes for each in beside(file, options, graph, drafts=False))
    assert weights < alone < weights + (1 << 16), "weights once, and pages of the tower"
