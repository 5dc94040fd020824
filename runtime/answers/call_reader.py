"""Calls of tools in an answer as it comes."""

from __future__ import annotations

import hashlib
import json
import re
import string
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from edgeq.text.tokenizer import Tokenizer
from edgeq.text.tool_formats import ToolFormat

NAME = "[A-Za-z0-9_-]{1,128}"
"""Names of tools that can be called."""
CHARACTERS = string.ascii_letters + string.digits


@dataclass(frozen=True)
class CallBegin:
    """The tool `name` is called; calls of an answer are numbered from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class CallArguments:
    """A piece of the JSON text of a call's arguments."""

    index: int
    text: str


@dataclass(frozen=True)
class Thought:
    """A piece of what the model thinks before it answers."""

    text: str


Event = str | CallBegin | CallArguments | Thought
"""A piece of an answer: of its text, of a call, or of the thinking before them."""


def call_id(length: int, salt: bytes, index: int) -> str:
    """An identifier: letters and digits alone where it has to be short.

    It follows from its arguments, so that the same request has the same answer; other turns and texts have other salts.
    """
    prefix = "call_" if length > len("call_") + 8 else ""
    digest = hashlib.blake2b(hashlib.sha256(salt).digest(), digest_size=32, person=index.to_bytes(4, "little")).digest()
    # A byte for a character: what 256 is not a multiple of does no harm here.
    return prefix + "".join(CHARACTERS[byte % len(CHARACTERS)] for byte in digest[: length - len(prefix)])


class CallReader:
    """Takes the tokens of an answer, with the text that each made complete, apart into text and calls.

    calls   how many have begun
    """

    def __init__(self, form: ToolFormat, text: Tokenizer, salt: bytes = b"") -> None:
        """`salt`: of the identifiers of its calls."""
        self._form, self._salt, self.calls = form, salt, 0
        # The text of an answer is without special tokens.
        self._unseen = {token: literal for literal in form.literals if (token := text.special_token(literal)) is not None}
        self._state, self._pending = "start", ""
        self._depth, self._quoted, self._escaped = 0, False, False
        name = f"{_lenient(form.head)}({NAME}){_lenient(form.middle)}\\s*(?=\\{{)"
        self._first = re.compile(rf"\s*{_lenient(form.opens)}\s*{name}")
        after = rf"\s*{_lenient(form.tail)}\s*"
        self._next = re.compile(f"{after}{_lenient(form.separator)}{name}") if form.separator is not None else None
        self._last = re.compile(rf"{after}{_lenient(form.closes)}\s*{re.escape(form.end)}")

    @property
    def within(self) -> bool:
        """Whether a call has begun whose arguments have not ended."""
        return self._state == "arguments"

    def push(self, text: str, token: int) -> list[Event]:
        """What a token adds; `text`: what it made complete."""
        self._pending += self._unseen.get(token, "") + text
        found = list[Event]()
        while self._step(found):
            pass
        return found

    def finish(self) -> list[Event]:
        """What was held back: text that became no call.  Of a call that was cut off nothing more comes."""
        pending, self._pending = self._pending, ""
        if self._state == "head":
            pending = self._form.begin + pending
        elif self._state not in ("start", "text"):
            return []
        # Space before a call and after it is no text.
        return [pending] if pending and not (self.calls and not pending.strip()) else []

    def read(self, pieces: Iterable[tuple[str, int]]) -> list[Event]:
        """All of an answer: the pieces of text and their tokens."""
        return [*(event for text, token in pieces for event in self.push(text, token)), *self.finish()]

    def _step(self, events: list[Event]) -> bool:
        """Go on to the next state; whether that is one."""
        if self._state == "start":
            return self._start()
        if self._state == "text":
            return self._text(events)
        if self._state == "arguments":
            return self._arguments(events)
        if self._state == "head":
            return self._begin(self._first.match(self._pending), events)
        if self._next and (match := self._next.match(self._pending)):
            return self._begin(match, events)
        if match := self._last.match(self._pending):
            self._pending = self._pending[match.end() :]
            self._state = "text"
            return True
        return False

    def _start(self) -> bool:
        if not self._pending:
            return False
        self._state = "head" if not self._form.begin and self._pending[0] == "{" else "text"
        return True

    def _text(self, events: list[Event]) -> bool:
        begin = self._form.begin
        at = self._pending.find(begin) if begin else -1
        if at >= 0:
            self._give(events, self._pending[:at].rstrip())
            self._pending = self._pending[at + len(begin) :]
            self._state = "head"
            return True
        kept = next((n for n in range(min(len(begin) - 1, len(self._pending)), 0, -1) if self._pending.endswith(begin[:n])), 0)
        shown = self._pending[: len(self._pending) - kept].rstrip() if begin else self._pending
        self._give(events, shown)
        self._pending = self._pending[len(shown) :]
        return False

    def _give(self, events: list[Event], text: str) -> None:
        if text:
            events.append(text)

    def _begin(self, match: re.Match[str] | None, events: list[Event]) -> bool:
        if not match:
            return False
        events.append(CallBegin(self.calls, call_id(self._form.id_length, self._salt, self.calls), match[1]))
        self.calls += 1
        self._pending = self._pending[match.end() :]
        self._state, self._depth = "arguments", 0
        return True

    def _arguments(self, events: list[Event]) -> bool:
        """Up to the bracket that closes the first one."""
        end = len(self._pending)
        for i, character in enumerate(self._pending):
            if self._quoted:
                self._quoted = self._escaped or character != '"'
                self._escaped = character == "\\" and not self._escaped
            elif character == '"':
                self._quoted = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    end = i + 1
                    self._state = "after"
                    break
        if end:
            events.append(CallArguments(self.calls - 1, self._pending[:end]))
        self._pending = self._pending[end:]
        return self._state == "after"


def _lenient(literal: str) -> str:
    """A pattern of a literal in which any space may stand for its spaces."""
    return r"\s*".join(re.escape(part) for part in re.split(r"\s+", literal))


def message_of(events: Sequence[Event]) -> dict[str, Any]:
    """The message of an answer in OpenAI's shape, but arguments are objects where they are whole, as templates read them.

    `reasoning_content`, which OpenAI's shape does not have, is where vLLM, llama.cpp and chat templates have it.
    """
    text = "".join(event for event in events if isinstance(event, str))
    calls = [event for event in events if isinstance(event, CallBegin)]
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if thoughts := "".join(event.text for event in events if isinstance(event, Thought)):
        message["reasoning_content"] = thoughts
    if calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments_of(events, call.index)}}
            for call in calls
        ]
    return message


def arguments_text(events: Sequence[Event], index: int) -> str:
    """The arguments of a call, as they were written."""
    return "".join(event.text for event in events if isinstance(event, CallArguments) and event.index == index)


def arguments_of(events: Sequence[Event], index: int) -> Any:
    """The arguments of a call; as text where they were cut off."""
    text = arguments_text(events, index)
    try:
        return json.loads(text)
    except ValueError:
        return text
