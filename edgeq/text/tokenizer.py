"""The tokenizer of a model: text to tokens and back, as converters and the runtime need it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from edgeq.errors import FormatError, UnsupportedError
from edgeq.format.container import ModelFile
from edgeq.text import foreign_tokenizer
from edgeq.text.foreign_tokenizer import SafeTokenizer

REPLACEMENT = "\ufffd"


class Tokenizer:
    """The tokenizer of a file.

    add_bos          put bos before a prompt (where tokenizer.json does not do so itself)
    end              the token to put after a text that is embedded (where tokenizer.json does not do so itself); None: none
    eos              tokens that end a text
    special_tokens   `bos_token`, `eos_token` ... as text, for the chat template
    added            literals of control tokens and whether each is special;  special_ids: the tokens of those that are
    """

    def __init__(self, tokenizer_json: str | bytes, generation: dict[str, object]) -> None:
        """FormatError: the tokenizer cannot be loaded, or `generation` is not what a converter writes."""
        data = tokenizer_json.encode("utf-8", "replace") if isinstance(tokenizer_json, str) else tokenizer_json
        self._tokenizer = foreign_tokenizer.load(data)
        library = self._tokenizer.tokenizer
        added = library.get_added_tokens_decoder().items()
        # Runs of spaces are added tokens of some tokenizers; they control nothing.
        self.added: dict[str, bool] = {t.content: t.special for _, t in added if t.content.strip()}
        self.added_ids = frozenset(i for i, t in added if t.content.strip())
        self.special_ids = frozenset(i for i, t in added if t.special)
        self.special_tokens = _special_tokens(generation.get("special_tokens"))
        self.bos = _token_id("bos_token_id", generation.get("bos_token_id"))
        self.add_bos = generation.get("add_bos") is True and self.bos is not None
        self.end = _token_id("end_token_id", generation.get("end_token_id"))
        stops = generation.get("eos_token_ids", [])
        if not isinstance(stops, list):
            raise FormatError(f"generation eos_token_ids is {str(stops)[:80]}; expected a list of token ids")
        named = library.token_to_id(self.special_tokens.get("eos_token", ""))
        self.eos = frozenset(t for t in [*(_token_id("eos_token_ids", s) for s in stops), named] if t is not None)

    @classmethod
    def from_file(cls, file: ModelFile) -> Tokenizer:
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
        begun = [self.bos, *ids] if self.add_bos and self.bos is not None else ids
        return begun if self.end is None else [*begun, self.end]

    def encode_pairs(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[list[int], int]]:
        """Tokens of pairs of texts as a model was trained to see them, and the index of the first token of the second segment;
        0: the tokenizer has no segments."""
        encoded = self._tokenizer.encode_pairs(pairs)
        return [(ids, kinds.index(1) if 1 in kinds else 0) for ids, kinds in encoded]

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

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for, exactly; of a control token its literal."""
        library = self._tokenizer.tokenizer
        piece = library.id_to_token(token) or ""
        if token in self.added_ids:
            return piece.encode()
        if self._byte_level:
            return b"".join(self._byte_level[c] if c in self._byte_level else c.encode() for c in piece)
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes([int(piece[3:5], 16)])
        return piece.replace("\u2581", " ").encode()

    @cached_property
    def longest_token(self) -> int:
        """Characters, or bytes, of the longest token of the vocabulary."""
        library = self._tokenizer.tokenizer
        left, longest = library.get_vocab_size(), 1
        # One by one: the whole vocabulary as strings of Python leaves 17 MB behind where it has 128,000.
        for token in range(4 * left):
            piece = library.id_to_token(token)
            if piece is not None:
                longest, left = max(longest, len(piece)), left - 1
            if not left:
                break
        return longest

    @cached_property
    def _byte_level(self) -> dict[str, bytes]:
        """The byte of each character of a byte-level vocabulary (GPT-2's); empty for others, in which U+2581 is a space."""
        library = self._tokenizer.tokenizer
        if library.token_to_id("\u2581") is not None or library.token_to_id("\u0120") is None:
            return {}
        shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        hidden = [byte for byte in range(256) if byte not in shown]
        found = {chr(byte): bytes([byte]) for byte in shown}
        return found | {chr(256 + i): bytes([byte]) for i, byte in enumerate(hidden)}

    def special_token(self, literal: str) -> int | None:
        """The control token with this literal that `decode` leaves out; None: there is none."""
        token = self._tokenizer.tokenizer.token_to_id(literal)
        return token if token in self.special_ids else None

    def control_token(self, literal: str) -> int | None:
        """The control token with this literal, whether `decode` leaves it out or not; None: there is none."""
        return self._tokenizer.tokenizer.token_to_id(literal) if literal in self.added else None

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of tokens, control tokens left out."""
        return self._tokenizer.decode(list(tokens))


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
