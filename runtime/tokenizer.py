"""Text to tokens and back, as it streams: complete UTF-8 only, stop strings across tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from edgeq import tokenizer
from edgeq.container import ModelFile
from edgeq.errors import FormatError, InputError, UnsupportedError
from edgeq.tokenizer import SafeTokenizer

REPLACEMENT = "\ufffd"
MAX_STOPS = 16
MAX_STOP_LENGTH = 256


class Text:
    """The tokenizer of a file.

    add_bos          put bos before a prompt (where tokenizer.json does not do so itself)
    eos              tokens that end a text
    special_tokens   `bos_token`, `eos_token` ... as text, for the chat template
    added            literals of control tokens and whether each is special
    """

    def __init__(self, tokenizer_json: str | bytes, generation: dict[str, object]) -> None:
        """FormatError: the tokenizer cannot be loaded, or `generation` is not what a converter writes."""
        data = tokenizer_json.encode("utf-8", "replace") if isinstance(tokenizer_json, str) else tokenizer_json
        self._tokenizer = tokenizer.load(data)
        library = self._tokenizer.tokenizer
        added = library.get_added_tokens_decoder().items()
        # Runs of spaces are added tokens of some tokenizers; they control nothing.
        self.added: dict[str, bool] = {t.content: t.special for _, t in added if t.content.strip()}
        self.added_ids = frozenset(i for i, t in added if t.content.strip())
        self.special_tokens = _special_tokens(generation.get("special_tokens"))
        self.bos = _token_id("bos_token_id", generation.get("bos_token_id"))
        self.add_bos = generation.get("add_bos") is True and self.bos is not None
        stops = generation.get("eos_token_ids", [])
        if not isinstance(stops, list):
            raise FormatError(f"generation eos_token_ids is {str(stops)[:80]}; expected a list of token ids")
        named = library.token_to_id(self.special_tokens.get("eos_token", ""))
        self.eos = frozenset(t for t in [*(_token_id("eos_token_ids", s) for s in stops), named] if t is not None)

    @classmethod
    def from_file(cls, file: ModelFile) -> Text:
        blob = file.blob("tokenizer.json")
        if blob is None:
            raise UnsupportedError(f"{file.path}: no tokenizer in the file; convert the checkpoint again, with tokenizer.json")
        return cls(blob, file.metadata.generation)

    @cached_property
    def _plain(self) -> SafeTokenizer:
        """Knows no control token, so that one that is spelled out is text.  It shares the vocabulary of the other."""
        return self._tokenizer.without_added_tokens()

    def encode(self, text: str) -> list[int]:
        """Tokens of a prompt, beginning as the model was trained to see it; control tokens spelled in it are control tokens."""
        ids = self._tokenizer.encode(text, add_special_tokens=True)
        return [self.bos, *ids] if self.add_bos and self.bos is not None else ids

    def encode_part(self, text: str) -> list[int]:
        """Tokens of a part of a rendered chat: nothing is put before it, control tokens spelled in it are control tokens."""
        return self._tokenizer.encode(text, add_special_tokens=False)

    def encode_plain(self, text: str) -> list[int]:
        """Tokens of text that a user wrote: never a control token, whatever it spells."""
        ids = self._plain.encode(text, add_special_tokens=False)
        if self.added_ids.isdisjoint(ids):
            return ids
        # A vocabulary that holds the literal as an ordinary word (Unigram); a single character is never one.
        apart = self._plain.encode_each(list(text), add_special_tokens=False)
        return [i for ids in apart for i in ids if i not in self.added_ids]

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of tokens, control tokens left out."""
        return self._tokenizer.decode(list(tokens))


class TextStream:
    """Tokens in, text out as soon as it is complete UTF-8; joined, the pieces are the text of all tokens decoded at once.

    A character whose bytes are spread over tokens is held back until it is whole, and dropped if it never is.
    """

    WINDOW = 16
    CONTEXT = 8
    PATIENCE = 16

    def __init__(self, text: Text) -> None:
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
        self._held = ""
        self.found = False

    def push(self, piece: str) -> str:
        """Text that can be given out now.  After `found` everything is dropped."""
        if self.found:
            return ""
        text = self._held + piece
        hits = [(at + len(s), at) for s in self._stops if (at := text.find(s)) >= 0]
        if hits:
            # The one that ends first, as if the text had come character by character.
            self.found, self._held = True, ""
            return text[: min(hits)[1]]
        keep = max((n for s in self._stops for n in range(1, len(s)) if text.endswith(s[:n])), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """What was held back and became no stop string."""
        held, self._held = self._held, ""
        return held


def _token_id(name: str, value: object) -> int | None:
    if value is not None and (type(value) is not int or value < 0):
        raise FormatError(f"generation {name} has {str(value)[:80]}; expected token ids")
    return value if type(value) is int else None


def _special_tokens(value: Any) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(v, (str, type(None))) for v in value.values()):
        raise FormatError(f"generation special_tokens is {str(value)[:80]}; expected texts by name")
    return {name: text for name, text in value.items() if text is not None}
