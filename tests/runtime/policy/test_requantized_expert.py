"""An expert with masters: its first step runs with them, and the others with the weights rounded for what that step read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgeq.converters.convert import ConvertOptions, convert
from edgeq.errors import InputError
from edgeq.format.container import ModelFile
from edgeq.runtime import Model, Requantization
from edgeq.runtime.network.policy import prompt_of, state_of
from edgeq.runtime.session.requantize import NEVER, scales
from edgeq.targets.reference.program import ReferenceProgram
from tests.runtime.policy.cases import STATE, Actions, Case
from tests.runtime.policy.test_policy import far

SETTINGS = Requantization(min_tokens=4)
OPTIONS = ConvertOptions(method="ttq", bits=3, group_size=16, rank=4, vision_bits=16)


@pytest.fixture(scope="module")
def few(case: Case, tmp_path_factory: pytest.TempPathFactory) -> Case:
    path = tmp_path_factory.mktemp("ttq") / "m.edgeq"
    convert(str(case.folder), path, OPTIONS, lambda *_: None)
    return Case(case.folder, path)


def test_layers_of_the_expert_have_masters_and_its_ends_none(few: Case) -> None:
    metadata = ModelFile.open(few.path).metadata
    of_expert = {name: layer for name, layer in metadata.linears.items() if name.startswith("expert.")}
    assert len(of_expert) == 3 * 4 + 6
    for name, layer in of_expert.items():
        inside = name.startswith("expert.layers.")
        assert bool(layer.master) == bool(layer.low_rank) == inside, name
    assert metadata.provenance["draft"]["method"] == "ttq"  # type: ignore[index]


def by_hand(model: Model, case: Case) -> Actions:
    """The actions of `Model.act`, step by step over the programs that it runs."""
    policy, text, pictures = model.policy, model.text, model.pictures
    assert policy is not None and pictures is not None
    of_state, of_actions = policy._state, policy._actions
    assert isinstance(of_state, ReferenceProgram) and isinstance(of_actions, ReferenceProgram)
    actions, steps = case.noise.copy(), policy.expert.steps
    with model.session() as session:
        prompt = prompt_of("pick up", case.pictures, pictures, text)
        session.prefill(prompt)
        length = len(prompt.tokens)
        session.reserve(1 + len(actions))
        of_state.run_summing(policy._rows(session, length, state_of(STATE, policy.expert)[None]), of_state.new_sums())
        sums, weights = of_actions.new_sums(), of_actions.new_weights()
        for step in range(steps):
            times = np.tile(policy.expert.angles(1 - step / steps), (len(actions), 1))
            rows = policy._rows(session, length + 1, np.concatenate([actions, times], axis=1))
            if step:
                moved = of_actions.run_requantized(rows, weights)
            else:
                moved = of_actions.run_summing(rows, sums)
                of_actions.requantize(weights, scales(sums, SETTINGS))
            actions -= moved / np.float32(steps)
        assert sums.tokens == len(actions)
    return actions


def test_the_first_step_is_what_weights_are_requantized_for(few: Case) -> None:
    with Model.load(few.path, target="reference", mode="a16", context=192, requantization=SETTINGS) as model:
        wanted = by_hand(model, few)
        found = model.act(few.pictures, "pick up", STATE, noise=few.noise)
        assert np.array_equal(found, wanted)
        # Nothing is left of what was seen in between.
        other = model.act(few.pictures[::-1], "put down", [2.0, 1.0], noise=-few.noise)
        assert not np.allclose(other, wanted)
        assert np.array_equal(model.act(few.pictures, "pick up", STATE, noise=few.noise), wanted)
    assert far(few.act("cpu", requantization=SETTINGS), wanted) < 1e-2
    assert far(few.act("reference", requantization=NEVER), wanted) > 0.1
    # A prompt that is long enough, and a first step of too few rows: the weights of the file.
    assert far(few.act("reference", requantization=replace(SETTINGS, min_tokens=8)), wanted) > 0.1


def test_more_of_a_decoder_than_of_an_expert_is_refused(case: Case, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--rank 64: this model's narrowest matrix has 48 channels"):
        convert(str(case.folder), tmp_path / "m.edgeq", replace(OPTIONS, rank=64), lambda *_: None)
