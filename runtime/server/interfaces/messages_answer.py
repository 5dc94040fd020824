"""Answers in the shapes of Anthropic's interface: whole, and in the events of a stream."""

from __future__ import annotations

import json
from collections.abc import AsyncIterable, AsyncIterator, Callable
from typing import Any

import msgspec

from edgeq.runtime.answers.call_reader import CallArguments, CallBegin, Event, Thought, arguments_text
from edgeq.runtime.batching.job import Ticket, Update
from edgeq.runtime.server.errors import ApiError
from edgeq.runtime.server.interfaces.answers import events_of, identifier
from edgeq.text.tokenizer import Tokenizer


class MessagesAnswer:
    """The answer to one request as it comes."""

    def __init__(self, name: str, ticket: Ticket, text: Tokenizer) -> None:
        self._ticket, self._job, self._decoder = ticket, ticket.job, text
        self._reader = ticket.job.reader(text, 0)
        self._events, self._tokens = list[Event](), list[int]()
        self._thought = 0  # of the tokens: the first ones
        self._reason: str | None = None
        self._head = {"id": identifier("msg_"), "type": "message", "role": "assistant", "model": name}

    def take(self, first: int, update: Update) -> list[Event]:
        """What is new; there is one job, whose first text has the number 0."""
        events = events_of(self._reader, update)
        self._events += events
        self._tokens += [piece.token for piece in update.pieces]
        self._thought += sum(piece.thought for piece in update.pieces)
        self._reason = update.reason or self._reason
        return events

    @property
    def _stop(self) -> dict[str, Any]:
        if self._reason != "stop":
            return {"stop_reason": "max_tokens" if self._reason else None, "stop_sequence": None}
        if self._reader and self._reader.calls and not self._reader.within:
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if self._tokens[-1] in self._job.request.stops(self._decoder):
            return {"stop_reason": "end_turn", "stop_sequence": None}
        # What is thought may have another one.
        tail = self._decoder.decode(self._tokens[self._thought :][-256:])
        found = next((stop for stop in self._job.request.stop if stop in tail), None)
        return {"stop_reason": "stop_sequence", "stop_sequence": found}

    def _usage(self, cached: int) -> dict[str, int]:
        read = len(self._job.prompt.tokens) - cached
        fixed = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": cached}
        return {"input_tokens": read, **fixed, "output_tokens": len(self._tokens)}

    def whole(self) -> dict[str, Any]:
        text = "".join(event for event in self._events if isinstance(event, str))
        thoughts = "".join(event.text for event in self._events if isinstance(event, Thought))
        content: list[dict[str, Any]] = [{"type": "thinking", "thinking": thoughts, "signature": ""}] if thoughts else []
        content += [{"type": "text", "text": text}] if text or not (self._reader or thoughts) else []
        for event in self._events:
            if isinstance(event, CallBegin):
                content.append({"type": "tool_use", "id": event.id, "name": event.name, "input": self._input(event.index)})
        return {**self._head, "content": content, **self._stop, "usage": self._usage(self._ticket.cached_tokens)}

    def _input(self, index: int) -> dict[str, Any]:
        """The arguments of a call; nothing where `max_tokens` cut them off."""
        try:
            found = json.loads(arguments_text(self._events, index))
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    async def events(
        self, updates: AsyncIterable[tuple[int, Update] | None], shown_error: Callable[[Exception], ApiError]
    ) -> AsyncIterator[bytes]:
        """`shown_error`: what a client sees of an error."""
        start: dict[str, Any] = {
            **self._head,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(0),
        }
        yield _event({"type": "message_start", "message": start})
        blocks = _Blocks()
        if not self._reader and not self._job.request.thinking:
            for each in blocks.begin("text", {"text": ""}):
                yield each
        try:
            async for found in updates:
                if found is None:
                    yield _event({"type": "ping"})
                    continue
                for event in self.take(*found):
                    for each in blocks.events(event):
                        yield each
        except Exception as error:
            yield _event(shown_error(error).body)
            return
        if not blocks.begun and not self._reader:
            # It might have begun with thinking, and said nothing.
            for each in blocks.begin("text", {"text": ""}):
                yield each
        for each in blocks.end():
            yield each
        yield _event({"type": "message_delta", "delta": self._stop, "usage": self._usage(self._ticket.cached_tokens)})
        yield _event({"type": "message_stop"})


class _Blocks:
    """The blocks of a stream: thinking, text, and one for each call."""

    def __init__(self) -> None:
        self._kind, self._index = "", -1

    @property
    def begun(self) -> bool:
        """Whether there is one."""
        return self._index >= 0

    def events(self, event: Event) -> list[bytes]:
        if isinstance(event, CallBegin):
            return self.begin("tool_use", {"id": event.id, "name": event.name, "input": {}})
        if isinstance(event, CallArguments):
            return [self._delta({"type": "input_json_delta", "partial_json": event.text})]
        if isinstance(event, Thought):
            begun = [] if self._kind == "thinking" else self.begin("thinking", {"thinking": "", "signature": ""})
            return [*begun, self._delta({"type": "thinking_delta", "thinking": event.text})]
        begun = [] if self._kind == "text" else self.begin("text", {"text": ""})
        return [*begun, self._delta({"type": "text_delta", "text": event})]

    def begin(self, kind: str, empty: dict[str, Any]) -> list[bytes]:
        ended = self.end()
        self._kind, self._index = kind, self._index + 1
        block = {"type": kind, **empty}
        return [*ended, _event({"type": "content_block_start", "index": self._index, "content_block": block})]

    def end(self) -> list[bytes]:
        return [_event({"type": "content_block_stop", "index": self._index})] if self._kind else []

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event({"type": "content_block_delta", "index": self._index, "delta": delta})


def _event(data: dict[str, Any]) -> bytes:
    return f"event: {data['type']}\n".encode() + b"data: " + msgspec.json.encode(data) + b"\n\n"
