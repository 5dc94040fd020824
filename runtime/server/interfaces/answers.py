"""Answers in the shapes of OpenAI's interface: whole, and in the events of a stream."""

from __future__ import annotations

import secrets
import string
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Literal

import msgspec

from edgeq.runtime.answers.call_reader import CallArguments, CallBegin, CallReader, Event, Thought, arguments_text, message_of
from edgeq.runtime.batching.job import Ticket, Update
from edgeq.runtime.sampling import Logprobs
from edgeq.runtime.server.errors import ApiError
from edgeq.text.tokenizer import Tokenizer

Shape = Literal["chat", "completion"]
DONE = b"data: [DONE]\n\n"
PING = b": ping\n"
"""With one line end: openai's client takes the usual two for an event without data."""


def identifier(prefix: str) -> str:
    letters = string.ascii_letters + string.digits
    return prefix + "".join(secrets.choice(letters) for _ in range(24))


def event(data: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


def finish(reason: str | None) -> str | None:
    """A reason in the words that clients know: a full context is a length."""
    return "length" if reason == "context" else reason


def events_of(reader: CallReader | None, update: Update) -> list[Event]:
    """What an update adds to an answer, whose calls `reader` knows."""
    thoughts = "".join(piece.text for piece in update.pieces if piece.thought)
    found: list[Event] = [Thought(thoughts)] if thoughts else []
    if reader is None:
        text = "".join(piece.text for piece in update.pieces if not piece.thought)
        return [*found, text] if text else found
    found += [event for piece in update.pieces if not piece.thought for event in reader.push(piece.text, piece.token)]
    return [*found, *reader.finish()] if update.reason else found


def delta_of(event: Event) -> dict[str, Any]:
    """What a chunk of a stream has of it."""
    if isinstance(event, CallBegin):
        call = {"id": event.id, "type": "function", "function": {"name": event.name, "arguments": ""}}
        return {"tool_calls": [{"index": event.index, **call}]}
    if isinstance(event, CallArguments):
        return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}
    if isinstance(event, Thought):
        return {"reasoning_content": event.text}
    return {"content": event}


@dataclass
class Choice:
    """One text as it comes.

    reader   of its calls;  called: whether one has begun
    """

    reader: CallReader | None = None
    events: list[Event] = field(default_factory=list)
    called: bool = False
    tokens: int = 0
    thought: int = 0  # of them
    characters: int = 0  # of the tokens among its log-probabilities
    reason: str | None = None
    logprobs: list[Any] = field(default_factory=list)


class RequestAnswer:
    """The texts of the jobs of one request.  `choices` are numbered through them."""

    def __init__(
        self,
        shape: Shape,
        model: str,
        fingerprint: str,
        text: Tokenizer,
        tickets: Sequence[Ticket],
        *,
        stops: frozenset[int],
        keeps: bool,
        usage: bool = False,
    ) -> None:
        """stops   tokens that end a text and are not shown among its log-probabilities
        keeps   what comes, for `whole`; log-probabilities take some KB for each token
        usage   comes last in a stream
        """
        self._shape, self._text, self._stops, self._keeps = shape, text, stops, keeps
        self.model = model
        self.tickets = tickets
        self._streams_usage = usage
        self.choices = [Choice(ticket.job.reader(text, i)) for ticket in tickets for i in range(ticket.job.n)]
        self._head = {
            "id": identifier("chatcmpl-" if shape == "chat" else "cmpl-"),
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }

    def take(self, first: int, update: Update) -> tuple[int, list[dict[str, Any]], list[dict[str, Any]]]:
        """The number of the choice, its deltas and log-probabilities.  `first`: the number of the first of its ticket."""
        index = first + update.sample
        choice = self.choices[index]
        events = events_of(choice.reader, update)
        # Where they were not asked for there are none.
        known = [each for piece, each in zip(update.pieces, update.logprobs, strict=False) if not piece.thought]
        entries = [self._entry(each) for each in known if each.token not in self._stops]
        choice.tokens += len(update.pieces)
        choice.thought += sum(piece.thought for piece in update.pieces)
        choice.characters += sum(len(entry["token"]) for entry in entries)
        if self._keeps:
            choice.events += events
            # As JSON: the objects of 20 tokens for each one take four times as much.
            chat = self._shape == "chat"
            choice.logprobs += [msgspec.Raw(msgspec.json.encode(entry)) for entry in entries] if chat else entries
        choice.called = choice.called or any(isinstance(each, CallBegin) for each in events)
        choice.reason = finish(update.reason)
        # A call that a stop string cut off cannot be made.
        if choice.reason == "stop" and choice.called and not (choice.reader and choice.reader.within):
            choice.reason = "tool_calls"
        return index, [delta_of(each) for each in events], entries

    @property
    def usage(self) -> dict[str, Any]:
        prompt = sum(len(ticket.job.prompt.tokens) for ticket in self.tickets)
        generated = sum(choice.tokens for choice in self.choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
            "prompt_tokens_details": {"cached_tokens": sum(ticket.cached_tokens for ticket in self.tickets)},
            "completion_tokens_details": {"reasoning_tokens": sum(choice.thought for choice in self.choices)},
        }

    def whole(self) -> dict[str, Any]:
        kind = "chat.completion" if self._shape == "chat" else "text_completion"
        choices = []
        for index, choice in enumerate(self.choices):
            message = message_of(choice.events)
            shown: dict[str, Any] = {
                "index": index,
                "finish_reason": choice.reason,
                "logprobs": self._shown(choice.logprobs, 0),
            }
            if self._shape == "chat":
                # Whole arguments are JSON that fits its schema; as they were written.
                calls = [
                    {**call, "function": {**call["function"], "arguments": arguments_text(choice.events, i)}}
                    for i, call in enumerate(message.get("tool_calls", []))
                ]
                content = message["content"] or None if calls else message["content"]
                shown["message"] = {"role": "assistant", "content": content, "refusal": None}
                if calls:
                    shown["message"]["tool_calls"] = calls
                if "reasoning_content" in message:
                    shown["message"]["reasoning_content"] = message["reasoning_content"]
            else:
                shown["text"] = message["content"]
            choices.append(shown)
        return {**self._head, "object": kind, "choices": choices, "usage": self.usage, "edgeq": self.timings}

    @property
    def timings(self) -> dict[str, Any]:
        """What only this server says: milliseconds of the first job, and how often texts had to make room."""
        ticket, now = self.tickets[0], perf_counter()
        first = ticket.first or now
        generated = sum(choice.tokens for choice in self.choices)
        return {
            "queue_ms": round(1000 * ((ticket.begun or now) - ticket.arrived), 1),
            "ttft_ms": round(1000 * (first - ticket.arrived), 1),
            "decode_tok_s": round(max(0, generated - len(self.choices)) / max(now - first, 1e-9), 1),
            "preempted": sum(each.preemptions for each in self.tickets),
        }

    def chunk(self, index: int, delta: dict[str, Any], reason: str | None, shown: Any) -> bytes:
        """An event of a stream."""
        kind = "chat.completion.chunk" if self._shape == "chat" else "text_completion"
        body = {"delta": delta} if self._shape == "chat" else {"text": delta.get("content", "")}
        choice = {"index": index, **body, "logprobs": shown, "finish_reason": reason}
        data = {**self._head, "object": kind, "choices": [choice]}
        return event({**data, "usage": None} if self._streams_usage else data)

    def final_usage(self) -> bytes:
        kind = "chat.completion.chunk" if self._shape == "chat" else "text_completion"
        return event({**self._head, "object": kind, "choices": [], "usage": self.usage})

    def shown(self, index: int, entries: list[dict[str, Any]]) -> Any:
        """Log-probabilities of a chunk."""
        return self._shown(entries, self.choices[index].characters - sum(len(entry["token"]) for entry in entries))

    async def events(
        self, updates: AsyncIterable[tuple[int, Update] | None], shown_error: Callable[[Exception], ApiError]
    ) -> AsyncIterator[bytes]:
        """A stream: the role, pieces of text, why each text ended, usage if it was asked for, [DONE].

        shown_error   what a client sees of an error
        """
        try:
            if self._shape == "chat":
                for index in range(len(self.choices)):
                    yield self.chunk(index, {"role": "assistant", "content": ""}, None, None)
            async for found in updates:
                if found is None:
                    yield PING
                    continue
                index, deltas, entries = self.take(*found)
                shown = self.shown(index, entries)
                if entries and all("reasoning_content" in delta for delta in deltas):
                    # Of tokens of the answer that have no text yet.
                    deltas = [*deltas, {"content": ""}]
                for delta in deltas:
                    thought = "reasoning_content" in delta
                    yield self.chunk(index, delta, None, self.shown(index, []) if thought else shown)
                    shown = shown if thought else self.shown(index, [])
                if self.choices[index].reason:
                    yield self.chunk(index, {}, self.choices[index].reason, None)
        except Exception as error:
            # Without [DONE]: a client takes a stream that merely ends for a whole answer.
            yield event(shown_error(error).body)
            return
        if self._streams_usage:
            yield self.final_usage()
        yield DONE

    def _shown(self, entries: list[Any], offset: int) -> Any:
        if self.tickets[0].job.request.logprobs is None:
            return None
        if self._shape == "chat":
            return {"content": entries, "refusal": None}
        offsets = list[int]()
        for entry in entries:
            offsets.append(offset)
            offset += len(entry["token"])
        return {
            "tokens": [entry["token"] for entry in entries],
            "token_logprobs": [entry["logprob"] for entry in entries],
            "top_logprobs": [{top["token"]: top["logprob"] for top in entry["top_logprobs"]} for entry in entries],
            "text_offset": offsets,
        }

    def _entry(self, logprobs: Logprobs) -> dict[str, Any]:
        return {**self._token(logprobs.token, logprobs.logprob), "top_logprobs": [self._token(*top) for top in logprobs.top]}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        data = self._text.token_bytes(token)
        return {"token": data.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(data)}
