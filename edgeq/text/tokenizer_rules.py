"""Which parts of a tokenizer.json are run, and which of them need a child process with limits.

The tokenizers library trusts its file: chained replacements multiply a text a thousand times each, a regular expression can
search for hours.  So every part is on a list here, with limits on what it can make of a text.  A text is encoded in this
process only if all parts that it passes take time and memory in proportion to it; encoders that may not do so run in a child
(edgeq.text.foreign_tokenizer).  Decoders run in this process for every token that is drawn, so theirs are the narrowest limits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from edgeq.errors import FormatError
from edgeq.text import split_patterns

MAX_PARTS = 64
"""Normalizers, pre-tokenizers, post-processors and decoders together; published tokenizers have at most about ten."""
MAX_TEXT = 4096
"""Bytes of a pattern, of what replaces it and of a token; published patterns have up to 2,000, tokens up to 500."""
MAX_CONTENT = 16
"""Bytes of what a decoder puts in, and of what a normalizer does in this process; published ones have at most 3."""
MAX_GROWTH = 64
"""How many times longer all normalizers, or all decoders, in a row may make a text."""
MAX_ADDED = 64
"""Token ids that a post-processor adds to a text."""
MAX_WORD = 200
"""Characters of a word that WordPiece searches in this process: its time is their square; published tokenizers have 100."""
MAX_PIECE = 256
"""Bytes of a token of Unigram in this process: it tries all lengths everywhere; SentencePiece's default is 16 characters."""

LINEAR_PATTERNS = frozenset(
    (split_patterns.GPT2, split_patterns.GPT4, split_patterns.QWEN2, split_patterns.TEKKEN, split_patterns.GPT4O)
    + (split_patterns.QWEN3_5, split_patterns.BLOOM, split_patterns.SPACES)
)

_NORMALIZERS = {"NFC": 3, "NFD": 4, "NFKC": 18, "NFKD": 18, "Lowercase": 3, "Strip": 1, "StripAccents": 1, "Nmt": 1}
_NORMALIZERS |= {"BertNormalizer": 6, "ByteLevel": 2}
"""Type -> how many times longer it can make a text (Unicode Standard Annex 15, table of expansion factors)."""
_CHILD_NORMALIZERS = ("Precompiled",)
_PRE_TOKENIZERS = frozenset(
    ("ByteLevel", "Whitespace", "WhitespaceSplit", "Metaspace", "Punctuation", "Digits", "BertPreTokenizer")
    + ("UnicodeScripts", "CharDelimiterSplit", "FixedLength")
)
_DECODERS = ("ByteLevel", "WordPiece", "ByteFallback", "Fuse", "Strip", "Metaspace", "BPEDecoder", "CTC")
_PROCESSORS = ("ByteLevel", "BertProcessing", "RobertaProcessing")
_LISTS = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers", "post_processor": "processors", "decoder": "decoders"}

Part = Mapping[str, Any]


def is_linear(data: Any) -> bool:
    """Whether all texts can be encoded in this process; False: each in a child.  `data`: a tokenizer.json.

    FormatError: a part that is not on the list, or beyond a limit.
    """
    if not isinstance(data, Mapping):
        raise FormatError("a tokenizer that is not a JSON object")
    parts = {where: list(_parts(where, data.get(where))) for where in _LISTS}
    if sum(map(len, parts.values())) > MAX_PARTS:
        raise FormatError(f"a tokenizer of more than {MAX_PARTS} parts")
    for part in parts["post_processor"]:
        _check_processor(part)
    _check_growth("decoders", [_decoder_growth(part) for part in parts["decoder"]])
    growths = [_normalizer_growth(part) for part in parts["normalizer"]]
    linear = None not in growths and _product(growths) <= MAX_GROWTH
    linear &= all([_splits_linearly(part) for part in parts["pre_tokenizer"]])
    return linear & _check_model(data.get("model"), data.get("added_tokens"))


def _parts(where: str, part: Any, depth: int = 0) -> Iterator[Part]:
    """The part, or those of a sequence."""
    if part is None:
        return
    if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
        raise FormatError(f"a {where} of a tokenizer without a type")
    if part["type"] != "Sequence":
        yield part
        return
    items = part.get(_LISTS[where])
    if not isinstance(items, list) or len(items) > MAX_PARTS or depth > 4:
        raise FormatError(f"a {where} of a tokenizer that is no sequence of at most {MAX_PARTS}")
    for item in items:
        yield from _parts(where, item, depth + 1)


def _bytes(part: Part, key: str, most: int = MAX_TEXT) -> int:
    """The length of the text `key` of a part, 0 where there is none."""
    return _length(f"{key} of {part['type']}", part.get(key), most)


def _length(what: str, value: Any, most: int) -> int:
    if value is not None and not isinstance(value, str):
        raise FormatError(f"{what} of a tokenizer is not text")
    length = len((value or "").encode("utf-8", "surrogatepass"))
    if length > most:
        raise FormatError(f"{what} of a tokenizer has {length} bytes; at most {most} are possible")
    return length


def _pattern(part: Part) -> tuple[str, int]:
    """("String" or "Regex", bytes) of the pattern of a part."""
    pattern = part.get("pattern")
    if not isinstance(pattern, Mapping) or len(pattern) != 1 or not set(pattern) <= {"String", "Regex"}:
        raise FormatError(f"the pattern of {part['type']} of a tokenizer is neither a string nor a regular expression")
    kind, text = next(iter(pattern.items()))
    length = _length(f"the pattern of {part['type']}", text, MAX_TEXT)
    if not length:
        raise FormatError(f"the pattern of {part['type']} of a tokenizer is empty")
    return kind, length


def _product(growths: list[float | None]) -> float:
    product = 1.0
    for growth in growths:
        product *= growth or 1
    return product


def _check_growth(what: str, growths: list[float | None]) -> None:
    if _product(growths) > MAX_GROWTH:
        raise FormatError(f"the {what} of a tokenizer make a text more than {MAX_GROWTH} times longer")


def _normalizer_growth(part: Part) -> float | None:
    """How many times longer a normalizer can make a text; None: it is not known."""
    kind = part["type"]
    if kind in _NORMALIZERS:
        return _NORMALIZERS[kind]
    if kind == "Replace":
        of, length = _pattern(part)
        content = _bytes(part, "content")
        if content > MAX_CONTENT or (of == "Regex" and part["pattern"]["Regex"] not in LINEAR_PATTERNS):
            return None
        return max(1.0, content / length) if of == "String" else 1.0 + content
    if kind == "Prepend":
        # Once for each part of the text between control tokens.
        return 1.0 + _bytes(part, "prepend") if _bytes(part, "prepend") <= MAX_CONTENT else None
    if kind in _CHILD_NORMALIZERS:
        return None
    raise FormatError(f"normalizer {kind!r} of a tokenizer is not supported")


def _splits_linearly(part: Part) -> bool:
    kind = part["type"]
    if kind == "Split":
        return _pattern(part)[0] == "String" or part["pattern"]["Regex"] in LINEAR_PATTERNS
    if kind not in _PRE_TOKENIZERS:
        raise FormatError(f"pre-tokenizer {kind!r} of a tokenizer is not supported")
    return True


def _decoder_growth(part: Part) -> float:
    kind = part["type"]
    if kind == "Replace":
        of, length = _pattern(part)
        if of == "Regex":
            raise FormatError("a decoder of a tokenizer that replaces a regular expression is not supported")
        return max(1.0, _bytes(part, "content", MAX_CONTENT) / length)
    if kind not in _DECODERS:
        raise FormatError(f"decoder {kind!r} of a tokenizer is not supported")
    if part.get("stop"):
        # The library counts past the start of a token that is shorter.
        raise FormatError("a decoder of a tokenizer that strips the ends of tokens is not supported")
    for key in ("content", "prefix", "suffix", "replacement", "pad_token", "word_delimiter_token"):
        _bytes(part, key, MAX_CONTENT)
    return 1.0


def _check_processor(part: Part) -> None:
    kind = part["type"]
    if kind != "TemplateProcessing":
        if kind not in _PROCESSORS:
            raise FormatError(f"post-processor {kind!r} of a tokenizer is not supported")
        return
    special, added = part.get("special_tokens"), 0
    for name in ("single", "pair"):
        pieces = part.get(name)
        if not isinstance(pieces, list) or len(pieces) > MAX_ADDED or not isinstance(special, Mapping):
            raise FormatError(f"the post-processor of a tokenizer has no {name!r} of at most {MAX_ADDED} pieces")
        for piece in pieces:
            token = piece.get("SpecialToken") if isinstance(piece, Mapping) else None
            token = special.get(token.get("id")) if isinstance(token, Mapping) and isinstance(token.get("id"), str) else None
            ids = token.get("ids") if isinstance(token, Mapping) else None
            added += len(ids) if isinstance(ids, list) else 0
    if added > MAX_ADDED:
        raise FormatError(f"the post-processor of a tokenizer adds {added} tokens; at most {MAX_ADDED} are possible")


def _check_model(model: Any, added: Any) -> bool:
    """Whether the model's time grows as the text does; FormatError: a token that is too long."""
    if not isinstance(model, Mapping):
        raise FormatError("a tokenizer without a model")
    vocabulary = model.get("vocab")
    tokens = vocabulary if isinstance(vocabulary, (Mapping, list)) else ()
    texts = (token[0] if isinstance(token, list) and token else token for token in tokens)
    longest = max((_length("a token", text, MAX_TEXT) for text in texts), default=0)
    for entry in added if isinstance(added, list) else ():
        _length("an added token", entry.get("content") if isinstance(entry, Mapping) else None, MAX_TEXT)
    word = model.get("max_input_chars_per_word", 0)
    # A prefix that merges lack makes the library panic; a panic is one line only in a child.
    bounded = isinstance(word, int) and word <= MAX_WORD and (isinstance(vocabulary, Mapping) or longest <= MAX_PIECE)
    return bounded and (model.get("type") == "WordPiece" or not model.get("continuing_subword_prefix"))
