"""Batches: text or tokens, sampling for each prompt, several texts of one prompt."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeq.errors import InputError
from edgeq.runtime import Answer, Batch, Model, Sampling

PROMPTS = ("def read_file(path):", "class Point:", "import ")
WARM = Sampling(temperature=1.0, top_p=0.95, seed=3)


@pytest.fixture(scope="module")
def model(model_path: Callable[..., Path]) -> Model:
    return Model.load(model_path("tiny-llama", bits=4, group_size=32), mode="a16", threads=1, context=256)


def ordered(answers: Any) -> list[Answer]:
    return sorted(answers, key=lambda answer: (answer.index, answer.sample))


def test_sixteen_texts_need_no_setting_of_the_model(model: Model) -> None:
    answers = ordered(Batch(model, 16, max_tokens=4).run([PROMPTS[i % 3] for i in range(16)]))
    assert [a.text for a in answers] == [model.generate(PROMPTS[i % 3], max_tokens=4).text() for i in range(16)]


def test_text_and_tokens_are_the_same_prompt(model: Model) -> None:
    mixed = [PROMPTS[0], model.text.encode(PROMPTS[0]), np.array(model.text.encode(PROMPTS[0]))]
    assert len({answer.text for answer in Batch(model, 3, max_tokens=8).run(mixed)}) == 1  # type: ignore[arg-type]


def test_every_prompt_has_its_sampling_and_the_text_that_it_has_alone(model: Model) -> None:
    sampling = [WARM, Sampling(), Sampling(temperature=0.7, seed=8, logit_bias={5: 3.0}, presence_penalty=0.5)]
    answers = ordered(Batch(model, 2, max_tokens=16).run(PROMPTS, sampling=sampling))
    alone = [model.generate(p, max_tokens=16, sampling=s).text() for p, s in zip(PROMPTS, sampling, strict=True)]
    assert [answer.text for answer in answers] == alone


@pytest.mark.parametrize("draft", ["off", "lookup"])
@pytest.mark.parametrize("size", [1, 3, 8])
def test_texts_of_one_prompt_differ_and_do_not_depend_on_what_runs_beside_them(model: Model, size: int, draft: Any) -> None:
    gamma = 3 if draft == "lookup" else None
    batch = Batch(model, size, max_tokens=12, sampling=WARM, draft=draft, gamma=gamma)
    answers = ordered(batch.run(PROMPTS[:2], n=4))
    assert [(a.index, a.sample) for a in answers] == [(i, j) for i in (0, 1) for j in range(4)]
    assert len({a.text for a in answers}) == 8
    # The prompt is run once.
    assert batch.measurement.prompt_tokens == sum(len(model.text.encode(p)) for p in PROMPTS[:2])
    assert answers[0].text == model.generate(PROMPTS[0], max_tokens=12, sampling=WARM).text()
    again = ordered(Batch(model, 5, max_tokens=12, sampling=WARM).run(PROMPTS[:2], n=4))
    assert [a.text for a in again] == [a.text for a in answers]


def test_answers_are_held_to_a_schema_with_drafts_of_its_words_and_without(model: Model) -> None:
    pytest.importorskip("llguidance")
    properties = {"name": {"enum": ["Ada", "Bob"]}, "grown_up": {"type": "boolean"}}
    schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    asked: Any = {"type": "json_schema", "json_schema": {"schema": schema}}
    texts = list[list[str]]()
    for draft in ("off", "lookup"):
        batch = Batch(model, 2, max_tokens=200, sampling=WARM, response_format=asked, draft=draft)  # type: ignore[arg-type]
        texts.append([answer.text for answer in ordered(batch.run(PROMPTS))])
        assert all(set(json.loads(text)) == set(properties) for text in texts[-1])
        assert sum(batch.measurement.speculation.accepted) > 10 or draft == "off"
    assert texts[0] == texts[1]
    with pytest.raises(InputError, match="schema"):
        Batch(model, 2, response_format={"type": "json_schema"})


def test_greedy_texts_of_one_prompt_are_equal(model: Model) -> None:
    assert len({a.text for a in Batch(model, 4, max_tokens=70).run(PROMPTS[:1], n=3)}) == 1


def test_a_long_text_of_many_pages_is_that_of_a_session_alone(model: Model) -> None:
    """Forks write into pages that they shared: 80 tokens are two pages, the second half full."""
    prompt = (model.text.encode(PROMPTS[0]) * 20)[:80]
    answers = ordered(Batch(model, 4, max_tokens=60, sampling=WARM).run([prompt], n=4))
    assert answers[0].text == model.generate(prompt, max_tokens=60, sampling=WARM).text()
    assert len({a.text for a in answers}) == 4


def test_other_arguments_are_those_of_a_single_text(model: Model) -> None:
    settings: dict[str, Any] = {"max_tokens": 12, "sampling": WARM, "logprobs": 2, "min_tokens": 3, "stop": ["\n"]}
    answers = ordered(Batch(model, 3, **settings).run(PROMPTS))
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        alone = model.generate(prompt, **settings)
        assert answer.text == alone.text() and answer.logprobs == alone.logprobs and len(answer.tokens) == len(answer.logprobs)
        assert answer.finish_reason == alone.finish_reason


def test_requantized_weights_of_a_prompt_serve_all_its_texts(model_path: Callable[..., Path]) -> None:
    path = model_path("tiny-llama", method="ttq", bits=4, rank=0, group_size=32)
    model = Model.load(path, threads=1, context=128)
    answers = ordered(Batch(model, 3, max_tokens=12, sampling=WARM).run([PROMPTS[0] * 4], n=3))
    assert answers[0].text == model.generate(PROMPTS[0] * 4, max_tokens=12, sampling=WARM).text()
    session = model.session()
    session.prefill(model.text.encode(PROMPTS[0] * 4))
    session.requantize()
    forked = session.fork()
    assert forked.weights is session.weights and forked.requantized_tokens == session.requantized_tokens
    forked.prefill(model.text.encode(PROMPTS[1]))
    assert forked.requantize() > 0 and forked.weights is not session.weights
