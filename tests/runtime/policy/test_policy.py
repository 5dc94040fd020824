"""Actions of a float32 file equal those of transformers' `sample_actions`, keys and values rounded to f16 on both sides."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from numpy.typing import NDArray
from PIL import Image

from edgeq.converters.convert import ConvertOptions, convert
from edgeq.errors import InputError, ResourceError, UnsupportedError
from edgeq.format.container import ModelFile
from edgeq.network.config import ModelConfig
from edgeq.runtime import Model
from edgeq.runtime.network.compiled import beside
from edgeq.runtime.network.policy import Policy, reading_decoder
from edgeq.runtime.session.context_size import cache_bytes
from edgeq.targets.reference import ReferenceTarget
from edgeq.targets.target import Options
from edgeq.tools.cli.main import main
from tests.runtime.policy.policy_checkpoint import OWN, SIDE, build, reference

TOLERANCE = 1e-4
STATE = [0.3, -1.2, 0.7, 2.0, -0.1, 0.4]
Actions = NDArray[np.float32]


@dataclass(frozen=True)
class Case:
    """A checkpoint, its float32 file, what two cameras see, and noise."""

    folder: Path
    path: Path

    @cached_property
    def pictures(self) -> list[Image.Image]:
        pixels = np.random.default_rng(3).integers(0, 256, (2, SIDE, SIDE, 3), np.uint8)
        return [Image.fromarray(each) for each in pixels]

    @cached_property
    def noise(self) -> Actions:
        return np.random.default_rng(4).standard_normal((OWN["chunk_size"], OWN["max_action_dim"])).astype(np.float32)

    @cached_property
    def wanted(self) -> Actions:
        """transformers' own, of a prompt and of pixels as its processor makes them, which needs torchvision."""
        import torch
        from transformers import AutoTokenizer

        pixels = np.stack([np.asarray(picture) for picture in self.pictures]).transpose(0, 3, 1, 2)
        tokenizer = AutoTokenizer.from_pretrained(self.folder, pad_token="<|end|>")
        text = f"{'<image>' * 16 * len(pixels)}{tokenizer.bos_token}pick up\n"
        inputs = tokenizer([text], padding="max_length", max_length=48, padding_side="right", return_tensors="pt")
        state = torch.zeros(1, OWN["max_state_dim"])
        state[0, : len(STATE)] = torch.tensor(STATE)
        found: Actions = (
            reference(self.folder)
            .sample_actions(
                state=state,
                input_ids=inputs["input_ids"],
                pixel_values=torch.from_numpy((pixels / np.float32(255) - 0.5) / 0.5).float()[None],
                attention_mask=inputs["attention_mask"],
                pixel_attention_mask=torch.ones(1, len(pixels), dtype=torch.bool),
                noise=torch.from_numpy(self.noise.copy())[None],
            )[0]
            .numpy()
        )
        return found

    def act(self, target: str, **settings: Any) -> Actions:
        with Model.load(self.path, target=target, mode="a16", context=192) as model:
            return model.act(self.pictures, "pick up", STATE, noise=self.noise, **settings)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("policy")
    build(folder / "checkpoint")
    convert(str(folder / "checkpoint"), folder / "m.edgeq", ConvertOptions(method="none", dtype="f32"), lambda *_: None)
    return Case(folder / "checkpoint", folder / "m.edgeq")


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
    found = json.loads(run.invoke(main, [*asked, "--json"]).stdout)
    assert found["actions"] == lines
    result = run.invoke(main, [*asked[:-6], "--state", "{}"])
    assert result.exit_code == 1


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


def test_a_target_that_cannot_run_an_expert_refuses_it(case: Case) -> None:
    file, target = ModelFile.open(case.path), SimpleNamespace(name="other", shares_weights=False)
    with pytest.raises(UnsupportedError, match="target other has no experts of policies yet"):
        Policy(file, target, None, None, 192)  # type: ignore[arg-type]
