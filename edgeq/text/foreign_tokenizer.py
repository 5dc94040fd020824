"""The tokenizer of a stranger's file: checked once per machine in a child process, then loaded.

The tokenizers library aborts the process where memory cannot be had, and a file of 64 bytes can ask for 8 GiB.  So a tokenizer
that this machine has not accepted yet is judged, loaded and tried in a child with limits; the cache folder keeps its digest.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import tokenizers
from tokenizers import Tokenizer

from edgeq.errors import FormatError, InputError
from edgeq.system.confinement import ConfinementLimits, confined
from edgeq.system.machine import cache_folder, release_freed_memory
from edgeq.system.whole_file import write_whole
from edgeq.text.tokenizer_rules import is_linear

MAX_TOKENIZER = 64 << 20
"""Bytes of a tokenizer.json; the largest of a published language model has 33 MB."""
MAX_TOKENS_PER_BYTE = 16
"""A byte of text is one token at most, times what normalizers put in."""
EXTRA_TOKENS = 1024
SAMPLE = "Def f(x):\n    return 'naïve' + 2 * x  # 日本 🙂\n"
PROBES = (SAMPLE, "", " ", "a" * 1000, " " * 1000, "0" * 1000, "\n" * 1000, "日本" * 300, "é\u0301\ufb01\ufdfa" * 100)
_RULES = "1"
"""Goes up when a rule or a limit here becomes stricter: then what was accepted is checked again."""


@dataclass(frozen=True)
class SafeTokenizer:
    """A tokenizer whose loading, encoding and decoding have bounds.

    is_linear   it encodes in this process; otherwise each text in a child, which costs some milliseconds
    """

    tokenizer: Tokenizer
    is_linear: bool

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """InputError: not UTF-8.  FormatError: the tokenizer fails on this text, or goes beyond a limit."""
        return self.encode_each([text], add_special_tokens=add_special_tokens)[0]

    def encode_each(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        """The tokens of each text, as `encode` gives them."""
        try:
            lengths = [len(text.encode("utf-8")) for text in texts]
        except UnicodeEncodeError:
            raise InputError("the text is not valid UTF-8; save it as UTF-8") from None
        with sound():
            if self.is_linear:
                # encode() would hold the interpreter lock.
                encoded = self.tokenizer.encode_batch(list(texts), add_special_tokens=add_special_tokens)
                found = [list(each.ids) for each in encoded]
            else:
                total = sum(lengths)
                limits = ConfinementLimits(memory=(256 << 20) + 512 * total, seconds=5 + (total >> 18))
                lines = confined(lambda: _encoded(self.tokenizer, texts, add_special_tokens), limits).split("\n")
                found = [[int(i) for i in line.split()] for line in lines]
        for ids, length in zip(found, lengths, strict=True):
            _check_count(len(ids), length)
        return found

    def encode_pairs(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[list[int], list[int]]]:
        """The tokens of pairs of texts, with those that the tokenizer puts around and between them, and the segment of each.

        InputError: not UTF-8.  FormatError: as `encode`.
        """
        try:
            lengths = [len(first.encode("utf-8")) + len(second.encode("utf-8")) for first, second in pairs]
        except UnicodeEncodeError:
            raise InputError("the text is not valid UTF-8; save it as UTF-8") from None
        with sound():
            if self.is_linear:
                encoded = self.tokenizer.encode_batch(list(pairs), add_special_tokens=True)
                found = [(list(each.ids), list(each.type_ids)) for each in encoded]
            else:
                total = sum(lengths)
                limits = ConfinementLimits(memory=(256 << 20) + 512 * total, seconds=5 + (total >> 18))
                lines = confined(lambda: _encoded_pairs(self.tokenizer, pairs), limits).split("\n")
                numbers = [[int(i) for i in line.split()] for line in lines]
                found = list(zip(numbers[::2], numbers[1::2], strict=True))
        for (ids, _), length in zip(found, lengths, strict=True):
            _check_count(len(ids), length)
        return found

    def decode(self, tokens: list[int]) -> str:
        """Text of tokens, control tokens left out.  FormatError: the tokenizer fails on them."""
        with sound():
            return self.tokenizer.decode(tokens, skip_special_tokens=True)

    def without_added_tokens(self) -> SafeTokenizer:
        """The same vocabulary, so that a control token that is spelled out is text."""
        plain = Tokenizer(self.tokenizer.model)
        for part in ("normalizer", "pre_tokenizer", "decoder"):
            if getattr(self.tokenizer, part) is not None:
                setattr(plain, part, getattr(self.tokenizer, part))
        return SafeTokenizer(plain, self.is_linear)


def load(data: bytes) -> SafeTokenizer:
    """The tokenizer of these bytes of a tokenizer.json.

    FormatError: too large, has a part that is not supported, or the library cannot load and run it within the limits.
    """
    if len(data) > MAX_TOKENIZER:
        raise FormatError(f"the file's tokenizer has {len(data)} bytes; at most {MAX_TOKENIZER} are possible")
    path = cache_folder() / "tokenizers" / _digest(data)
    verdict = _remembered(path)
    if verdict is None:
        limits = ConfinementLimits(memory=(256 << 20) + 32 * len(data), seconds=5 + (len(data) >> 20))
        with sound():
            verdict = confined(lambda: _judged(data), limits)
        _remember(path, verdict)
    with sound():
        tokenizer = _loaded(data)
    # With a vocabulary of 128,000 parsing takes 85 MB, twice what the tokenizer needs.
    release_freed_memory()
    return SafeTokenizer(tokenizer, verdict == "linear")


@contextmanager
def sound() -> Iterator[None]:
    """Whatever a damaged or hostile tokenizer makes the library raise is a FormatError."""
    try:
        yield
    except BaseException as error:
        # A bare Exception, or a panic of the Rust code, which is none.
        if not isinstance(error, Exception) and type(error).__module__ != "pyo3_runtime":
            raise
        raise FormatError(f"the file's tokenizer does not work: {str(error)[:200]}; convert the checkpoint again") from None


def _loaded(data: bytes) -> Tokenizer:
    tokenizer = Tokenizer.from_str(data.decode("utf-8"))
    # Settings of the training run that would silently cut or fill a prompt.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _judged(data: bytes) -> str:
    """In the child: "linear" or "confined"; whatever the tokenizer does wrong is raised."""
    verdict = "linear" if is_linear(json.loads(data)) else "confined"
    tokenizer = _loaded(data)
    for line in _encoded(tokenizer, PROBES if verdict == "linear" else PROBES[:1], True).split("\n"):
        tokenizer.decode([int(i) for i in line.split()], skip_special_tokens=True)
    return verdict


def _encoded(tokenizer: Tokenizer, texts: Sequence[str], add_special_tokens: bool) -> str:
    """In a child: the tokens of each text in a line."""
    # The threads of the library's pool are not in the child.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    encoded = (tokenizer.encode(text, add_special_tokens=add_special_tokens) for text in texts)
    return "\n".join(" ".join(map(str, each.ids)) for each in encoded)


def _encoded_pairs(tokenizer: Tokenizer, pairs: Sequence[tuple[str, str]]) -> str:
    """In a child: the tokens of each pair in a line, and their segments in the next."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    encoded = (tokenizer.encode(first, second, add_special_tokens=True) for first, second in pairs)
    return "\n".join(" ".join(map(str, line)) for each in encoded for line in (each.ids, each.type_ids))


def _check_count(tokens: int, length: int) -> None:
    if tokens > MAX_TOKENS_PER_BYTE * length + EXTRA_TOKENS:
        raise FormatError(f"the file's tokenizer makes {tokens} tokens of {length} bytes; convert the checkpoint again")


def _digest(data: bytes) -> str:
    salt = f"{_RULES} {tokenizers.__version__}".encode()
    return hashlib.blake2b(data, digest_size=16, key=salt[:64]).hexdigest()


def _remembered(path: Path) -> str | None:
    try:
        verdict = path.read_text(encoding="ascii")
    except (OSError, ValueError):
        return None
    return verdict if verdict in ("linear", "confined") else None


def _remember(path: Path, verdict: str) -> None:
    """Where the cache folder cannot be written, the tokenizer is checked again the next time."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, verdict)
