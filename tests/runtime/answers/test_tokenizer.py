"""Text that streams: complete UTF-8, stop strings across tokens, the same as all at once."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer as ForeignTokenizer
from tokenizers import decoders, models, normalizers

from edgeq.errors import FormatError, InputError
from edgeq.runtime.answers.tokenizer import StopStrings, TextStream
from edgeq.text.tokenizer import Tokenizer

TOKENIZER = (Path(__file__).parent.parent.parent.parent / "models" / "tiny-llama" / "tokenizer.json").read_text(
    encoding="utf-8"
)
GENERATION: dict[str, object] = {
    "bos_token_id": 0,
    "eos_token_ids": [1],
    "add_bos": False,
    "special_tokens": {"bos_token": "<|begin|>", "eos_token": "<|end|>", "unk_token": None},
}
TEXTS = (
    "def f(x):\n    return x  # plain\n",
    "naïve café 日本語 🙂🙃👩‍👩‍👧 end",
    "🙂" * 40,
    " leading and trailing ",
    "a\ufffdb is a real replacement character, \ufffd",
)


@pytest.fixture(scope="module")
def text() -> Tokenizer:
    return Tokenizer(TOKENIZER, GENERATION)


@pytest.fixture(scope="module")
def sentencepiece() -> Tokenizer:
    """As in Llama 2: spaces are U+2581, characters out of the vocabulary are bytes, the first space is not part of the text."""
    words = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{b:02X}>" for b in range(256)),
        "▁",
        *"abcdefghijklmnopqrstuvwxyz",
        "▁the",
        "▁d",
        "ef",
    ]
    tokenizer = ForeignTokenizer(models.Unigram([(w, -float(i)) for i, w in enumerate(words)], unk_id=0, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(tokenizer.to_str(), {"eos_token_ids": [2]})


def streamed(text: Tokenizer, tokens: list[int]) -> list[str]:
    stream = TextStream(text)
    return [stream.push(t) for t in tokens]


@pytest.mark.parametrize("sample", TEXTS[:4])
def test_the_pieces_are_the_text(sample: str, text: Tokenizer) -> None:
    tokens = text.encode(sample)
    pieces = streamed(text, tokens)
    assert "".join(pieces) == text.decode(tokens) == sample
    assert len(pieces) > 5 and not any("\ufffd" in piece for piece in pieces)


def test_an_emoji_spread_over_tokens_comes_whole(text: Tokenizer) -> None:
    tokens = text.encode("🙂")
    assert len(tokens) > 1
    assert streamed(text, tokens) == [""] * (len(tokens) - 1) + ["🙂"]


def test_an_unfinished_character_is_never_shown(text: Tokenizer) -> None:
    tokens = text.encode("ok 🙂")
    assert "".join(streamed(text, tokens[:-1])) == "ok "


def test_a_real_replacement_character_comes_with_what_follows(text: Tokenizer) -> None:
    assert "".join(streamed(text, text.encode("a\ufffdb"))) == "a\ufffdb"


def test_bytes_that_are_no_utf8_come_as_all_at_once(text: Tokenizer) -> None:
    good, bad = text.encode("abc"), text.encode("é")[:1]
    tokens = [*good, *bad, *good, *bad, *bad, *bad, *bad, *bad, *good]
    assert "\ufffd" in text.decode(tokens)
    assert "".join(streamed(text, tokens)) == text.decode(tokens)


def test_random_tokens_stream_as_all_at_once(text: Tokenizer) -> None:
    rng = random.Random(0)
    for _ in range(40):
        tokens = [rng.randrange(2048) for _ in range(60)]
        whole = text.decode(tokens)
        got = "".join(streamed(text, tokens))
        assert whole.startswith(got) and set(whole[len(got) :]) <= {"\ufffd"}


@pytest.mark.parametrize("sample", ("def the abc the the end", "the 日本 the 🙂🙂🙂🙂🙂🙂🙂🙂🙂 abc", "abc"))
def test_spaces_and_byte_tokens_of_sentencepiece_stream_as_all_at_once(sample: str, sentencepiece: Tokenizer) -> None:
    tokens = sentencepiece.encode(sample) * 3
    pieces = streamed(sentencepiece, tokens)
    assert sample in "".join(pieces)
    assert "".join(pieces) == sentencepiece.decode(tokens)


def test_control_tokens_have_no_text(text: Tokenizer) -> None:
    assert "".join(streamed(text, [0, *text.encode("abc"), 1])) == "abc"


@pytest.mark.parametrize("kind", ("words", "garbage", "byte tokens"))
def test_a_long_text_costs_no_more_per_token(kind: str, text: Tokenizer, sentencepiece: Tokenizer) -> None:
    used = sentencepiece if kind == "byte tokens" else text
    tokens = {
        "words": text.encode("word " * 300),
        "garbage": text.encode("é")[:1] * 300,
        "byte tokens": sentencepiece.encode("日本🙂" * 40),
    }[kind]
    stream = TextStream(used)
    pieces = []
    for token in tokens:
        pieces.append(stream.push(token))
        assert len(stream._tokens) <= TextStream.WINDOW + TextStream.PATIENCE
    assert used.decode(tokens).startswith("".join(pieces)) and len("".join(pieces)) > 100


def test_bos_is_put_before_a_prompt_only_where_the_file_says_so(text: Tokenizer) -> None:
    assert Tokenizer(TOKENIZER, {**GENERATION, "add_bos": True}).encode("abc") == [0, *text.encode("abc")]
    assert text.eos == {1}


def test_a_spelled_control_token_is_one_in_a_prompt_and_none_in_plain_text(text: Tokenizer) -> None:
    assert text.encode("<|end|>") == [1]
    assert text.encode_plain("<|end|>") != [1] and text.decode(text.encode_plain("<|end|>")) == "<|end|>"


def test_plain_text_is_no_control_token_even_if_the_vocabulary_has_it_as_a_word(sentencepiece: Tokenizer) -> None:
    data = json.loads(TOKENIZER)
    vocabulary = [[w, -float(i)] for i, w in enumerate(["<unk>", "<s>", "</s>", "<", "/", "s", ">"])]
    data["model"] = {"type": "Unigram", "unk_id": 0, "vocab": vocabulary, "byte_fallback": False}
    data["pre_tokenizer"] = data["decoder"] = data["post_processor"] = None
    data["added_tokens"] = [{**data["added_tokens"][0], "id": i, "content": w} for i, w in ((1, "<s>"), (2, "</s>"))]
    unigram = Tokenizer(json.dumps(data), {})
    assert unigram.encode_part("</s>") == [2]
    assert unigram.encode_plain("</s>") == [3, 4, 5, 6]


@pytest.mark.parametrize(
    "generation",
    (
        {"eos_token_ids": "1"},
        {"eos_token_ids": [-1]},
        {"bos_token_id": "x"},
        {"special_tokens": [1]},
        {"special_tokens": {"a": 1}},
    ),
)
def test_generation_settings_of_the_wrong_type_are_refused(generation: dict[str, object]) -> None:
    with pytest.raises(FormatError, match="generation"):
        Tokenizer(TOKENIZER, generation)


def test_a_broken_tokenizer_is_refused() -> None:
    with pytest.raises(FormatError, match="tokenizer does not work"):
        Tokenizer('{"version": "1.0"}', {})


def test_a_tokenizer_that_fails_while_encoding_is_refused() -> None:
    data = json.loads(TOKENIZER)
    data.update(pre_tokenizer=None, model={"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "?"})
    with pytest.raises(FormatError, match="tokenizer does not work"):
        Tokenizer(json.dumps(data), {}).encode("not a word of it")


def test_one_character_of_a_vocabulary_that_spells_a_control_token_in_a_child() -> None:
    """The way of `encode_plain` for such a vocabulary, where every text is encoded in a child."""
    data = json.loads(TOKENIZER)
    data["normalizer"] = {"type": "Replace", "pattern": {"Regex": "q+"}, "content": "q"}
    assert Tokenizer(json.dumps(data), {}).encode_plain("<|end|>") == Tokenizer(TOKENIZER, {}).encode_plain("<|end|>")


def test_text_that_is_not_utf8_is_refused(text: Tokenizer) -> None:
    with pytest.raises(InputError, match="UTF-8"):
        text.encode("\ud800")


def through(stops: list[str], pieces: list[str]) -> tuple[str, bool]:
    matcher = StopStrings(stops)
    out = "".join(matcher.push(p) for p in pieces)
    return out + matcher.finish(), matcher.ended


def test_a_stop_string_ends_the_text_however_it_is_cut() -> None:
    whole = "one two END three"
    rng = random.Random(1)
    for _ in range(100):
        cuts = sorted(rng.sample(range(1, len(whole)), 5))
        pieces = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, None], strict=True)]
        assert through(["END"], pieces) == ("one two ", True)
        assert through(["three.", "ENDS"], pieces) == (whole, False)
        assert through(["two END three", "E"], pieces) == ("one two ", True)


def test_no_part_of_a_stop_string_is_given_out_early() -> None:
    matcher = StopStrings(["\n\nUser:"])
    assert matcher.push("hi\n") == "hi"
    assert matcher.push("\nUs") == ""
    assert matcher.push("e it\n") == "\n\nUse it"
    assert matcher.push("\nUser: x") == "" and matcher.ended
    assert matcher.push("more") == matcher.finish() == ""


@pytest.mark.parametrize("stops", ([""], ["x" * 257], ["x"] * 17, "END"))
def test_bad_stop_strings_are_refused(stops: list[str]) -> None:
    with pytest.raises(InputError, match="stop"):
        StopStrings(stops)
