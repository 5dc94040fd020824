"""When a text ends, and how much of it can be shown."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal, NamedTuple

from edgeq.runtime.answers.thinking import Section, Thinking
from edgeq.runtime.answers.tokenizer import StopStrings, TextStream
from edgeq.text.tokenizer import Tokenizer

FinishReason = Literal["stop", "length", "context"]


class Piece(NamedTuple):
    """A token and the text that it made complete, often none; `thought`: of what the model thinks before it answers."""

    text: str
    token: int
    thought: bool = False


class Ending:
    """Watches the tokens of one text.

    reason   None while it goes on; "stop": a stop token or string came; "length": `max_tokens`; "context": it is full
    """

    def __init__(
        self,
        text: Tokenizer,
        max_tokens: int,
        stop: Sequence[str],
        *,
        stop_tokens: Collection[int],
        min_tokens: int = 0,
        thinking: Thinking | None = None,
    ) -> None:
        """`stop_tokens` are all that end it; stop strings are not looked for among the first `min_tokens`, nor in what is
        thought.
        """
        self.reason: FinishReason | None = None
        self.count = 0
        self._ends, self._most, self._least = stop_tokens, max_tokens, min_tokens
        self._text, self._section = text, Section(thinking)
        self._stream, self._stops = TextStream(text), StopStrings(stop)

    @property
    def room(self) -> int:
        """Tokens that may still come."""
        return self._most - self.count

    def push(self, token: int, full: bool) -> Piece:
        """`full`: the context has no room after it."""
        self.count += 1
        stopped = token in self._ends
        thought, mark = self._section.take(token)
        if mark:
            self._stream = TextStream(self._text)
        text = "" if stopped or mark else self._section.shown(self._stream.push(token))
        if not thought and self.count > self._least:
            text = self._stops.push(text)
        if stopped or self._stops.ended:
            self.reason = "stop"
        elif self.room <= 0:
            self.reason = "length"
        elif full:
            self.reason = "context"
        return Piece(text + self._stops.finish() if self.reason else text, token, thought)
