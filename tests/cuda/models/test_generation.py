"""Texts on the emulated device, from the Python API: drafts, batches, sessions side by side, requantized weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from edgeq.runtime import Batch, Model, Sampling
from edgeq.targets import TargetChoice
from edgeq.targets.cuda import CudaTarget
from edgeq.targets.cuda.run.requantized import CudaWeights
from tests.cuda.emulated import EmulatedDevice

pytestmark = [pytest.mark.cuda, pytest.mark.exhaustive, pytest.mark.usefixtures("needs_emulator", "needs_generator")]

PROMPTS = ("def read_file(path):", "class Point:", "import ", "The return value")
GREEDY = Sampling(temperature=0)
TOKENS = 12
TIE = 1e-2

Loaded = Callable[..., Model]


@pytest.fixture
def loaded(model_path: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[Loaded]:
    """`loaded(mode, **ConvertOptions)` -> the tiny Llama on an emulated device."""
    models: list[Model] = []

    def get(mode: Any, **options: Any) -> Model:
        path = model_path("tiny-llama", **{"bits": 4, "group_size": 32, **options})
        monkeypatch.setattr("edgeq.runtime.model.pick", lambda name, file: TargetChoice(CudaTarget(EmulatedDevice()), []))
        models.append(Model.load(path, target="cuda", mode=mode, context=192, max_rows=64, max_logits=8))
        return models[-1]

    yield get
    for model in models:
        model.close()


def tokens_of(model: Model, prompt: str, **options: Any) -> list[int]:
    generation = model.generate(prompt, max_tokens=TOKENS, sampling=GREEDY, ignore_eos=True, **options)
    assert generation.text()
    return generation.tokens


def test_text_by_drafts_of_a_cheaper_mode_is_the_one_without(loaded: Loaded) -> None:
    model = loaded("a16")
    for prompt in PROMPTS[:2]:
        assert tokens_of(model, prompt, draft="qspec", gamma=3) == tokens_of(model, prompt)


def test_texts_of_a_batch_are_those_that_prompts_have_alone(loaded: Loaded) -> None:
    model = loaded("a8")
    answers = sorted(Batch(model, 4, max_tokens=TOKENS, sampling=GREEDY).run(PROMPTS), key=lambda answer: answer.index)
    alone = [model.generate(prompt, max_tokens=TOKENS, sampling=GREEDY).text() for prompt in PROMPTS]
    assert [answer.text for answer in answers] == alone


def test_sessions_of_several_threads(loaded: Loaded) -> None:
    model = loaded("a8")
    found: dict[int, list[int]] = {}
    threads = [Thread(target=lambda i=i: found.update({i: tokens_of(model, PROMPTS[i])})) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[i] for i in range(3)] == [tokens_of(model, PROMPTS[i]) for i in range(3)]


@pytest.mark.parametrize("draft", ["off", "qspec"])
def test_a_prompt_requantizes_its_weights(
    loaded: Loaded, model_path: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, draft: Any
) -> None:
    prompt = PROMPTS[0] * 4
    options = {"method": "ttq", "bits": 4, "rank": 0, "group_size": 32}
    model = loaded("a16", **options)
    session = model.session()
    session.prefill(model.text.encode(prompt))
    session.requantize()
    assert isinstance(session.weights, CudaWeights)
    found = tokens_of(model, prompt, draft=draft, **({"gamma": 3} if draft == "qspec" else {}))
    if draft == "qspec":
        assert found == tokens_of(model, prompt)
        return
    monkeypatch.undo()
    with Model.load(model_path("tiny-llama", **options), target="reference", mode="a16", context=192) as reference:
        wanted = tokens_of(reference, prompt)
        differs = next((i for i, (a, b) in enumerate(zip(found, wanted, strict=True)) if a != b), None)
        if differs is not None:
            held = reference.session()
            logits = held.prefill(reference.text.encode(prompt))
            held.requantize()
            logits = held.prefill(wanted[:differs]) if differs else logits
            assert abs(logits[found[differs]] - logits[wanted[differs]]) < TIE
