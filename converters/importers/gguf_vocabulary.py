"""The vocabulary in a GGUF file's metadata, checked: a stranger wrote every count, id and score of it."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgeq.errors import CheckpointError
from edgeq.text.tokenizer_rules import MAX_TEXT

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Values of tokenizer.ggml.token_type."""
PREFIX = "tokenizer.ggml."
SPECIAL_IDS = ("bos", "eos", "eot", "eom", "unknown", "padding", "cls", "seperator", "mask")
"""As llama.cpp spells them, before `_token_id`."""
SPACE = "\u2581"
"""A space in tokens of SentencePiece; in files of WordPiece what every token that begins a word begins with."""
WORD_PIECE = "bert"
"""`tokenizer.ggml.model` of a WordPiece tokenizer."""
CONTINUES = "##"
"""What a token of WordPiece begins with that goes on with a word."""
MAX_TOKENS = 1 << 20
"""The largest vocabulary of a published language model has 262,144."""
MAX_MERGES = 4 * MAX_TOKENS
"""Gemma 3's vocabulary has 514,906, the most of a published one."""
MAX_CHARACTERS = 8 << 20
"""Characters of all tokens together; Gemma 3 has 2 million."""


@dataclass(frozen=True)
class GgufVocabulary:
    """Tokens in the order of their ids, as the checkpoint's tokenizer has them.

    kinds    NORMAL, UNKNOWN ... of each token
    scores   of each token, in models of SentencePiece; empty in others
    merges   pairs of tokens, the first to be joined first; empty where the scores give the order
    ids      of SPECIAL_IDS, those that the file names
    """

    tokens: Sequence[str]
    kinds: Sequence[int]
    scores: Sequence[float]
    merges: Sequence[tuple[str, str]]
    ids: Mapping[str, int]

    def literal(self, name: str) -> str | None:
        """The token that the file names as `name` of SPECIAL_IDS."""
        return self.tokens[self.ids[name]] if name in self.ids else None


def read_vocabulary(metadata: Mapping[str, Any]) -> GgufVocabulary:
    """The vocabulary of these metadata, keys as in the file.

    CheckpointError: a key is missing, too large, or holds what no tokenizer can use; it is named.
    """
    tokens = _texts(metadata, "tokens", MAX_TOKENS)
    if not tokens:
        raise CheckpointError(f"{PREFIX}tokens is missing or empty: the file has no vocabulary")
    if sum(map(len, tokens)) > MAX_CHARACTERS:
        raise CheckpointError(f"{PREFIX}tokens has more than {MAX_CHARACTERS} characters together")
    kinds = _integers(metadata, "token_type", len(tokens)) or [NORMAL] * len(tokens)
    if of_word_pieces(metadata):
        tokens = [_word_piece(token, kind) for token, kind in zip(tokens, kinds, strict=True)]
    known = {token: i for i, token in enumerate(tokens)}
    if len(known) < len(tokens):
        twice = next(i for i, token in enumerate(tokens) if known[token] != i)
        raise CheckpointError(f"{PREFIX}tokens has {tokens[twice][:80]!r} twice, as {twice} and {known[tokens[twice]]}")
    if not set(kinds) <= set(range(NORMAL, BYTE + 1)):
        raise CheckpointError(f"{PREFIX}token_type has {(set(kinds) - set(range(NORMAL, BYTE + 1))).pop()}; expected 1 to 6")
    ids = {name: i for name in SPECIAL_IDS if (i := _id(metadata, name, len(tokens))) is not None}
    for name in ("bos", "eos", "eot", "eom", "cls", "seperator"):
        # Files exist that call such a token an ordinary one; decoded, it would be shown.
        if name in ids and kinds[ids[name]] in (NORMAL, USER_DEFINED):
            kinds[ids[name]] = CONTROL
    return GgufVocabulary(tokens, kinds, _scores(metadata, len(tokens)), _merges(metadata, known), ids)


def of_word_pieces(metadata: Mapping[str, Any]) -> bool:
    """Whether the tokenizer is WordPiece."""
    kind = metadata.get(f"{PREFIX}model")
    # An array has no truth of its own.
    return isinstance(kind, str) and kind == WORD_PIECE


def _word_piece(token: str, kind: int) -> str:
    """A token as BERT's vocabulary has it: llama.cpp's converter marks those that begin a word, not those that go on."""
    if kind == CONTROL:
        return token
    return token[1:] if token.startswith(SPACE) else f"{CONTINUES}{token}"


def flag(metadata: Mapping[str, Any], name: str, absent: bool) -> bool:
    """The boolean `name` of the tokenizer.  CheckpointError: it is something else."""
    value = metadata.get(PREFIX + name, absent)
    if not isinstance(value, bool):
        raise CheckpointError(f"{PREFIX}{name} is {value!r:.80}; expected true or false")
    return value


def array(metadata: Mapping[str, Any], key: str, most: int) -> list[Any]:
    """The array `key`, empty where there is none.  CheckpointError: not an array of at most `most` values."""
    values = metadata.get(key)
    if values is None:
        return []
    if isinstance(values, (str, bytes)) or not isinstance(values, Collection):
        raise CheckpointError(f"{key} is {values!r:.80}; expected an array")
    if len(values) > most:
        raise CheckpointError(f"{key} has {len(values)} values; at most {most} are possible")
    # Numbers of numpy become those of Python.
    return list(values.tolist() if hasattr(values, "tolist") else values)


def _texts(metadata: Mapping[str, Any], name: str, most: int) -> list[str]:
    texts = array(metadata, PREFIX + name, most)
    for i, text in enumerate(texts):
        if not isinstance(text, str) or any("\ud800" <= c <= "\udfff" for c in text):
            raise CheckpointError(f"{PREFIX}{name}: number {i} is {text!r:.80}; expected UTF-8 text")
        if len(text.encode()) > MAX_TEXT:
            raise CheckpointError(f"{PREFIX}{name}: number {i} has {len(text.encode())} bytes; at most {MAX_TEXT} are possible")
    return texts


def _integers(metadata: Mapping[str, Any], name: str, count: int) -> list[int]:
    values = _parallel(metadata, name, count)
    if any(type(value) is not int for value in values):
        raise CheckpointError(f"{PREFIX}{name} has a value that is not an integer")
    return values


def _scores(metadata: Mapping[str, Any], count: int) -> list[float]:
    scores = _parallel(metadata, "scores", count)
    for i, score in enumerate(scores):
        if type(score) not in (int, float) or not math.isfinite(score):
            raise CheckpointError(f"{PREFIX}scores: number {i} is {score!r:.80}; expected a finite number")
    return scores


def _parallel(metadata: Mapping[str, Any], name: str, count: int) -> list[Any]:
    """An array with a value for each token, or none."""
    values = array(metadata, PREFIX + name, MAX_TOKENS)
    if values and len(values) != count:
        raise CheckpointError(f"{PREFIX}{name} has {len(values)} values for {count} tokens")
    return values


def _id(metadata: Mapping[str, Any], name: str, count: int) -> int | None:
    key = f"{PREFIX}{name}_token_id"
    value = metadata.get(key)
    if value is not None and (type(value) is not int or not 0 <= value < count):
        raise CheckpointError(f"{key} is {value!r:.80}; the file has {count} tokens")
    return value


def _merges(metadata: Mapping[str, Any], known: Mapping[str, int]) -> list[tuple[str, str]]:
    merges = list[tuple[str, str]]()
    for i, text in enumerate(_texts(metadata, "merges", MAX_MERGES)):
        # A token of a SentencePiece model may hold a space, one of a byte-level vocabulary never does.
        left, _, right = text.partition(" ")
        if not left or not right or not {left, right, left + right} <= known.keys():
            raise CheckpointError(f"{PREFIX}merges: number {i}, {text[:80]!r}, does not join two tokens to a third")
        merges.append((left, right))
    return merges
