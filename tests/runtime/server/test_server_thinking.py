"""Thinking over HTTP, with openai's and anthropic's clients as they are installed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from edgeq.pictures.prompt import Prompt
from edgeq.runtime import Model, Piece, Sampling
from edgeq.runtime.answers.thinking import Thinking
from edgeq.runtime.batching.job import Job, Ticket, Update
from edgeq.runtime.request import Request
from edgeq.runtime.sampling import Logprobs
from edgeq.runtime.server.errors import ApiError
from edgeq.runtime.server.interfaces.answers import RequestAnswer
from edgeq.runtime.server.interfaces.messages_answer import MessagesAnswer
from edgeq.runtime.server.interfaces.responses import Responses
from edgeq.runtime.server.interfaces.responses_answer import ResponsesAnswer

pytest.importorskip("prometheus_client")
pytest.importorskip("llguidance")

from tests.runtime.answers.calling import TEMPLATE, WEATHER  # noqa: E402
from tests.runtime.answers.thinking_models import OPENED, SAID, with_marks  # noqa: E402
from tests.runtime.server.schemas import record  # noqa: E402
from tests.runtime.server.serving import Served, serving  # noqa: E402

pytestmark = pytest.mark.usefixtures("works_here")

CHAT = "/v1/chat/completions"
ASKED: list[Any] = [{"role": "user", "content": "Who is it?"}]
PERSON = record(name={"type": "string", "pattern": "^[A-Z][a-z]{1,6}$"}, age={"type": "integer", "minimum": 0, "maximum": 120})
HELD: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": PERSON}}
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 5, "max_tokens": 120}
BUDGET: dict[str, Any] = {"extra_body": {"thinking_token_budget": 15}}
TEMPLATES = OPENED.replace(SAID, TEMPLATE)


@pytest.fixture(scope="module")
def served(model_path: Callable[..., Path]) -> Iterator[Served]:
    path = model_path("tiny-llama", bits=4, group_size=32)
    model = Model.load(path, mode="a16", threads=1, threads_prefill=1, context=1024, chat_template=TEMPLATES)
    with serving(with_marks(model), names=("tiny",)) as found:
        yield found


@pytest.fixture(scope="module")
def client(served: Served) -> Any:
    openai = pytest.importorskip("openai")
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def claude(served: Served) -> Any:
    anthropic = pytest.importorskip("anthropic")
    return anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0)


def test_what_follows_the_thinking_fits_the_schema(client: Any) -> None:
    given = {"model": "tiny", "messages": ASKED, "response_format": HELD, **SAMPLED, **BUDGET}
    answer = client.chat.completions.create(logprobs=True, n=2, **given)
    for choice in answer.choices:
        jsonschema.validate(json.loads(choice.message.content), PERSON)
        assert choice.message.reasoning_content and choice.finish_reason == "stop"
        # Those of the answer, and of the empty line that may come before it.
        assert "".join(entry.token for entry in choice.logprobs.content).strip() == choice.message.content
    assert answer.usage.completion_tokens_details.reasoning_tokens == 2 * 16
    chunks = list(client.chat.completions.create(stream=True, **given))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    thoughts = [getattr(delta, "reasoning_content", None) or "" for delta in deltas]
    assert "".join(thoughts) == answer.choices[0].message.reasoning_content
    assert "".join(delta.content or "" for delta in deltas) == answer.choices[0].message.content
    # One after the other.
    assert max(i for i, text in enumerate(thoughts) if text) < min(i for i, delta in enumerate(deltas) if delta.content)


def test_a_call_follows_the_thinking(client: Any) -> None:
    given: dict[str, Any] = {"model": "tiny", "messages": ASKED, "tools": [WEATHER], "tool_choice": "required"}
    given |= SAMPLED | {"extra_body": {"thinking_budget_tokens": 15}}
    message = client.chat.completions.create(**given).choices[0].message
    arguments = message.tool_calls[0].function.arguments
    jsonschema.validate(json.loads(arguments), WEATHER["function"]["parameters"])
    assert message.reasoning_content and message.content is None
    deltas = [chunk.choices[0].delta for chunk in client.chat.completions.create(stream=True, **given)]
    calls = [call.function for delta in deltas for call in delta.tool_calls or [] if call.index == 0]
    assert "".join(call.arguments for call in calls) == arguments
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == message.reasoning_content
    # The turn goes back as clients send it.
    told = [*ASKED, message.model_dump(exclude_none=True)]
    told.append({"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "21 degrees"})
    assert client.chat.completions.create(**(given | {"messages": told, "tool_choice": "none"})).choices[0].message.content


@pytest.mark.parametrize("given", [{"reasoning_effort": "none"}, {"chat_template_kwargs": {"enable_thinking": False}}])
def test_thinking_can_be_left_out(served: Served, given: dict[str, Any]) -> None:
    status, _, body = served.ask(CHAT, {"messages": ASKED, "response_format": HELD, **SAMPLED, **given})
    assert status == 200 and "reasoning_content" not in body["choices"][0]["message"]
    jsonschema.validate(json.loads(body["choices"][0]["message"]["content"]), PERSON)


def test_budgets_are_checked(served: Served) -> None:
    for name, value in (("thinking_token_budget", -2), ("thinking_budget_tokens", True), ("thinking_token_budget", "many")):
        status, _, body = served.ask(CHAT, {"messages": ASKED, name: value})
        assert status == 400 and body["error"]["param"] == name
    both = {"thinking_token_budget": 5, "thinking_budget_tokens": 6}
    assert served.ask(CHAT, {"messages": ASKED, **both})[2]["error"]["param"] == "thinking_budget_tokens"
    free = served.ask(CHAT, {"messages": ASKED, "max_tokens": 30, "temperature": 0, "thinking_token_budget": -1})[2]
    assert free["choices"][0]["message"]["content"] == ""
    assert free["usage"]["completion_tokens_details"]["reasoning_tokens"] == 30


def test_responses_have_items_of_reasoning(client: Any) -> None:
    form = {"format": {"type": "json_schema", "name": "person", "schema": PERSON}}
    # This interface takes no seed: a text of random blanks has to end within these tokens.
    given: dict[str, Any] = {"model": "tiny", "input": "Who is it?", "text": form, "temperature": 1.0, "max_output_tokens": 400}
    answer = client.responses.create(**given)
    assert [item.type for item in answer.output] == ["reasoning", "message"]
    jsonschema.validate(json.loads(answer.output_text), PERSON)
    assert answer.output[0].content[0].text and answer.usage.output_tokens_details.reasoning_tokens > 10
    with client.responses.stream(**{**given, "text": form}) as stream:
        events = list(stream)
    kinds = [event.type for event in events]
    assert [kind for kind in kinds if kind == "response.output_item.done"] == ["response.output_item.done"] * 2
    final = events[-1].response
    thoughts = "".join(event.delta for event in events if event.type == "response.reasoning_text.delta")
    assert thoughts == final.output[0].content[0].text
    assert kinds.index("response.reasoning_text.done") < kinds.index("response.output_text.delta")
    jsonschema.validate(json.loads(final.output_text), PERSON)
    # Clients send back what came before.
    told = [{"role": "user", "content": "Who is it?"}, *(item.model_dump(exclude_none=True) for item in answer.output)]
    assert client.responses.create(**(given | {"input": [*told, {"role": "user", "content": "Sure?"}]})).output_text


def test_messages_have_blocks_of_thinking(claude: Any) -> None:
    thinking = {"type": "enabled", "budget_tokens": 15}
    extra = {"output_config": {"format": {"type": "json_schema", "schema": PERSON}}}
    given: dict[str, Any] = {"model": "tiny", "messages": ASKED, "max_tokens": 400, "thinking": thinking, "extra_body": extra}
    answer = claude.messages.create(**given)
    assert [block.type for block in answer.content] == ["thinking", "text"]
    jsonschema.validate(json.loads(answer.content[1].text), PERSON)
    with claude.messages.stream(**given) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert [block.type for block in final.content] == ["thinking", "text"] and kinds.count("content_block_stop") == 2
    jsonschema.validate(json.loads(final.content[1].text), PERSON)
    told = [*ASKED, {"role": "assistant", "content": [block.model_dump() for block in answer.content]}, *ASKED]
    assert claude.messages.create(**(given | {"messages": told})).content[1].text
    none = claude.messages.create(**(given | {"thinking": {"type": "disabled"}}))
    assert [block.type for block in none.content] == ["text"]


def test_a_stop_string_of_the_thinking_did_not_end_the_answer(model_path: Callable[..., Path]) -> None:
    text = Model.load(model_path("tiny-llama", bits=4, group_size=32), mode="a16", threads=1).text
    job = Job(Prompt([5]), Request(stop=["path", "return"]), Sampling())
    reply = MessagesAnswer("tiny", Ticket(job), text)
    pieces = [Piece("", token, said == "path") for said in ("path", "return") for token in text.encode_plain(said)]
    reply.take(0, Update(Ticket(job), 0, pieces, reason="stop"))
    ended = reply.whole()
    assert (ended["stop_reason"], ended["stop_sequence"]) == ("stop_sequence", "return")
    assert ended["usage"]["output_tokens"] == len(pieces)


BEGIN, END, GAP, WORD, STOP = 5, 6, 7, 8, 1
THINKS = Thinking(BEGIN, END, GAP, opened=False, vocab_size=2048)


def told(error: Exception) -> ApiError:
    raise error


def streamed(events: Callable[[AsyncIterator[tuple[int, Update]]], AsyncIterator[bytes]], updates: list[Update]) -> list[Any]:
    """The data of the events of a stream."""

    async def come() -> AsyncIterator[tuple[int, Update]]:
        for update in updates:
            yield 0, update

    async def read() -> list[bytes]:
        return [event async for event in events(come())]

    lines = [line for event in asyncio.run(read()) for line in event.splitlines()]
    return [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]


def answered(served: Served, ticket: Ticket) -> RequestAnswer:
    return RequestAnswer("chat", "tiny", "x", served.server.model.text, [ticket], stops=frozenset({STOP}), keeps=True)


@pytest.mark.parametrize("together", [False, True])
def test_log_probabilities_of_the_empty_line_are_streamed(served: Served, together: bool) -> None:
    """It has no text, and comes with what is thought where steps are short."""
    ticket = Ticket(Job(Prompt([3]), Request(thinking=THINKS, logprobs=0), Sampling()))
    pieces = [Piece("", BEGIN, True), Piece("hm", 9, True), Piece("", END, True), Piece("", GAP), Piece("yes", WORD)]
    known = [Logprobs(piece.token, -1.0) for piece in pieces]
    cuts = [0, 4, 5] if together else [0, 1, 2, 3, 4, 5]
    spans = list(zip(cuts, cuts[1:], strict=False))

    def updates() -> list[Update]:
        return [Update(ticket, 0, pieces[a:b], known[a:b], "stop" if b == 5 else None) for a, b in spans]

    answer = answered(served, ticket)
    chunks = [each["choices"][0] for each in streamed(lambda come: answer.events(come, told), updates())]
    whole = [json.loads(bytes(each)) for each in answer.choices[0].logprobs]
    assert len(whole) == 2 and [each for chunk in chunks for each in (chunk["logprobs"] or {}).get("content", [])] == whole
    assert not any(chunk["logprobs"]["content"] for chunk in chunks if "reasoning_content" in chunk["delta"])
    shown = ResponsesAnswer(Responses(model="tiny", input="?"), answered(served, ticket))
    events = streamed(lambda come: shown.events(come, told), updates())
    assert [each for event in events if event["type"].endswith("text.delta") for each in event.get("logprobs", [])] == whole


@pytest.mark.parametrize("thoughts", ["", "hm"])
def test_an_empty_message_is_streamed_as_it_is_whole(served: Served, thoughts: str) -> None:
    job = Job(Prompt([3]), Request(thinking=THINKS, stop_tokens=[STOP]), Sampling())
    ticket = Ticket(job)
    pieces = [Piece("", BEGIN, True), Piece(thoughts, 9, True), Piece("", END, True)] if thoughts else []
    updates = [Update(ticket, 0, [*pieces, Piece("", STOP)], reason="stop")]
    reply = MessagesAnswer("tiny", ticket, served.server.model.text)
    events = streamed(lambda come: reply.events(come, told), updates)
    begun = [event["content_block"]["type"] for event in events if event["type"] == "content_block_start"]
    assert begun == [block["type"] for block in reply.whole()["content"]] == (["thinking"] if thoughts else ["text"])
    shown = ResponsesAnswer(Responses(model="tiny", input="?"), answered(served, ticket))
    events = streamed(lambda come: shown.events(come, told), updates)
    items = [event["item"]["type"] for event in events if event["type"] == "response.output_item.done"]
    assert items == [item["type"] for item in events[-1]["response"]["output"]] == (["reasoning"] if thoughts else ["message"])
