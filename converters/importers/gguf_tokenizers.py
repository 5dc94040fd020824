"""A tokenizer.json, as the tokenizers library reads it, from a vocabulary of a GGUF file.

The file names a kind of tokenizer; the rules of each are those of the checkpoints that such files are made of:

gpt2    byte-level BPE; `tokenizer.ggml.pre` names how a text is split before, which the file does not hold
llama   SentencePiece's BPE: the pair whose joined token has the best score is merged first; bytes where nothing else fits
gemma4  the same with the order of merges in the file, and no space before a text
t5      SentencePiece's Unigram (Kudo 2018): the split of a text with the largest sum of scores
bert    WordPiece: the longest token that a word begins with, and so on; in lower case unless the vocabulary has capital letters
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from edgeq.converters.importers.gguf_vocabulary import (
    BYTE,
    CONTINUES,
    CONTROL,
    MAX_MERGES,
    NORMAL,
    PREFIX,
    SPACE,
    UNKNOWN,
    USER_DEFINED,
    WORD_PIECE,
    GgufVocabulary,
    array,
    flag,
    of_word_pieces,
)
from edgeq.errors import CheckpointError
from edgeq.text import split_patterns

OTHER_SOURCE = "edgeq convert --tokenizer DIR takes the tokenizer.json of the original checkpoint's folder in its place"
CASED = 0.01
"""The share of tokens with capital letters from which on a vocabulary is one of texts in both cases."""
MAX_WORD = 100
"""Characters of a word of WordPiece; a longer one is unknown."""
MAX_PIECE = 256
"""Characters of a token of SentencePiece, whose ways to be cut in two are tried; its default for training is 16."""
MAX_CHARSMAP = 4 << 20
"""Bytes of a table of character replacements; that of multilingual models has 237,539."""

Json = dict[str, Any]


@dataclass(frozen=True)
class Split:
    """How a byte-level tokenizer splits a text.

    first     patterns by which it is split before, one after another
    digits    every digit stands alone
    threes    signs stand apart before, and after it digits do, at most three together (Falcon).  Those that stand for a byte
              are digits too: the checkpoints' tokenizers look at bytes, llama.cpp at the text
    whole     a part that is a token is not built by merges: vocabularies that were made for tiktoken
    composed  the text is brought into the normal form NFC
    add_bos   whether a text begins with bos where the file does not say so
    """

    pattern: str
    first: tuple[str, ...] = ()
    digits: bool = False
    threes: bool = False
    whole: bool = False
    composed: bool = False
    add_bos: bool = False


_LLAMA3 = Split(split_patterns.GPT4, whole=True, add_bos=True)
_GPT2, _GPT4 = Split(split_patterns.GPT2), Split(split_patterns.GPT4)
_DIGITS = Split(split_patterns.GPT2, digits=True)
_DEEPSEEK3 = Split(split_patterns.DEEPSEEK3, first=(split_patterns.DEEPSEEK3_DIGITS, split_patterns.DEEPSEEK3_CHINESE))
SPLITS = {
    "gpt-2": _GPT2,
    "phi-2": _GPT2,
    "exaone4": _GPT2,
    "roberta-bpe": _GPT2,
    "falcon": Split(split_patterns.GPT2, threes=True),
    "mpt": Split(split_patterns.GPT2, composed=True),
    "modern-bert": Split(split_patterns.GPT2, composed=True),
    "bloom": Split(split_patterns.BLOOM),
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "command-r": Split(split_patterns.GPT2, digits=True, composed=True),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "lfm2": _LLAMA3,
    "falcon3": _LLAMA3,
    "falcon-h1": _LLAMA3,
    "pixtral": _LLAMA3,
    "smaug-bpe": _GPT4,
    "dbrx": _GPT4,
    "glm4": _GPT4,
    "chatglm-bpe": _GPT4,
    "qwen2": Split(split_patterns.QWEN2, composed=True),
    "qwen35": Split(split_patterns.QWEN3_5, composed=True),
    "deepseek-r1-qwen": Split(split_patterns.QWEN2),
    "stablelm2": Split(split_patterns.QWEN2),
    "deepseek-v3": _DEEPSEEK3,
    "hunyuan-dense": _DEEPSEEK3,
    "tekken": Split(split_patterns.TEKKEN, whole=True, add_bos=True),
    "gpt-4o": Split(split_patterns.GPT4O),
    "llama4": Split(split_patterns.GPT4O),
    "granite-embed-multi-97m": Split(split_patterns.GPT4O, whole=True),
}
"""Name in `tokenizer.ggml.pre` -> how the text is split."""
OF_PIECES = ("granite-embed-multi-311m",)
"""Names of tokenizers that split nothing before: Gemma's, of characters, in files that call them byte-level all the same."""
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")


def tokenizer_json(metadata: Mapping[str, Any], vocabulary: GgufVocabulary) -> Json:
    """The tokenizer of these metadata.

    CheckpointError: of a kind, or with a way to split texts, that is not supported, or parts that do not fit together.
    """
    kind = metadata.get(f"{PREFIX}model")
    if not isinstance(kind, str) or kind not in KINDS:
        raise CheckpointError(f"{PREFIX}model is {kind!r:.80}; supported: {', '.join(KINDS)}; {OTHER_SOURCE}")
    parts = {"normalizer": None, "pre_tokenizer": None, "decoder": None, **KINDS[kind](metadata, vocabulary)}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(metadata, vocabulary),
        "post_processor": post_processor(metadata, vocabulary, parts.pop("add_bos")),
        **parts,
    }


def _byte_level(metadata: Mapping[str, Any], vocabulary: GgufVocabulary) -> Json:
    name = metadata.get(f"{PREFIX}pre")
    if not isinstance(name, str) or name not in (*SPLITS, *OF_PIECES):
        supported = ", ".join((*SPLITS, *OF_PIECES))
        raise CheckpointError(
            f"{PREFIX}pre is {name!r:.80}, a way to split texts that is not known here; supported: {supported}; {OTHER_SOURCE}"
        )
    if name in OF_PIECES:
        # llama.cpp's converter calls tokens of bytes ordinary ones there.
        kinds = [
            BYTE if _BYTE.fullmatch(token) else kind for token, kind in zip(vocabulary.tokens, vocabulary.kinds, strict=True)
        ]
        return _of_pieces(replace(vocabulary, kinds=kinds), vocabulary.merges, spaced=False) | {"add_bos": False}
    split = SPLITS[name]
    splits: list[Json] = [{"type": "Digits", "individual_digits": True}] if split.digits else []
    splits += [{"type": "Punctuation", "behavior": "Contiguous"}] if split.threes else []
    splits += map(_isolated, (*split.first, split.pattern))
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    threes = [{"type": "Digits", "individual_digits": False}, _isolated(split_patterns.THREE_DIGITS)] if split.threes else []
    return {
        "normalizer": {"type": "NFC"} if split.composed else None,
        "pre_tokenizer": _sequence("pretokenizers", [*splits, byte_level, *threes]),
        "decoder": byte_level,
        "model": _bpe(vocabulary, vocabulary.merges, ignore_merges=split.whole),
        "add_bos": split.add_bos,
    }


def _isolated(pattern: str) -> Json:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _sentence_piece_bpe(metadata: Mapping[str, Any], vocabulary: GgufVocabulary) -> Json:
    return _of_pieces(vocabulary, _merges_by_score(vocabulary), flag(metadata, "add_space_prefix", True))


def _gemma4(metadata: Mapping[str, Any], vocabulary: GgufVocabulary) -> Json:
    return _of_pieces(vocabulary, vocabulary.merges, flag(metadata, "add_space_prefix", False))


def _of_pieces(vocabulary: GgufVocabulary, merges: Any, spaced: bool) -> Json:
    """A BPE over characters, spaces made visible;  spaced: a text gets one before it."""
    prefix = [{"type": "Prepend", "prepend": SPACE}] if spaced else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if spaced else []
    show = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    restore = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    return {
        "normalizer": _sequence("normalizers", [*prefix, show]),
        "decoder": _sequence("decoders", [restore, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]),
        "model": _bpe(vocabulary, merges, unknown=vocabulary.literal("unknown")),
        "add_bos": True,
    }


def _unigram(metadata: Mapping[str, Any], vocabulary: GgufVocabulary) -> Json:
    _check_scores(vocabulary)
    spaced = flag(metadata, "add_space_prefix", True)
    charsmap = array(metadata, f"{PREFIX}precompiled_charsmap", MAX_CHARSMAP)
    if any(type(value) is not int or not -128 <= value < 256 for value in charsmap):
        raise CheckpointError(f"{PREFIX}precompiled_charsmap has a value that is not a byte")
    normalizers: list[Json] = []
    if charsmap:
        packed = base64.b64encode(bytes(value & 255 for value in charsmap)).decode()
        normalizers.append({"type": "Precompiled", "precompiled_charsmap": packed})
    if flag(metadata, "remove_extra_whitespaces", False):
        normalizers.append({"type": "Strip", "strip_left": True, "strip_right": True})
        normalizers.append({"type": "Replace", "pattern": {"Regex": split_patterns.SPACES}, "content": " "})
    space = {
        "type": "Metaspace",
        "replacement": SPACE,
        "prepend_scheme": "always" if spaced else "never",
        "split": True,
    }
    return {
        "normalizer": _sequence("normalizers", normalizers) if normalizers else None,
        "pre_tokenizer": space,
        "decoder": space,
        "model": {
            "type": "Unigram",
            "unk_id": vocabulary.ids.get("unknown"),
            "vocab": [list(pair) for pair in zip(vocabulary.tokens, vocabulary.scores, strict=True)],
            "byte_fallback": BYTE in vocabulary.kinds,
        },
        "add_bos": False,
    }


def _word_pieces(metadata: Mapping[str, Any], vocabulary: GgufVocabulary) -> Json:
    ordinary = [token for token, kind in zip(vocabulary.tokens, vocabulary.kinds, strict=True) if kind == NORMAL]
    cased = sum(token != token.lower() for token in ordinary) > CASED * len(ordinary)
    unknown, _ = _named(vocabulary, "unknown", "unknown", "[UNK]")
    return {
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": None,
            "lowercase": not cased,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "decoder": {"type": "WordPiece", "prefix": CONTINUES, "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": unknown,
            "continuing_subword_prefix": CONTINUES,
            "max_input_chars_per_word": MAX_WORD,
            "vocab": {token: i for i, token in enumerate(vocabulary.tokens)},
        },
        "add_bos": True,
    }


KINDS: Mapping[str, Callable[[Mapping[str, Any], GgufVocabulary], Json]] = {
    "gpt2": _byte_level,
    "llama": _sentence_piece_bpe,
    "gemma4": _gemma4,
    "t5": _unigram,
    WORD_PIECE: _word_pieces,
}


def _sequence(key: str, parts: list[Json]) -> Json:
    return parts[0] if len(parts) == 1 else {"type": "Sequence", key: parts}


def _bpe(vocabulary: GgufVocabulary, merges: Any, unknown: str | None = None, ignore_merges: bool = False) -> Json:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": unknown,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": unknown is not None,
        "byte_fallback": BYTE in vocabulary.kinds,
        "ignore_merges": ignore_merges,
        "vocab": {token: i for i, token in enumerate(vocabulary.tokens)},
        "merges": [list(pair) for pair in merges],
    }


def _merges_by_score(vocabulary: GgufVocabulary) -> list[tuple[str, str]]:
    """The pairs that make a token each, of the best score first, and of one token the one with the longest beginning.

    Control tokens and bytes are never made of text.  What a user defined is matched before anything is merged, so it is first.
    """
    _check_scores(vocabulary)
    made = {
        token: i
        for i, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.kinds, strict=True))
        if kind not in (CONTROL, UNKNOWN, BYTE)
    }
    order = [
        (vocabulary.kinds[i] != USER_DEFINED, 0.0 if vocabulary.kinds[i] == USER_DEFINED else -vocabulary.scores[i], i)
        for i in made.values()
    ]
    merges = list[tuple[str, str]]()
    for _, _, i in sorted(order):
        token = vocabulary.tokens[i]
        if len(token) > MAX_PIECE:
            raise CheckpointError(f"{PREFIX}tokens: number {i} has {len(token)} characters; at most {MAX_PIECE} are possible")
        for cut in range(len(token) - 1, 0, -1):
            if token[:cut] in made and token[cut:] in made:
                merges.append((token[:cut], token[cut:]))
        if len(merges) > MAX_MERGES:
            raise CheckpointError(f"{PREFIX}tokens can be made of each other in more than {MAX_MERGES} ways")
    return merges


def _check_scores(vocabulary: GgufVocabulary) -> None:
    if not vocabulary.scores:
        raise CheckpointError(f"{PREFIX}scores is missing: SentencePiece needs the score of each token")
    for token, kind in zip(vocabulary.tokens, vocabulary.kinds, strict=True):
        if kind == BYTE and not _BYTE.fullmatch(token):
            raise CheckpointError(f"{PREFIX}tokens: {token[:80]!r} is said to be a byte; expected <0x00> to <0xFF>")


def _added_tokens(metadata: Mapping[str, Any], vocabulary: GgufVocabulary) -> list[Json]:
    """Tokens that are found in a text before anything else, those that control something marked as special."""
    # Phi-3's control tokens take the white space after them; its GGUF files do not say so.
    takes = metadata.get("general.architecture") == "phi3" and metadata.get(f"{PREFIX}model") == "llama"
    added = list[Json]()
    for i, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.kinds, strict=True)):
        if kind in (CONTROL, UNKNOWN, USER_DEFINED) and token:
            entry = {"id": i, "content": token, "single_word": False, "lstrip": False, "normalized": False}
            rstrip = takes and token not in ("<unk>", "<s>", "<|endoftext|>")
            added.append({**entry, "rstrip": rstrip, "special": kind != USER_DEFINED})
    return added


def post_processor(metadata: Mapping[str, Any], vocabulary: GgufVocabulary, add_bos: bool) -> Json | None:
    """What puts bos before a text and eos after it, and what lies between two texts.

    add_bos   whether there is bos where the metadata do not say it
    """
    if of_word_pieces(metadata):
        return _processor(_named(vocabulary, "cls", "bos", "[CLS]"), _named(vocabulary, "seperator", "eos", "[SEP]"))
    ends = {}
    for name, absent in (("bos", add_bos), ("eos", False)):
        if flag(metadata, f"add_{name}_token", absent):
            if name not in vocabulary.ids:
                raise CheckpointError(f"{PREFIX}add_{name}_token is true, but {PREFIX}{name}_token_id is missing")
            ends[name] = vocabulary.ids[name]
    if not ends:
        return None
    kind = metadata.get("general.architecture")
    separated = flag(metadata, "add_sep_token", kind == "bert") and {"bos", "eos"} <= ends.keys()
    special = {vocabulary.tokens[i]: i for i in ends.values()}
    first, last = ([_special(vocabulary.tokens[ends[name]])] if name in ends else [] for name in ("bos", "eos"))
    middle = first
    if kind == "modern-bert":
        # Files ask for a separator here, which the tokenizer of the checkpoints does not put after the end of the first text.
        middle = []
    elif separated:
        separator = vocabulary.ids.get("seperator", ends["eos"])
        special[vocabulary.tokens[separator]] = separator
        middle = [_special(vocabulary.tokens[separator])]
    return _template(special, [*first, _text("A"), *last], [*middle, _text("B"), *last])


def _named(vocabulary: GgufVocabulary, name: str, also: str, usual: str) -> tuple[str, int]:
    """A token of BERT and its id, by either key or as all published vocabularies have it."""
    found = vocabulary.ids.get(name, vocabulary.ids.get(also))
    if found is None and usual not in vocabulary.tokens:
        raise CheckpointError(f"{PREFIX}{name}_token_id is missing, and {PREFIX}tokens has no {usual}")
    found = vocabulary.tokens.index(usual) if found is None else found
    return vocabulary.tokens[found], found


def _processor(first: tuple[str, int], last: tuple[str, int]) -> Json:
    """BERT's: [CLS] text [SEP], and of a pair text [SEP] behind it, of another segment."""
    end, again = _special(last[0]), _special(last[0], 1)
    return _template(dict((first, last)), [_special(first[0]), _text("A"), end], [_text("B", 1), again])


def _special(token: str, segment: int = 0) -> Json:
    return {"SpecialToken": {"id": token, "type_id": segment}}


def _text(which: str, segment: int = 0) -> Json:
    return {"Sequence": {"id": which, "type_id": segment}}


def _template(special: Mapping[str, int], single: list[Json], second: list[Json]) -> Json:
    """`second`: what a pair has behind a single text."""
    tokens = {token: {"id": token, "ids": [i], "tokens": [token]} for token, i in special.items()}
    return {"type": "TemplateProcessing", "single": single, "pair": [*single, *second], "special_tokens": tokens}
