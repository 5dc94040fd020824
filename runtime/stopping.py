"""When a text ends, and how much of it can be shown."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal

from edgeq.runtime.tokenizer import StopStrings, TextStream
from edgeq.text import Text

FinishReason = Literal["stop", "length", "context"]


class Ending:
    """Watches the tokens of one text.

    reason   None while it goes on; "stop": a stop token or string came; "length": `max_tokens`; "context": it is full
    """

    def __init__(
        self, text: Text, max_tokens: int, stop: Sequence[str], *, stop_tokens: Collection[int], min_tokens: int = 0
    ) -> None:
        """`stop_tokens` are all that end it; among the first `min_tokens` stop strings are not looked for."""
        self.reason: FinishReason | None = None
        self.count = 0
        self._ends, self._most, self._least = stop_tokens, max_tokens, min_tokens
        self._stream, self._stops = TextStream(text), StopStrings(stop)

    @property
    def room(self) -> int:
        """Tokens that may still come."""
        return self._most - self.count

    def push(self, token: int, full: bool) -> str:
        """The text that `token` makes complete, often none.  `full`: the context has no room after it."""
        self.count += 1
        stopped = token in self._ends
        text = "" if stopped else self._stream.push(token)
        if self.count > self._least:
            text = self._stops.push(text)
        if stopped or self._stops.found:
            self.reason = "stop"
        elif self.room <= 0:
            self.reason = "length"
        elif full:
            self.reason = "context"
        return text + self._stops.finish() if self.reason else text
