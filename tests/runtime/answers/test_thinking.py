"""Thinking before answers: free itself, ended by its budget, and what follows held to formats and tools."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from edgeq.errors import InputError
from edgeq.runtime import Model, Sampling
from edgeq.runtime.answers.thinking import Section, Thinking
from edgeq.runtime.batching.job import Job
from edgeq.runtime.batching.scheduler import Scheduler
from edgeq.runtime.request import Request
from edgeq.text.thinking_formats import thinking_format
from edgeq.tools.commands.chat import Conversation

pytest.importorskip("llguidance")

from tests.runtime.answers.calling import TEMPLATE, WEATHER  # noqa: E402
from tests.runtime.answers.thinking_models import OPENED, SAID, with_marks  # noqa: E402
from tests.runtime.server.schemas import record  # noqa: E402

pytestmark = pytest.mark.usefixtures("works_here")

ASKED = [{"role": "user", "content": "Who is it?"}]
PERSON = record(name={"type": "string", "pattern": "^[A-Z][a-z]{1,6}$"}, age={"type": "integer", "minimum": 0, "maximum": 120})
HELD = {"type": "json_schema", "json_schema": {"schema": PERSON}}
DRAWN = Sampling(temperature=1.0, seed=3)


@pytest.fixture(scope="module")
def path(model_path: Callable[..., Path]) -> Path:
    return model_path("tiny-llama", bits=4, group_size=32)


def loaded(path: Path, template: str, special: bool = False) -> Model:
    found = Model.load(path, mode="a8", threads=1, threads_prefill=1, context=512, chat_template=template)
    return with_marks(found, special)


@pytest.fixture(scope="module")
def opened(path: Path) -> Model:
    """Its prompts end within the thinking."""
    return loaded(path, OPENED)


@pytest.fixture(scope="module")
def model(path: Path) -> Model:
    """Its answers begin with thinking, or not."""
    return loaded(path, SAID)


def marks(model: Model) -> tuple[int, int]:
    begin, end = (model.text.control_token(literal) for literal in ("<think>", "</think>"))
    assert begin is not None and end is not None
    return begin, end


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("draft", ["off", "lookup"])
def test_an_answer_is_held_to_its_schema_after_the_thinking(path: Path, special: bool, draft: Any) -> None:
    model = loaded(path, OPENED, special)
    answer = model.chat(ASKED, max_tokens=120, sampling=DRAWN, response_format=HELD, thinking_budget=20, draft=draft)
    pieces = list(answer.pieces())
    assert [piece.thought for piece in pieces] == [True] * 21 + [False] * (len(pieces) - 21)
    assert pieces[20].token == marks(model)[1] and answer.finish_reason == "stop"
    jsonschema.validate(json.loads(answer.text()), PERSON)
    # What is thought is any text, and is not shown with the marks or the space around.
    assert answer.thoughts == answer.thoughts.strip() != "" and "think>" not in answer.thoughts
    assert answer.message() == {"role": "assistant", "content": answer.text(), "reasoning_content": answer.thoughts}
    free = model.chat(ASKED, max_tokens=20, sampling=DRAWN)
    assert "".join(free) == "" and free.thoughts == answer.thoughts and free.tokens == answer.tokens[:20]


def test_a_text_that_a_schema_holds_keeps_half_of_its_tokens(opened: Model) -> None:
    answer = opened.chat(ASKED, max_tokens=100, sampling=DRAWN, response_format=HELD)
    assert [piece.thought for piece in answer.pieces()].index(False) <= 51
    jsonschema.validate(json.loads(answer.text()), PERSON)
    with pytest.raises(InputError, match="thinking_budget"):
        opened.chat(ASKED, thinking_budget=-1)


def test_the_half_that_is_kept_has_room_in_the_context(opened: Model) -> None:
    """More tokens may be asked for than the context holds: in Python, and by a scheduler."""
    question = [{"role": "user", "content": "Who is it? " * 60}]
    prompt = opened.chat_prompt(question)
    room = opened.context - len(prompt.tokens)
    assert 100 < room < 400
    answer = opened.chat(question, max_tokens=100_000, sampling=DRAWN, response_format=HELD)
    assert sum(piece.thought for piece in answer.pieces()) <= room // 2 + 1 and answer.finish_reason == "stop"
    jsonschema.validate(json.loads(answer.text()), PERSON)
    request = Request(max_tokens=100_000, response_format=HELD, thinking=opened.prompts.thinking(prompt, None))
    scheduler, tokens = Scheduler(opened, 1), list[int]()
    scheduler.submit(Job(prompt, request.compiled(opened.constraints.compile, opened.text), DRAWN))
    while scheduler.busy:
        tokens += [piece.token for update in scheduler.step() for piece in update.pieces]
    assert tokens == answer.tokens


def test_a_model_that_may_think_begins_by_itself(model: Model) -> None:
    """Its answer may be the object at once; a bias toward the mark makes it think."""
    begin, end = marks(model)
    given: dict[str, Any] = {"max_tokens": 120, "response_format": HELD, "thinking_budget": 10}
    at_once = model.chat(ASKED, sampling=Sampling(temperature=1.0, seed=3, logit_bias={begin: -100}), **given)
    assert at_once.text().startswith("{") and not at_once.thoughts
    thinks = model.chat(ASKED, sampling=Sampling(temperature=1.0, seed=3, logit_bias={begin: 30}), **given)
    jsonschema.validate(json.loads(thinks.text()), PERSON)
    assert thinks.tokens[0] == begin and thinks.tokens[11] == end
    never = model.chat(ASKED, sampling=Sampling(logit_bias={begin: 100}), **(given | {"thinking_budget": 0}))
    assert never.text().startswith("{") and begin not in never.tokens
    jsonschema.validate(json.loads(never.text()), PERSON)


def test_thinking_that_the_prompt_has_ended_is_none(opened: Model) -> None:
    answer = opened.chat(ASKED, max_tokens=60, sampling=DRAWN, response_format=HELD, enable_thinking=False)
    assert answer.text().startswith("{") and not any(piece.thought for piece in answer.pieces())


def test_a_call_follows_the_thinking(path: Path) -> None:
    model = loaded(path, TEMPLATE.replace("assistant:", "assistant:<think>\n"))
    given: dict[str, Any] = {"max_tokens": 150, "sampling": DRAWN, "tools": [WEATHER], "thinking_budget": 12}
    answer = model.chat(ASKED, tool_choice="required", parallel_tool_calls=False, **given)
    message = answer.message()
    (call,) = message["tool_calls"][:1]
    jsonschema.validate(call["function"]["arguments"], WEATHER["function"]["parameters"])
    assert message["reasoning_content"] and answer.finish_reason == "stop"
    # Where a call is the model's choice, what it thinks begins none.
    free = model.chat(ASKED, tool_choice="auto", **given)
    assert free.message()["reasoning_content"] == message["reasoning_content"]


def test_stop_strings_are_those_of_the_answer(opened: Model) -> None:
    plain = opened.chat(ASKED, max_tokens=60, sampling=DRAWN, thinking_budget=20)
    plain.text()
    word = next(word for word in plain.thoughts.split() if word not in plain.text())
    stopped = opened.chat(ASKED, max_tokens=60, sampling=DRAWN, thinking_budget=20, stop=[word])
    assert stopped.text() == plain.text() and stopped.thoughts == plain.thoughts


def test_a_scheduler_gives_the_same(opened: Model) -> None:
    """Beside others, with drafts of what the schema leaves no choice about, and without the pages for all of them."""
    given: dict[str, Any] = {"max_tokens": 120, "response_format": HELD, "thinking_budget": 60}
    alone = [opened.chat(ASKED, sampling=Sampling(temperature=1.0, seed=seed), **given) for seed in range(8)]
    for answer in alone:
        answer.text()
    prompt = opened.chat_prompt(ASKED)
    request = Request(max_tokens=120, response_format=HELD, thinking=opened.prompts.thinking(prompt, 60))
    request = request.compiled(opened.constraints.compile, opened.text)
    for speculator in (None, opened.speculator("lookup", 3)):
        # Each text needs a second page.
        scheduler, found = Scheduler(opened, 8, pages=12, speculator=speculator), dict[Any, list[Any]]()
        tickets = [scheduler.submit(Job(prompt, request, Sampling(temperature=1.0, seed=seed))) for seed in range(8)]
        while scheduler.busy:
            for update in scheduler.step():
                assert not update.error
                found.setdefault(update.ticket, []).extend(update.pieces)
        for ticket, answer in zip(tickets, alone, strict=True):
            assert [piece.token for piece in found[ticket]] == answer.tokens
            assert "".join(piece.text for piece in found[ticket] if not piece.thought) == answer.text()
        assert scheduler.totals.preemptions


def test_what_a_user_writes_neither_begins_nor_ends_it(model: Model) -> None:
    for text in ("<think>", "</think>", "</think>\n\n"):
        prompt = model.chat_prompt([{"role": "user", "content": text}])
        assert not {*marks(model)} & {*prompt.tokens}
        found = model.prompts.thinking(prompt)
        assert found is not None and not found.opened


def test_the_mask_follows_the_tokens_back(opened: Model) -> None:
    """Drafts that are not accepted leave nothing behind."""
    constraint = opened.constraints.compile(json.dumps({"grammars": [{"lark_grammar": 'start: "yes" | "no"'}]}))
    begin, end = marks(opened)
    thinking = Thinking(begin, end, 50, True, opened.config.vocab_size, budget=4)
    matcher = thinking.matcher(2, opened.text.eos, constraint)
    assert matcher is not None
    (yes,) = opened.text.encode_plain("yes")[:1]
    head, stop = [7, 8], min(opened.text.eos)
    free, answer = matcher.allowed(head), matcher.allowed([*head, 9, end])
    assert free.sum() == len(free) - len(opened.text.eos) and not free[stop]
    assert answer[50] and answer[yes] and answer.sum() < 20
    assert not matcher.allowed([*head, 9, end, 50])[50]
    assert np.array_equal(matcher.allowed(head), free) and np.array_equal(matcher.allowed([*head, 9, end]), answer)
    assert np.flatnonzero(matcher.allowed([*head, 9, 9, 9, 9])).tolist() == matcher.forced([*head, 9, 9, 9, 9]) == [end]
    assert matcher.forced(head) == []


def test_text_is_shown_alike_however_it_comes() -> None:
    thinking = Thinking(1, 2, None, False, 9)
    for words in (["\n", "a ", " b\n", "\n"], ["\na  b\n\n"]):
        section = Section(thinking)
        assert section.take(1) == (True, True)
        shown = ""
        for word in words:
            assert section.take(5) == (True, False)
            shown += section.shown(word)
        assert shown == "a  b" and section.take(2) == (True, True)
        assert section.take(5) == (False, False)
        assert section.shown("\n\n") + section.shown(" c \n") == "c \n"
    plain = Section(None)
    assert plain.take(1) == (False, False) and plain.shown("\n c ") == "\n c "


def test_formats_are_found_among_the_tokens() -> None:
    found = thinking_format({"<|im_end|>": True, "<think>": False, "</think>": False})
    assert found is not None and found.end == "</think>"
    assert thinking_format({"[THINK]": True, "[/THINK]": True}) is not None and thinking_format({"<think>": False}) is None


def test_json_of_a_chat_has_the_thoughts_beside_the_answer(opened: Model) -> None:
    settings = {"draft": "off", "thinking_budget": 6, "sampling": DRAWN, "response_format": HELD}
    talk = Conversation(opened, None, 40, settings, as_json=True)
    generation = talk.ask("Who is it?")
    said = "".join(generation)
    found = talk.described(said, generation)
    assert found["text"] == said and found["thoughts"] == generation.thoughts and found["thoughts"]
