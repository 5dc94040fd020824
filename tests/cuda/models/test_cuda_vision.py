"""Models that see, on the emulated device: the tower and the decoder that reads its features, against the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from edgeq.converters.convert import ConvertOptions, convert
from edgeq.format.container import ModelFile
from edgeq.runtime import Model, Prompt
from edgeq.targets import TargetChoice, load
from edgeq.targets.cuda import CudaTarget
from edgeq.targets.cuda.run.program import CudaProgram
from edgeq.targets.cuda.supply.ahead import needed
from edgeq.tools.commands.build import workloads
from tests.checkpoints.vision import MODELS, build
from tests.cuda.emulated import EmulatedDevice
from tests.runtime.policy import cases, policy_checkpoint
from tests.runtime.policy.test_requantized_expert import SETTINGS
from tests.runtime.session.test_whole_prompts import ANSWER, WRONG, Case, logits_of

pytestmark = [pytest.mark.cuda, pytest.mark.exhaustive, pytest.mark.usefixtures("needs_emulator", "needs_generator")]

MAX_ERROR = 1e-2
"""As a share of the largest logit of the reference, in a16; the towers keep their own mode."""
RANGED = "averaged"
"""Rows of its pictures see both ways, those of an answer do not."""
QUESTION = [{"role": "user", "content": "What is it?"}]


def asked(model: Model) -> Prompt:
    picture = Image.linear_gradient("L").resize((70, 50)).convert("RGB")
    return model.chat_prompt(QUESTION, images=[picture])


def answers(path: Path, monkeypatch: pytest.MonkeyPatch, seen: Callable[[Model], None], **options: Any) -> EmulatedDevice:
    """`seen` of the reference and of the emulated device, which is returned."""
    device = EmulatedDevice()
    for target in (load("reference"), CudaTarget(device)):
        monkeypatch.setattr("edgeq.runtime.model.pick", lambda *_: TargetChoice(target, []))  # noqa: B023
        with Model.load(path, context=256, mode="a16", **options) as model:
            seen(model)
    return device


def is_near(name: str, wanted: NDArray[np.float32], found: NDArray[np.float32]) -> bool:
    error = np.abs(found - wanted).max() / np.abs(wanted).max()
    print(f"{name}: largest error {error:.1e} of the largest logit")
    return bool(error <= MAX_ERROR)


@pytest.mark.parametrize("name", [*(name for name in MODELS if not name.startswith("states")), "gemma4", "gemma4_whole"])
def test_a_prompt_with_a_picture(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, path = build(tmp_path / name, name), tmp_path / "m.edgeq"
    convert(str(source), path, ConvertOptions(method="rtn", bits=8, group_size=32), lambda *_: None)
    results, answered, blind = list[NDArray[np.float32]](), list[NDArray[np.float32]](), list[NDArray[np.float32]]()

    def seen(model: Model) -> None:
        session = model.session()
        results.append(session.prefill(asked(model)).copy())
        if name == RANGED:
            answered.append(session.decode(7).copy())
        blind.append(model.session().prefill(model.chat_prompt(QUESTION)).copy())

    device = answers(path, monkeypatch, seen)
    assert is_near(name, *results)
    if answered:
        assert is_near(f"{name}, an answer", *answered) and device.replays == 1
    assert not np.allclose(blind[1], results[1])


def test_a_prompt_whose_tokens_see_each_other_both_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than the window, which an answer keeps to; of a decoder whose scores have a cap."""
    source, path = build(tmp_path / "paligemma2", "paligemma2"), tmp_path / "m.edgeq"
    convert(str(source), path, ConvertOptions(method="rtn", bits=8, group_size=32), lambda *_: None)
    prompt, results, texts = Case(source, path).prompt(1), list[NDArray[np.float32]](), list[list[int]]()

    def seen(model: Model) -> None:
        results.append(logits_of(model, prompt, ANSWER, (5, 1)))
        generation = model.generate(prompt, max_tokens=12, ignore_eos=True)
        assert generation.text()
        texts.append(generation.tokens)

    device = answers(path, monkeypatch, seen)
    assert is_near("paligemma2", *results) and texts[0] == texts[1]
    # Every row of an answer but the last text's first token, which its prompt gives; the prompts are started launch by launch.
    assert device.replays == 1 + len(ANSWER) - 5 + 11
    opened = ModelFile.open

    def other(path: Path) -> ModelFile:
        file = opened(path)
        file.metadata = replace(file.metadata, config=WRONG["a prompt that sees what is before"][1](file.metadata.config))
        return file

    monkeypatch.setattr(ModelFile, "open", other)
    monkeypatch.setattr("edgeq.runtime.model.pick", lambda *_: TargetChoice(load("reference"), []))
    with Model.load(path, context=256, mode="a16") as model:
        assert not is_near("what is before alone", results[0], logits_of(model, prompt, ANSWER, (5, 1)))


def test_actions_of_a_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its expert runs over the cache of what has read the prompt, and is on the device once."""
    path = tmp_path / "m.edgeq"
    policy_checkpoint.build(tmp_path / "checkpoint")
    convert(str(tmp_path / "checkpoint"), path, ConvertOptions(method="rtn", bits=8, group_size=32), lambda *_: None)
    case, results = cases.Case(tmp_path / "checkpoint", path), list[NDArray[np.float32]]()

    def seen(model: Model) -> None:
        results.append(model.act(case.pictures, "pick up", cases.STATE, noise=case.noise))
        assert model.policy is not None
        of_state, of_actions = model.policy._state, model.policy._actions
        if isinstance(of_state, CudaProgram) and isinstance(of_actions, CudaProgram):
            held, more = of_state._storage._uploaded, of_actions._storage._uploaded
            assert held and more and not held.keys() & more.keys()
            packed, _ = needed(workloads(model.file, ("a16",), ("f16",)))
            assert {*of_state._kernels.loaded, *of_actions._kernels.loaded} <= set(packed)

    answers(path, monkeypatch, seen)
    wanted, found = results
    assert np.abs(found - wanted).max() < MAX_ERROR * wanted.std()


def test_an_expert_is_requantized_for_its_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Again for every call: nothing of another one is left."""
    path, results = tmp_path / "m.edgeq", list[NDArray[np.float32]]()
    policy_checkpoint.build(tmp_path / "checkpoint")
    few = ConvertOptions(method="ttq", bits=4, group_size=32, rank=4)
    convert(str(tmp_path / "checkpoint"), path, few, lambda *_: None)
    case = cases.Case(tmp_path / "checkpoint", path)

    def seen(model: Model) -> None:
        made = [
            model.act(case.pictures, "pick up", cases.STATE, noise=noise) for noise in (case.noise, -case.noise, case.noise)
        ]
        assert np.array_equal(made[0], made[2]) and not np.allclose(made[0], made[1])
        results.append(made[0])

    answers(path, monkeypatch, seen, requantization=SETTINGS)
    wanted, found = results
    assert np.abs(found - wanted).max() < MAX_ERROR * wanted.std()
