"""Text as it streams out of tokens: complete UTF-8 only, stop strings across tokens."""

from __future__ import annotations

from collections.abc import Sequence

from edgeq.errors import InputError
from edgeq.text.tokenizer import REPLACEMENT, Tokenizer

MAX_STOPS = 16
MAX_STOP_LENGTH = 256


class TextStream:
    """Tokens in, text out as soon as it is complete UTF-8; joined, the pieces are the text of all tokens decoded at once.

    A character whose bytes are spread over tokens is held back until it is whole, and dropped if it never is.
    """

    WINDOW = 16
    CONTEXT = 8
    PATIENCE = 16

    def __init__(self, text: Tokenizer) -> None:
        self._text = text
        self._tokens: list[int] = []  # the last ones; decoders look back a few tokens (spaces, byte tokens)
        self._given = 0  # characters of their text that were handed out
        self._waiting = 0  # tokens since the text last ended in a whole character

    def push(self, token: int) -> str:
        self._tokens.append(token)
        text = self._text.decode(self._tokens)
        # U+FFFD at the end stands for an unfinished character; a decoder of byte tokens writes it for the whole run of them.
        held = len(text) - len(text.rstrip(REPLACEMENT))
        self._waiting = self._waiting + 1 if held else 0
        if self._waiting > self.PATIENCE:
            held = min(held, 3)  # these bytes are no UTF-8 at all; only the last three can still become a character
        end = max(self._given, len(text) - held)
        piece, self._given = text[self._given : end], end
        if len(self._tokens) > self.WINDOW:
            self._shorten(text)
        return piece

    def _shorten(self, text: str) -> None:
        """Forget tokens whose text is out, if what is left decodes to the end of the same text."""
        for count in range(self.CONTEXT, self.CONTEXT + 4):  # one of four cuts is between two characters of byte tokens
            rest = self._text.decode(self._tokens[-count:])
            left = len(rest) - (len(text) - self._given)
            if left >= 0 and text.endswith(rest):
                self._tokens, self._given = self._tokens[-count:], left
                return


class StopStrings:
    """Ends a text before the first of some strings, which may be spread over pieces and are never given out, not even in part.

    InputError: more than 16 strings, or one that is empty or longer than 256 characters.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if isinstance(stops, str) or len(stops) > MAX_STOPS or not all(0 < len(s) <= MAX_STOP_LENGTH for s in stops):
            raise InputError(f"stop takes a list of at most {MAX_STOPS} strings of 1 to {MAX_STOP_LENGTH} characters")
        self._stops = tuple(stops)
        self._pending = ""
        self.ended = False

    def push(self, piece: str) -> str:
        """Text that can be given out now.  After `ended` everything is dropped."""
        if self.ended:
            return ""
        text = self._pending + piece
        hits = [(at + len(s), at) for s in self._stops if (at := text.find(s)) >= 0]
        if hits:
            # The one that ends first, as if the text had come character by character.
            self.ended, self._pending = True, ""
            return text[: min(hits)[1]]
        keep = max((n for s in self._stops for n in range(1, len(s)) if text.endswith(s[:n])), default=0)
        self._pending = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """What was held back and became no stop string."""
        pending, self._pending = self._pending, ""
        return pending
