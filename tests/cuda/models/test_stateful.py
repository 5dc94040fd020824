"""Sessions, batches and runs ahead of a model with states, on the emulated device."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import pytest

from edgeq.runtime import Batch, Model, Sampling
from edgeq.targets import TargetChoice
from edgeq.targets.capabilities import HoldsStates
from edgeq.targets.cuda import CudaTarget
from edgeq.targets.rows import PAGE
from tests.cuda.emulated import EmulatedDevice
from tests.runtime.session.test_states import TOKENS, walk

pytestmark = [pytest.mark.cuda, pytest.mark.exhaustive, pytest.mark.usefixtures("needs_emulator", "needs_generator")]

FAMILIES = ("lfm2",)
GREEDY = Sampling(temperature=0)


@pytest.fixture(scope="module", params=FAMILIES)
def path(request: pytest.FixtureRequest, model_path: Callable[..., Path]) -> Path:
    return model_path(request.param, {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}, bits=4, group_size=32)


@pytest.fixture
def loaded(path: Path, device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Model]]:
    models: list[Model] = []

    def get(**options: object) -> Model:
        monkeypatch.setattr("edgeq.runtime.model.pick", lambda name, file: TargetChoice(CudaTarget(device), []))
        models.append(Model.load(path, target="cuda", mode="a16", context=448, max_rows=100, **options))  # type: ignore[arg-type]
        return models[-1]

    yield get
    for model in models:
        model.close()


def test_a_random_walk_gives_the_bits_of_a_plain_run(loaded: Callable[..., Model], tmp_path: Path) -> None:
    walk(loaded(), tmp_path, random.Random(7))


def test_runs_ahead_leave_the_states_and_snapshots_of_runs_one_after_another(
    loaded: Callable[..., Model], device: EmulatedDevice
) -> None:
    """A greedy text over the end of a page, after which it goes back, and its drafts are forgotten."""
    found = []
    for most in (64, 0):
        model = loaded()
        model.program.most_largest = most  # type: ignore[attr-defined]
        holds, session = cast(HoldsStates, model.program), model.session()
        before = device.replays
        generation = model.generate(TOKENS[:50], max_tokens=40, sampling=GREEDY, ignore_eos=True, session=session)
        text, replays = generation.text(), device.replays - before
        state, snapshot = session._cache.state, session.pages[0].snapshot
        assert state is not None and snapshot is not None and len(session.tokens) > PAGE
        saved = holds.save_snapshot(snapshot)
        assert session.rewind(80) == 80
        found.append((text, saved, session.decode(7).tobytes(), session.prefill(TOKENS[:20]).tobytes()))
        assert replays > 35
    assert found[0] == found[1]


def test_texts_of_a_batch_are_those_that_prompts_have_alone(loaded: Callable[..., Model]) -> None:
    model = loaded()
    prompts = [TOKENS[:70], TOKENS[:66] + TOKENS[200:203], TOKENS[300:305]]
    answers = sorted(Batch(model, 3, max_tokens=12, sampling=GREEDY, ignore_eos=True).run(prompts), key=lambda each: each.index)
    alone = []
    for prompt in prompts:
        generation = model.generate(prompt, max_tokens=12, sampling=GREEDY, ignore_eos=True)
        generation.text()
        alone.append(generation.tokens)
    assert [answer.tokens for answer in answers] == alone
