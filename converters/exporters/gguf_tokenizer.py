"""The metadata of a GGUF file from which its readers make the tokenizer of a model file.

They hold vocabulary and merges, or scores, and a name for how a text is split.  What they say is read again by the importer of
GGUF files, and its tokenizer must give the same ids for a text of many kinds; else the tokenizer is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

from edgeq.converters.importers.gguf_texts import ENDS_OF_TURN, SAMPLING_KEYS
from edgeq.converters.importers.gguf_tokenizers import SPLITS, tokenizer_json
from edgeq.converters.importers.gguf_vocabulary import (
    BYTE,
    CONTROL,
    NORMAL,
    PREFIX,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    read_vocabulary,
)
from edgeq.errors import CheckpointError, UnsupportedError
from edgeq.format.container import ModelFile
from edgeq.text import split_patterns

Json = Mapping[str, Any]
NO_MERGE = -1e9
"""The score of a token that is never made of others."""
SAMPLE = (
    "The quick brown fox's 12,345.67 jumps; they'LL over\tthe lazy dog.\r\n\n  def f(x):\n        return x ** 2  # twice\n",
    "Größe, naïve Ωmega, привет мир, 你好世界，こんにちは 한국어 नमस्ते 🙂👩‍👩‍👧 e\u0301 \u00a0\u2003x",
    " leading and trailing spaces   ",
    "https://example.org/a_b?c=d&e=1e-3 <|im_start|>user\nhi<end_of_turn> </s> <s> [INST]\u0000\u0007",
)
"""Text that tokenizers split in different ways."""


def tokenizer_keys(file: ModelFile, architecture: str) -> dict[str, Any]:
    """Keys that begin with `tokenizer.` and `general.sampling.`, for a file of this architecture.

    UnsupportedError: a tokenizer that GGUF has no words for, or that comes back as another one.
    """
    blob, generation = file.blob("tokenizer.json"), file.metadata.generation
    if blob is None:
        raise UnsupportedError("the file has no tokenizer")
    found = vocabulary_keys(json.loads(bytes(blob)), generation, file.metadata.config.vocab_size, architecture)
    if (template := file.blob("chat_template")) is not None:
        found["tokenizer.chat_template"] = bytes(template).decode()
    sampling = {f"general.sampling.{name}": generation.get(key) for key, name in SAMPLING_KEYS.items()}
    return found | {key: value for key, value in sampling.items() if value is not None}


def vocabulary_keys(tokenizer: Json, generation: Json, count: int, architecture: str) -> dict[str, Any]:
    """Those of a tokenizer.json alone; `count`: rows of the embedding.  UnsupportedError: as `tokenizer_keys`."""
    model = tokenizer["model"]
    if model["type"] != "BPE":
        raise UnsupportedError(f"tokenizers of the kind {model['type']} are not exported; supported: BPE")
    tokens, kinds = _tokens(tokenizer, generation, count)
    keys: dict[str, Any] = {"tokens": tokens, "token_type": kinds}
    split = _split(tokenizer)
    if split is not None:
        keys |= {"model": "gpt2", "pre": split, "merges": [" ".join(pair) for pair in _merges(model)]}
    else:
        keys |= {"model": "llama", "scores": _scores(tokens, _merges(model)), "add_space_prefix": _prefixed(tokenizer)}
    keys |= _special(tokenizer, generation, {token: i for i, token in enumerate(tokens)})
    found = {f"{PREFIX}{key}": value for key, value in keys.items()}
    _check_comes_back(tokenizer, {"general.architecture": architecture, **found})
    return found


def _prefixed(tokenizer: Json) -> bool:
    """Whether a tokenizer of SentencePiece puts a space before a text."""
    normalizers, splits = _parts(tokenizer["normalizer"], "normalizers"), _parts(tokenizer["pre_tokenizer"], "pretokenizers")
    return any(part["type"] == "Prepend" for part in normalizers) or any(
        part["type"] == "Metaspace" and part.get("prepend_scheme") == "always" for part in splits
    )


def _tokens(tokenizer: Json, generation: Json, count: int) -> tuple[list[str], list[int]]:
    """Tokens by their ids, and their kinds; rows of the embedding beyond the vocabulary have names that no text has."""
    vocabulary: Mapping[str, int] = tokenizer["model"]["vocab"]
    ids = {i: (token, NORMAL) for token, i in vocabulary.items()}
    if tokenizer["model"]["byte_fallback"]:
        ids |= {i: (t, BYTE) for i, (t, _) in ids.items() if len(t) == 6 and t.startswith("<0x") and t.endswith(">")}
    named = generation.get("special_tokens")
    unknown = named.get("unk_token") if isinstance(named, dict) and tokenizer["model"]["unk_token"] else None
    for added in tokenizer["added_tokens"]:
        kind = CONTROL if added["special"] else USER_DEFINED
        ids[added["id"]] = added["content"], UNKNOWN if added["content"] == unknown else kind
    found = [ids.get(i, (f"[PAD{i}]", UNUSED)) for i in range(max(count, max(ids) + 1))]
    return [token for token, _ in found], [kind for _, kind in found]


def _parts(part: Json | None, name: str) -> Sequence[Json]:
    if part is None:
        return ()
    parts: Sequence[Json] = part[name] if part["type"] == "Sequence" else (part,)
    return parts


def _split(tokenizer: Json) -> str | None:
    """The name of how a byte-level tokenizer splits a text; None: it is one of SentencePiece.

    UnsupportedError: in a way that has no name.
    """
    parts = _parts(tokenizer["pre_tokenizer"], "pretokenizers")
    byte_level = next((part for part in parts if part["type"] == "ByteLevel"), None)
    if byte_level is None:
        return None
    patterns = [part["pattern"].get("Regex", "") for part in parts if part["type"] == "Split"]
    pattern = patterns[0] if patterns else split_patterns.GPT2 if byte_level.get("use_regex", True) else ""
    rules = {
        "digits": any(part["type"] == "Digits" for part in parts),
        "whole": bool(tokenizer["model"].get("ignore_merges")),
        "composed": any(part["type"] == "NFC" for part in _parts(tokenizer["normalizer"], "normalizers")),
    }
    for name, split in SPLITS.items():
        if split.pattern == pattern and rules == {"digits": split.digits, "whole": split.whole, "composed": split.composed}:
            return name
    raise UnsupportedError(
        f"the tokenizer splits texts by {pattern!r:.60}, which GGUF has no name for; known: {', '.join(SPLITS)}"
    )


def _merges(model: Json) -> list[tuple[str, str]]:
    return [tuple(pair) if isinstance(pair, list) else tuple(pair.split(" ", 1)) for pair in model["merges"]]


def _scores(tokens: Sequence[str], merges: Sequence[tuple[str, str]]) -> list[float]:
    """The earlier merges make a token, the higher is its score."""
    order = dict.fromkeys(first + second for first, second in merges)
    ranks = {token: -float(rank) for rank, token in enumerate(order)}
    return [ranks.get(token, NO_MERGE) for token in tokens]


def _special(tokenizer: Json, generation: Json, ids: Mapping[str, int]) -> dict[str, Any]:
    """Ids of tokens with a meaning, and what begins and ends a text."""
    named = generation.get("special_tokens")
    literals = named if isinstance(named, dict) else {}
    known = {"unknown": literals.get("unk_token"), "padding": literals.get("pad_token"), "bos": literals.get("bos_token")}
    found: dict[str, Any] = {
        f"{name}_token_id": ids[token] for name, token in known.items() if token is not None and token in ids
    }
    if (begin := generation.get("bos_token_id")) is not None:
        found["bos_token_id"] = begin
    by_id = {i: token for token, i in ids.items()}
    ends = [*(generation.get("eos_token_ids") or ())]
    if ends:
        found["eos_token_id"] = ends[0]
    # Readers know the others by their names.
    unnamed = [i for i in ends[1:] if by_id.get(i) not in ENDS_OF_TURN]
    if len(unnamed) > 1:
        raise UnsupportedError(f"an answer ends with any of the tokens {ends}; GGUF names two")
    if unnamed:
        found["eot_token_id"] = unnamed[0]
    single = (tokenizer.get("post_processor") or {}).get("single", [])
    added = [piece["SpecialToken"]["id"] for piece in single if "SpecialToken" in piece]
    begins = bool(single) and "SpecialToken" in single[0]
    found["add_bos_token"] = begins or bool(generation.get("add_bos"))
    found["add_eos_token"] = bool(single) and "SpecialToken" in single[-1] and len(added) > begins
    return found


def _check_comes_back(tokenizer: Json, keys: Json) -> None:
    """UnsupportedError: a reader of these keys would give other ids."""
    try:
        again = tokenizer_json(keys, read_vocabulary(keys))
    except CheckpointError as error:
        raise UnsupportedError(f"GGUF cannot say what this tokenizer is: {error}") from None
    ours, theirs = (Tokenizer.from_str(json.dumps(each)) for each in (tokenizer, again))
    for text in SAMPLE:
        if ours.encode(text, add_special_tokens=False).ids != theirs.encode(text, add_special_tokens=False).ids:
            raise UnsupportedError(f"GGUF's tokenizer would split {text!r:.60} in another way than this one")
