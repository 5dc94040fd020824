"""Answers in the shapes of OpenAI's responses: whole, and in the events of a stream."""

from __future__ import annotations

import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterator
from typing import Any

import msgspec

from edgeq.runtime.answers.call_reader import CallBegin, arguments_text, message_of
from edgeq.runtime.batching.job import Update
from edgeq.runtime.server.errors import ApiError
from edgeq.runtime.server.interfaces.answers import PING, RequestAnswer, identifier
from edgeq.runtime.server.interfaces.responses import Responses


class ResponsesAnswer:
    """The answer to one request as it comes."""

    def __init__(self, fields: Responses, answer: RequestAnswer) -> None:
        """`answer` collects the text, and keeps it."""
        self._answer, self._sequence = answer, 0
        self._thought = {"id": identifier("rs_"), "type": "reasoning", "summary": []}
        self._item = {"id": identifier("msg_"), "type": "message", "role": "assistant"}
        self._calls = list[str]()  # identifiers of their items
        self._open: tuple[str, int] = ("", -1)  # the item that goes on: its type and its index
        self._unsaid = list[dict[str, Any]]()  # log-probabilities that have not been told
        effort = fields.reasoning.effort if fields.reasoning else None
        self._head: dict[str, Any] = {
            "id": identifier("resp_"),
            "object": "response",
            "created_at": int(time.time()),
            "model": answer.model,
            "background": False,
            "error": None,
            "instructions": None,
            "max_output_tokens": fields.max_output_tokens,
            "metadata": {},
            "parallel_tool_calls": fields.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": effort, "summary": None},
            "store": False,
            "temperature": fields.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": fields.tool_choice or "auto",
            "tools": fields.tools or [],
            "top_p": fields.top_p,
            "truncation": "disabled",
        }

    def take(self, first: int, update: Update) -> None:
        self._answer.take(first, update)

    def whole(self) -> dict[str, Any]:
        used, ends = self._answer.usage, self._status
        usage = {
            "input_tokens": used["prompt_tokens"],
            "input_tokens_details": used["prompt_tokens_details"],
            "output_tokens": used["completion_tokens"],
            "output_tokens_details": used["completion_tokens_details"],
            "total_tokens": used["total_tokens"],
        }
        reason = {"reason": "max_output_tokens"} if ends == "incomplete" else None
        return {**self._head, "status": ends, "incomplete_details": reason, "output": self._output(), "usage": usage}

    @property
    def _status(self) -> str:
        return "incomplete" if self._answer.choices[0].reason == "length" else "completed"

    def _output(self) -> list[dict[str, Any]]:
        choice = self._answer.choices[0]
        message = message_of(choice.events)
        calls = [self._call(index) for index in range(len(message.get("tool_calls", [])))]
        thoughts = [self._reasoning()] if "reasoning_content" in message else []
        return [*thoughts, *([self._message()] if message["content"] or not (choice.reader or thoughts) else []), *calls]

    def _reasoning(self) -> dict[str, Any]:
        return {**self._thought, "status": self._status, "content": [self._thinking()]}

    def _thinking(self) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": message_of(self._answer.choices[0].events)["reasoning_content"]}

    def _message(self) -> dict[str, Any]:
        return {**self._item, "status": self._status, "content": [self._part()]}

    def _part(self) -> dict[str, Any]:
        choice = self._answer.choices[0]
        text = message_of(choice.events)["content"]
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": choice.logprobs}

    def _call(self, index: int) -> dict[str, Any]:
        while len(self._calls) <= index:
            self._calls.append(identifier("fc_"))
        events = self._answer.choices[0].events
        begin = next(event for event in events if isinstance(event, CallBegin) and event.index == index)
        called = {"call_id": begin.id, "name": begin.name, "arguments": arguments_text(events, index)}
        return {"id": self._calls[index], "type": "function_call", "status": self._status, **called}

    def _event(self, kind: str, **data: Any) -> bytes:
        body = {"type": kind, "sequence_number": self._sequence, **data}
        self._sequence += 1
        return f"event: {kind}\n".encode() + b"data: " + msgspec.json.encode(body) + b"\n\n"

    async def events(
        self, updates: AsyncIterable[tuple[int, Update] | None], shown_error: Callable[[Exception], ApiError]
    ) -> AsyncIterator[bytes]:
        """`shown_error`: what a client sees of an error."""
        begun = {**self._head, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
        yield self._event("response.created", response=begun)
        yield self._event("response.in_progress", response=begun)
        if not self._answer.choices[0].reader and not self._answer.tickets[0].job.request.thinking:
            for each in self._begin_message():
                yield each
        try:
            async for found in updates:
                if found is None:
                    yield PING
                    continue
                _, deltas, entries = self._answer.take(*found)
                for each in self._added(deltas, entries):
                    yield each
        except Exception as error:
            # In both shapes: that of the reference, and that in which streams have come from OpenAI's own server.
            shown = shown_error(error)
            plain = {"code": shown.code, "message": shown.message, "param": shown.param}
            yield self._event("error", **plain, error={**plain, "type": shown.kind})
            return
        if self._open == ("", -1) and not self._answer.choices[0].reader:
            # It might have begun with thinking, and said nothing.
            for each in self._begin_message():
                yield each
        for each in self._end():
            yield each
        yield self._event(f"response.{self._status}", response=self.whole())

    def _added(self, deltas: list[dict[str, Any]], entries: list[dict[str, Any]]) -> Iterator[bytes]:
        """The events of what is new; log-probabilities go with the next text, which may come after those of an empty line."""
        self._unsaid += entries
        for delta in deltas or ([{"content": ""}] if self._unsaid and self._open[0] == "message" else []):
            if "reasoning_content" in delta:
                if self._open[0] != "reasoning":
                    yield from self._begin_reasoning()
                yield self._event("response.reasoning_text.delta", **self._at, delta=delta["reasoning_content"])
                continue
            if "content" in delta:
                if self._open[0] != "message":
                    yield from self._end()
                    yield from self._begin_message()
                yield self._event("response.output_text.delta", **self._at, delta=delta["content"], logprobs=self._unsaid)
                self._unsaid = []
                continue
            (call,) = delta["tool_calls"]
            if "id" in call:
                yield from self._end()
                self._open = "call", self._open[1] + 1
                item = {**self._call(call["index"]), "status": "in_progress", "arguments": ""}
                yield self._event("response.output_item.added", output_index=self._open[1], item=item)
            else:
                at = {"item_id": self._calls[call["index"]], "output_index": self._open[1]}
                yield self._event("response.function_call_arguments.delta", **at, delta=call["function"]["arguments"])

    @property
    def _at(self) -> dict[str, Any]:
        item = self._thought if self._open[0] == "reasoning" else self._item
        return {"item_id": item["id"], "output_index": self._open[1], "content_index": 0}

    def _begin_reasoning(self) -> Iterator[bytes]:
        self._open = "reasoning", self._open[1] + 1
        item = {**self._thought, "status": "in_progress", "content": list[Any]()}
        yield self._event("response.output_item.added", output_index=self._open[1], item=item)
        yield self._event("response.content_part.added", **self._at, part={"type": "reasoning_text", "text": ""})

    def _begin_message(self) -> Iterator[bytes]:
        self._open = "message", self._open[1] + 1
        item = {**self._item, "status": "in_progress", "content": list[Any]()}
        empty = {"type": "output_text", "text": "", "annotations": list[Any](), "logprobs": list[Any]()}
        yield self._event("response.output_item.added", output_index=self._open[1], item=item)
        yield self._event("response.content_part.added", **self._at, part=empty)

    def _end(self) -> Iterator[bytes]:
        """The item that goes on has ended."""
        kind, index = self._open
        if kind == "message":
            part = self._part()
            yield self._event("response.output_text.done", **self._at, text=part["text"], logprobs=part["logprobs"])
            yield self._event("response.content_part.done", **self._at, part=part)
            yield self._event("response.output_item.done", output_index=index, item=self._message())
        elif kind == "reasoning":
            thinking = self._thinking()
            yield self._event("response.reasoning_text.done", **self._at, text=thinking["text"])
            yield self._event("response.content_part.done", **self._at, part=thinking)
            yield self._event("response.output_item.done", output_index=index, item=self._reasoning())
        elif kind == "call":
            item = self._call(len(self._calls) - 1)
            done = {"item_id": item["id"], "output_index": index, "name": item["name"], "arguments": item["arguments"]}
            yield self._event("response.function_call_arguments.done", **done)
            yield self._event("response.output_item.done", output_index=index, item=item)
