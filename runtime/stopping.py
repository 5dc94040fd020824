"""When a text ends, and how much of it can be shown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from edgeq.errors import InputError
from edgeq.runtime.tokenizer import StopStrings, Text, TextStream

FinishReason = Literal["stop", "length", "context"]


class Ending:
    """Watches the tokens of one text.

    reason   None while it goes on; "stop": a stop token or string came; "length": `max_tokens`; "context": it is full
    """

    def __init__(self, text: Text, max_tokens: int, stop: Sequence[str]) -> None:
        """InputError: no tokens are asked for, or stop strings that cannot be used."""
        if max_tokens < 1:
            raise InputError(f"max_tokens is {max_tokens}; expected at least 1")
        self.reason: FinishReason | None = None
        self.count = 0
        self._eos, self._stream, self._stops, self._most = text.eos, TextStream(text), StopStrings(stop), max_tokens

    @property
    def room(self) -> int:
        """Tokens that may still come."""
        return self._most - self.count

    def push(self, token: int, full: bool) -> str:
        """The text that `token` makes complete, often none.  `full`: the context has no room after it."""
        self.count += 1
        stopped = token in self._eos
        text = "" if stopped else self._stops.push(self._stream.push(token))
        if stopped or self._stops.found:
            self.reason = "stop"
        elif self.room <= 0:
            self.reason = "length"
        elif full:
            self.reason = "context"
        return text + self._stops.finish() if self.reason else text
