"""Tokenizers, templates and defaults from the metadata of GGUF files: literal token ids, and what strangers may write."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from transformers import (
    AutoTokenizer,
    CohereTokenizer,
    GPT2Tokenizer,
    GPTNeoXTokenizer,
    Qwen2Tokenizer,
    Qwen3_5Tokenizer,
    RobertaTokenizer,
)

from edgeq.converters.checkpoint.download import HubAccess
from edgeq.converters.importers import gguf_vocabulary, open_source
from edgeq.converters.importers.gguf_texts import write_texts
from edgeq.errors import CheckpointError, InputError
from edgeq.text.tokenizer import Tokenizer

pytestmark = pytest.mark.usefixtures("works_here")

# 0-3 control tokens and padding, 4-13 characters, 14-20 what merges make; Ġ is a space, Ċ a line feed.
BYTES = ["<|begin|>", "<|im_end|>", "<tool>", "<pad>", "a", "b", "1", "2", "3", "Ġ", "Ċ", "Ì", "ģ", "Ã"]
MERGED = ["ab", "12", "123", "Ġab", "ĠĠ", "Ìģ", "123ab"]
BYTE_LEVEL: dict[str, Any] = {
    "general.architecture": "llama",
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": BYTES + MERGED,
    "tokenizer.ggml.token_type": [3, 3, 4, 5, *[1] * (len(BYTES) + len(MERGED) - 4)],
    "tokenizer.ggml.merges": ["a b", "1 2", "12 3", "Ġ ab", "Ġ Ġ", "Ì ģ"],
    "tokenizer.ggml.bos_token_id": 0,
    "tokenizer.ggml.eos_token_id": 1,
}
# "▁a" and "ab" share a letter: the better score is merged first.
PIECES = [
    "<unk>",
    "<s>",
    "</s>",
    *(f"<0x{byte:02X}>" for byte in range(256)),
    "▁",
    "a",
    "b",
    "▁a",
    "ab",
    "▁ab",
    "  ",
    "<|end|>",
]
SENTENCE_PIECE: dict[str, Any] = {
    "general.architecture": "llama",
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": PIECES,
    "tokenizer.ggml.scores": [0.0] * 259 + [-9.0, -8.0, -7.0, -2.0, -1.0, -3.0, 0.0, 0.0],
    "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * 6, 4, 3],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
}
UNIGRAM: dict[str, Any] = {
    "general.architecture": "llama",
    "tokenizer.ggml.model": "t5",
    "tokenizer.ggml.tokens": ["<unk>", "</s>", "▁", "a", "b", "ab", "▁ab", "▁a"],
    "tokenizer.ggml.scores": [0.0, 0.0, -3.0, -3.0, -3.0, -5.5, -20.0, -4.0],
    "tokenizer.ggml.token_type": [2, 3, *[1] * 6],
    "tokenizer.ggml.unknown_token_id": 0,
    "tokenizer.ggml.eos_token_id": 1,
    "tokenizer.ggml.add_eos_token": True,
}
GEMMA4: dict[str, Any] = {
    "general.architecture": "gemma4",
    "tokenizer.ggml.model": "gemma4",
    "tokenizer.ggml.pre": "gemma4",
    "tokenizer.ggml.tokens": [
        "<bos>",
        "<unk>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "a",
        "b",
        "ab",
        "▁a",
        "▁ab",
        "bb",
    ],
    "tokenizer.ggml.token_type": [3, 2, *[6] * 256, *[1] * 7],
    "tokenizer.ggml.merges": ["▁ a", "▁a b", "a b", "b b"],
    "tokenizer.ggml.bos_token_id": 0,
    "tokenizer.ggml.unknown_token_id": 1,
    "tokenizer.ggml.add_bos_token": True,
}
KINDS = {"byte-level": BYTE_LEVEL, "SentencePiece": SENTENCE_PIECE, "Unigram": UNIGRAM}


def changed(metadata: Mapping[str, Any], **values: Any) -> dict[str, Any]:
    """The metadata with keys of the tokenizer changed; None: without the key."""
    merged = {**metadata, **{f"tokenizer.ggml.{key}": value for key, value in values.items()}}
    return {key: value for key, value in merged.items() if value is not None}


def tokenizer(folder: Path, metadata: Mapping[str, Any]) -> Tokenizer:
    write_texts(metadata, folder)
    return Tokenizer((folder / "tokenizer.json").read_bytes(), {})


def generation(folder: Path, metadata: Mapping[str, Any]) -> dict[str, Any]:
    write_texts(metadata, folder)
    defaults: dict[str, Any] = json.loads((folder / "generation_config.json").read_text())
    return defaults


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("gpt-2", "ab 123", [14, 9, 16]),
        ("gpt-2", "123  ab", [16, 9, 17]),
        ("gpt-2", "ab<|im_end|>\n", [14, 1, 10]),
        ("smollm", "ab 123", [14, 9, 6, 7, 8]),
        ("starcoder", "ab 123", [14, 9, 6, 7, 8]),
        ("refact", "123  ab", [6, 7, 8, 9, 17]),
        ("command-r", "ab 123", [14, 9, 6, 7, 8]),
        ("command-r", "a\u0301", [13]),
        ("mpt", "123 ab", [16, 17]),
        ("mpt", "a\u0301", [13]),
        ("qwen2", "123 ab", [6, 7, 8, 17]),
        ("llama-bpe", "1231 ab", [0, 16, 6, 17]),
        ("tekken", "12ab", [0, 6, 7, 14]),
        ("gpt-4o", "1212 ab", [15, 6, 7, 17]),
        ("glm4", "1231 ab", [16, 6, 17]),
        ("chatglm-bpe", "1231 ab", [16, 6, 17]),
        ("exaone4", "123  ab", [16, 9, 17]),
        ("stablelm2", "123 ab", [6, 7, 8, 17]),
        ("lfm2", "1231 ab", [0, 16, 6, 17]),
        ("hunyuan-dense", "1231 ab", [16, 6, 17]),
        ("falcon", "ab 123", [14, 9, 16]),
        ("falcon", "112312", [6, 15, 8, 15]),
        ("gpt-2", "112312", [6, 16, 15]),
        ("roberta-bpe", "123  ab", [16, 9, 17]),
        ("granite-embed-multi-97m", "1212 ab", [15, 6, 7, 17]),
        # U+0301 after an "a" is one character in NFC, whose bytes C3 A1 are not in this vocabulary but for the first.
        ("qwen2", "a\u0301", [13]),
        ("gpt-2", "a\u0301", [4, 19]),
    ],
)
def test_byte_level_texts_are_split_as_the_file_names_it(pre: str, text: str, expected: list[int], tmp_path: Path) -> None:
    assert tokenizer(tmp_path, changed(BYTE_LEVEL, pre=pre)).encode(text) == expected


@pytest.mark.parametrize(
    ("pre", "theirs"),
    [("gpt-2", GPT2Tokenizer), ("mpt", GPTNeoXTokenizer), ("command-r", CohereTokenizer), ("qwen2", Qwen2Tokenizer)]
    + [("qwen35", Qwen3_5Tokenizer), ("roberta-bpe", RobertaTokenizer)],
)
def test_texts_are_split_as_by_the_class_of_transformers(pre: str, theirs: Any, tmp_path: Path) -> None:
    """Its own rules, whatever the vocabulary, on every second character of the first 12,000, and on noise."""

    def pieces(tokenizer: tokenizers.Tokenizer, text: str) -> list[str]:
        normal = tokenizer.normalizer.normalize_str(text) if tokenizer.normalizer else text
        return [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(normal)]

    write_texts(changed(BYTE_LEVEL, pre=pre), tmp_path)
    ours, other = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json")), theirs().backend_tokenizer
    rng = random.Random(3)
    frequent = [ord(each) for each in " 'as19\n\r,é\u0301\u0661"]
    noise = ["".join(chr(rng.choice((*frequent, rng.randrange(1, 0xD800)))) for _ in range(24)) for _ in range(1000)]
    for text in [*noise, *(f"a {chr(c)}{chr(c)}b" for c in range(1, 12_000, 2))]:
        assert pieces(ours, text) == pieces(other, text), text


FALCON_PIECES = {
    "(555) 123-4567, 12345.67": "( 555 ) Ġ 123 - 456 7 , Ġ 123 45 . 67",
    "Don't  stop!! $1": "Don ' t Ġ Ġstop !! Ġ $ 1",
    "x²y\n 12": "x Â ² y Ċ Ġ 12",
}
"""Texts, and what the rules of published Falcons make of them: signs, GPT-2's words, then digits of the bytes."""


def test_a_falcon_puts_three_digits_together(tmp_path: Path) -> None:
    write_texts(changed(BYTE_LEVEL, pre="falcon"), tmp_path)
    split = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json")).pre_tokenizer
    stages = [
        tokenizers.pre_tokenizers.Punctuation("contiguous"),
        tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        tokenizers.pre_tokenizers.Digits(individual_digits=False),
        tokenizers.pre_tokenizers.Split(tokenizers.Regex("[0-9][0-9][0-9]"), "isolated"),
    ]
    published = tokenizers.pre_tokenizers.Sequence(stages)
    for text, pieces in FALCON_PIECES.items():
        assert [piece for piece, _ in split.pre_tokenize_str(text)] == pieces.split(" "), text
    for text in (*FALCON_PIECES, *(f"a {chr(c)}{chr(c)}1" for c in range(1, 12_000, 7))):
        assert split.pre_tokenize_str(text) == published.pre_tokenize_str(text), text


def test_a_bloom_parts_words_at_signs_between_them_and_nothing_else(tmp_path: Path) -> None:
    write_texts(changed(BYTE_LEVEL, pre="bloom"), tmp_path)
    split = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json")).pre_tokenizer
    found = [piece for piece, _ in split.pre_tokenize_str("ab12 c'd, (e|f)!  g-1\u0964\nh")]
    assert found == ["ab12", "Ġc'd", ",Ġ(", "e", "|", "f", ")!Ġ", "Ġg-1", "à¥¤Ċ", "h"]


def test_a_gemma_4_merges_in_the_order_of_the_file(tmp_path: Path) -> None:
    """Spaces are pieces of their own, none is put before a text, and bytes stand for what is no token."""
    tokens = tokenizer(tmp_path, GEMMA4)
    assert tokens.encode("ab ab") == [0, 261, 263] and tokens.encode("abb") == [0, 261, 260]
    assert tokens.encode("aé\n") == [0, 259, 2 + 0xC3, 2 + 0xA9, 2 + 0x0A]
    assert tokens.decode([261, 263, 2 + 0xC3, 2 + 0xA9]) == "ab abé"


def test_pieces_may_be_in_a_file_that_calls_them_byte_level(tmp_path: Path) -> None:
    """Its tokens of bytes are ordinary ones."""
    kinds = [1 if kind == 6 else kind for kind in GEMMA4["tokenizer.ggml.token_type"]]
    named = changed(GEMMA4, model="gpt2", pre="granite-embed-multi-311m", token_type=kinds)
    texts = ("ab ab", "abb", "aé\n\n \n", "<bos>a")
    expected = [tokenizer(tmp_path, GEMMA4).encode(text) for text in texts]
    assert [tokenizer(tmp_path, named).encode(text) for text in texts] == expected


def test_a_whole_word_is_not_built_by_merges_where_the_vocabulary_is_tiktokens(tmp_path: Path) -> None:
    tokens = [*BYTES, *MERGED[:-1], "aab"]
    for pre, expected in (("llama-bpe", [0, 20]), ("granite-embed-multi-97m", [20]), ("gpt-2", [4, 14])):
        assert tokenizer(tmp_path, changed(BYTE_LEVEL, pre=pre, tokens=tokens)).encode("aab") == expected


@pytest.mark.parametrize(
    ("values", "text", "expected"),
    [
        # ▁ab is made of ▁ and ab, as ab has a better score than ▁a.
        ({}, "ab", [1, 264]),
        ({}, "aab", [1, 262, 263]),
        ({}, "é", [1, 259, 3 + 0xC3, 3 + 0xA9]),
        ({}, "ab  ab", [1, 264, 265, 264]),
        ({}, "ab<|end|>ab", [1, 264, 266, 264]),
        ({"add_space_prefix": False}, "ab a", [1, 263, 262]),
        ({"add_bos_token": False, "add_eos_token": True}, "ab", [264, 2]),
    ],
)
def test_sentence_piece_merges_by_score(values: dict[str, Any], text: str, expected: list[int], tmp_path: Path) -> None:
    assert tokenizer(tmp_path, changed(SENTENCE_PIECE, **values)).encode(text) == expected


@pytest.mark.parametrize("spaced", [True, False])
def test_sentence_piece_gives_the_text_back(spaced: bool, tmp_path: Path) -> None:
    text_of = tokenizer(tmp_path, changed(SENTENCE_PIECE, add_space_prefix=spaced))
    for text in ("ab", " aab b", "é\n日本 🙂"):
        assert text_of.decode(text_of.encode(text)) == text


def test_phi3s_control_tokens_take_the_white_space_after_them(tmp_path: Path) -> None:
    phi3 = {**SENTENCE_PIECE, "general.architecture": "phi3"}
    assert tokenizer(tmp_path, phi3).encode("ab<|end|>\n ab") == [1, 264, 266, 264]
    assert tokenizer(tmp_path, SENTENCE_PIECE).encode("ab<|end|>\nab") == [1, 264, 266, 259, 3 + 0x0A, 263]


def test_unigram_takes_the_split_with_the_largest_sum_of_scores(tmp_path: Path) -> None:
    # ▁a b: -7; ▁ ab: -8.5; ▁ a b: -9; ▁ab: -20.
    text_of = tokenizer(tmp_path, UNIGRAM)
    assert text_of.encode("ab") == [7, 4, 1]
    assert text_of.encode("ab bx") == [7, 4, 2, 4, 0, 1]


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_gives_the_same_tokens_of_the_folder(kind: str, tmp_path: Path) -> None:
    text_of = tokenizer(tmp_path, KINDS[kind])
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for text in ("ab", "aab  ab\n12 é", "", "<|im_end|>ab</s> <|end|>a"):
        assert list(theirs(text)["input_ids"]) == text_of.encode(text)


def test_stop_tokens_are_those_that_the_file_names_and_those_known_by_name(tmp_path: Path) -> None:
    assert generation(tmp_path, BYTE_LEVEL) == {"eos_token_id": [1], "bos_token_id": 0}
    tokens = [*BYTES, *MERGED[:-1], "<|eot_id|>"]
    kinds = [*BYTE_LEVEL["tokenizer.ggml.token_type"][:-1], 3]
    named = changed(BYTE_LEVEL, tokens=tokens, token_type=kinds, eos_token_id=2, padding_token_id=3)
    assert generation(tmp_path, named) == {"eos_token_id": [2, 1, 20], "bos_token_id": 0, "pad_token_id": 3}
    # A word that is spelled so and controls nothing ends no text.
    ordinary = changed(named, token_type=[3, 1, *kinds[2:-1], 1])
    assert generation(tmp_path, ordinary)["eos_token_id"] == [2]


def test_a_stop_token_that_the_file_calls_ordinary_is_not_shown(tmp_path: Path) -> None:
    tool = tokenizer(tmp_path, changed(BYTE_LEVEL, eot_token_id=2))
    assert tool.decode(tool.encode("ab<tool>")) == "ab"
    assert tokenizer(tmp_path, BYTE_LEVEL).decode([14, 2]) == "ab<tool>"


def test_sampling_and_the_template_are_those_of_the_file(tmp_path: Path) -> None:
    sampling = {"general.sampling.temp": 0.5, "general.sampling.top_k": 20, "general.sampling.penalty_repeat": 1.1}
    found = generation(tmp_path, {**BYTE_LEVEL, **sampling, "tokenizer.chat_template": "{{ messages }}\r\n"})
    assert found == {"eos_token_id": [1], "bos_token_id": 0, "temperature": 0.5, "top_k": 20, "repetition_penalty": 1.1}
    assert (tmp_path / "chat_template.jinja").read_bytes() == b"{{ messages }}\r\n"
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert (settings["bos_token"], settings["eos_token"]) == ("<|begin|>", "<|im_end|>")


def test_arrays_may_be_numpys(tmp_path: Path) -> None:
    arrays = {
        "scores": np.float32(SENTENCE_PIECE["tokenizer.ggml.scores"]),
        "token_type": np.int32([2, 3, 3, *[6] * 256, *[1] * 6, 4, 3]),
    }
    assert tokenizer(tmp_path, changed(SENTENCE_PIECE, **arrays)).encode("ab") == [1, 264]


SPECIAL = SENTENCE_PIECE["tokenizer.ggml.token_type"]


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        (
            "byte-level",
            {"model": "rwkv"},
            "model is 'rwkv'; supported: gpt2, llama, gemma4, t5, bert; edgeq convert --tokenizer DIR takes the",
        ),
        ("byte-level", {"model": np.arange(2)}, "model is array"),
        ("byte-level", {"model": ["gpt2"]}, "model is .'gpt2'.; supported"),
        ("byte-level", {"pre": "viking"}, "pre is 'viking', .* supported: gpt-2, .* edgeq convert --tokenizer DIR takes the"),
        ("byte-level", {"pre": None}, "pre is None"),
        ("byte-level", {"pre": {}}, "pre is {}"),
        ("byte-level", {"tokens": None}, "tokens is missing"),
        ("byte-level", {"tokens": 7}, "tokens is 7; expected an array"),
        ("byte-level", {"tokens": "text"}, "tokens is 'text'; expected an array"),
        ("byte-level", {"tokens": [*BYTES, *MERGED[:-1], "a"]}, "tokens has 'a' twice, as 4 and 20"),
        ("byte-level", {"tokens": [*BYTES, *MERGED[:-1], b"a"]}, "tokens: number 20 is b'a'; expected UTF-8 text"),
        ("byte-level", {"tokens": [*BYTES, *MERGED[:-1], "\udc80"]}, "tokens: number 20 .* expected UTF-8 text"),
        ("byte-level", {"tokens": [*BYTES, *MERGED[:-1], "x" * 4097]}, "tokens: number 20 has 4097 bytes; at most 4096"),
        ("byte-level", {"token_type": [1]}, "token_type has 1 values for 21 tokens"),
        ("byte-level", {"token_type": [7] * 21}, "token_type has 7; expected 1 to 6"),
        ("byte-level", {"token_type": [1.5] * 21}, "token_type has a value that is not an integer"),
        ("byte-level", {"merges": ["a b", "ab"]}, "merges: number 1, 'ab', does not join two tokens"),
        ("byte-level", {"merges": ["a 1"]}, "merges: number 0, 'a 1', does not join two tokens"),
        ("byte-level", {"merges": [" a"]}, "merges: number 0, ' a', does not join"),
        ("byte-level", {"bos_token_id": 21}, "bos_token_id is 21; the file has 21 tokens"),
        ("byte-level", {"eos_token_id": -1}, "eos_token_id is -1"),
        ("byte-level", {"eot_token_id": True}, "eot_token_id is True"),
        ("byte-level", {"padding_token_id": [3]}, "padding_token_id .*"),
        ("byte-level", {"add_bos_token": 1}, "add_bos_token is 1; expected true or false"),
        ("byte-level", {"add_bos_token": True, "bos_token_id": None}, "add_bos_token is true, but .*bos_token_id is missing"),
        ("SentencePiece", {"scores": None}, "scores is missing"),
        ("SentencePiece", {"scores": [float("nan")] * 267}, "scores: number 0 is nan; expected a finite number"),
        ("SentencePiece", {"scores": np.full(267, np.inf, np.float32)}, "scores: number 0 is inf"),
        ("SentencePiece", {"scores": ["a"] * 267}, "scores: number 0 is 'a'"),
        (
            "SentencePiece",
            {"tokens": [*PIECES[:-1], "x" * 257], "token_type": [*SPECIAL[:-1], 1]},
            "tokens: number 266 has 257 characters; at most 256",
        ),
        ("SentencePiece", {"token_type": [*SPECIAL[:-1], 6]}, "'<|end|>' is said to be a byte"),
        ("Unigram", {"scores": None}, "scores is missing"),
        ("Unigram", {"precompiled_charsmap": [256]}, "precompiled_charsmap has a value that is not a byte"),
        ("Unigram", {"precompiled_charsmap": 5}, "precompiled_charsmap is 5; expected an array"),
    ],
)
def test_what_a_stranger_wrote_is_refused_by_its_key(kind: str, values: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"^tokenizer\.ggml\.{message}"):
        write_texts(changed(KINDS[kind], **values), tmp_path)


@pytest.mark.parametrize("template", [7, "\ud800", "x" * ((1 << 20) + 1)])
def test_a_template_that_is_no_text_is_refused(template: object, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="chat_template is not text of at most 1048576 characters"):
        write_texts({**BYTE_LEVEL, "tokenizer.chat_template": template}, tmp_path)


def test_sampling_that_is_no_number_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="general.sampling.temp is 'hot'; expected a number"):
        write_texts({**BYTE_LEVEL, "general.sampling.temp": "hot"}, tmp_path)


def test_counts_are_capped_before_the_first_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Endless:
        def __len__(self) -> int:
            return 1 << 40

        def __iter__(self) -> object:
            raise AssertionError("looped over")

        def __contains__(self, value: object) -> bool:
            raise AssertionError("searched")

    for key in ("tokens", "merges", "scores", "token_type"):
        with pytest.raises(CheckpointError, match=f"{key} has 1099511627776 values; at most"):
            write_texts(changed(BYTE_LEVEL, **{key: Endless()}), tmp_path)
    monkeypatch.setattr(gguf_vocabulary, "MAX_CHARACTERS", 20)
    with pytest.raises(CheckpointError, match="tokens has more than 20 characters together"):
        write_texts(BYTE_LEVEL, tmp_path)


UNKNOWN_SPLIT = changed(BYTE_LEVEL, pre="of-tomorrow")


def test_a_folder_gives_the_tokenizer_of_a_file_whose_own_is_not_known(tmp_path: Path) -> None:
    given, made = tmp_path / "given", tmp_path / "made"
    for folder in (given, made):
        folder.mkdir()
    with pytest.raises(CheckpointError, match=r"pre is 'of-tomorrow'.*edgeq convert --tokenizer DIR"):
        write_texts(UNKNOWN_SPLIT, made)
    write_texts(BYTE_LEVEL, given)
    write_texts(UNKNOWN_SPLIT, made, given)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert json.loads((made / name).read_text()) == json.loads((given / name).read_text()), name
    # What the file says of the ends of a text holds.
    write_texts(changed(UNKNOWN_SPLIT, add_bos_token=True, add_eos_token=True), made, given)
    found = Tokenizer((made / "tokenizer.json").read_bytes(), {})
    assert found.encode("ab 123") == [0, *tokenizer(given, BYTE_LEVEL).encode("ab 123"), 1]


def test_a_folder_with_another_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json; --tokenizer takes the folder"):
        write_texts(UNKNOWN_SPLIT, tmp_path, tmp_path)
    write_texts(BYTE_LEVEL, tmp_path)
    swapped = [*BYTES[:4], "b", "a", *BYTES[6:], *MERGED]
    with pytest.raises(CheckpointError, match="token 4 is 'a', in the GGUF file 'b': they do not belong together"):
        write_texts(changed(UNKNOWN_SPLIT, tokens=swapped), tmp_path, tmp_path)
    longer, kinds = [*BYTES, *MERGED, "more"], [*BYTE_LEVEL["tokenizer.ggml.token_type"], 1]
    with pytest.raises(CheckpointError, match="token 21 is None, in the GGUF file 'more'"):
        write_texts(changed(UNKNOWN_SPLIT, tokens=longer, token_type=kinds), tmp_path, tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": 5}')
    with pytest.raises(CheckpointError, match="the tokenizers library cannot load it"):
        write_texts(UNKNOWN_SPLIT, tmp_path, tmp_path)
    with pytest.raises(InputError, match="--tokenizer goes with a GGUF file"):
        open_source(str(tmp_path), HubAccess(), tmp_path)
