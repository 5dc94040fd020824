"""Tokenizers from strangers: every part has a limit, none ends the process, and what was accepted is not checked again."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgeq.errors import FormatError, InputError
from edgeq.system.confinement import ConfinementLimits
from edgeq.text import foreign_tokenizer, tokenizer_rules
from edgeq.text.foreign_tokenizer import MAX_TOKENIZER, SafeTokenizer, load
from edgeq.text.tokenizer_rules import LINEAR_PATTERNS, MAX_ADDED, MAX_CONTENT, MAX_PARTS, MAX_TEXT, is_linear
from tests.checkpoints.encoders import write_word_pieces

ROOT = Path(__file__).parent.parent.parent
PLAIN: dict[str, Any] = json.loads((ROOT / "models" / "tiny-llama" / "tokenizer.json").read_text(encoding="utf-8"))
PROMPT = "a" * 36 + " " + "x" * 33


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder in which nothing was accepted yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "edgeq" / "tokenizers"


def changed(**parts: Any) -> bytes:
    return json.dumps({**PLAIN, **parts}).encode()


def replace(pattern: str, content: str, kind: str = "String") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def sequence(where: str, *parts: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", {"normalizer": "normalizers", "decoder": "decoders"}[where]: list(parts)}


def split(regex: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


def template(tokens: int) -> dict[str, Any]:
    own: dict[str, Any] = {"Sequence": {"id": "A", "type_id": 0}}
    single = [{"SpecialToken": {"id": "s", "type_id": 0}}, own]
    special = {"s": {"id": "s", "ids": [0] * tokens, "tokens": ["x"] * tokens}}
    return {"type": "TemplateProcessing", "single": single, "pair": [own, own], "special_tokens": special}


def charsmap(data: bytes) -> dict[str, Any]:
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(data).decode()}


def added(content: str) -> list[dict[str, Any]]:
    return [*PLAIN["added_tokens"], {**PLAIN["added_tokens"][0], "id": 3000, "content": content}]


def encoded(data: bytes) -> list[int]:
    return load(data).encode(PROMPT, add_special_tokens=True)


HOSTILE = {
    "replacements that multiply": changed(normalizer=sequence("normalizer", *[replace("a", "a" * 1000)] * 5)),
    "text that is put before, a hundred times": changed(
        normalizer=sequence("normalizer", *[{"type": "Prepend", "prepend": "a" * MAX_TEXT}] * 60)
    ),
    "a table of eight gigabytes": changed(normalizer=charsmap(b"\xff" * 64)),
    "a table that is cut": changed(normalizer=charsmap(b"\4\0\0\0\xff\xff\xff\xff")),
    "a search that does not end": changed(pre_tokenizer=split("(x+x+)+y")),
    "a pattern that is too long": changed(pre_tokenizer=split("(" * 20000 + ")" * 20000)),
    "decoders that multiply": changed(decoder=sequence("decoder", *[replace("a", "a" * 16)] * 5)),
    "a decoder that searches": changed(decoder=replace("(a*)*b", "x", "Regex")),
    "a decoder that strips": changed(decoder={"type": "Strip", "content": "a", "start": 10**9, "stop": 10**9}),
    "a prefix that the merges lack": changed(model={**PLAIN["model"], "continuing_subword_prefix": "x" * 1000}),
    "pieces of no characters": changed(pre_tokenizer={"type": "FixedLength", "length": 0}),
    "a part of another library": changed(pre_tokenizer={"type": "Magic"}),
    "sequences in sequences": b'{"normalizer":' + b'{"type":"Sequence","normalizers":[' * 500 + b"]}" * 500 + b"}",
    "brackets": b"[" * 1_000_000,
    "bytes": b"\xff\xfe{}",
    "nothing": b"",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_tokenizer_is_one_error(
    name: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    allowed, confine = list[int](), foreign_tokenizer.confined

    def confined(work: Callable[[], str], limits: ConfinementLimits) -> str:
        allowed.append(limits.seconds)
        return confine(work, limits)

    monkeypatch.setattr(foreign_tokenizer, "confined", confined)
    with pytest.raises(FormatError, match="^the file's tokenizer (does not work: .*|makes .*); convert the checkpoint again$"):
        encoded(HOSTILE[name])
    # The system ends a child that has had its processor time: it is judged, and if it passed, it encodes.
    assert 1 <= len(allowed) <= 2 and max(allowed) <= 6
    assert capfd.readouterr() == ("", ""), "a panic prints nothing but the error"


@pytest.mark.usefixtures("works_here")
@pytest.mark.parametrize(
    ("within", "beyond"),
    (
        (changed(normalizer=replace("a" * MAX_TEXT, "b")), changed(normalizer=replace("a" * (MAX_TEXT + 1), "b"))),
        (changed(added_tokens=added("a" * MAX_TEXT)), changed(added_tokens=added("a" * (MAX_TEXT + 1)))),
        (changed(post_processor=template(MAX_ADDED)), changed(post_processor=template(MAX_ADDED + 1))),
        (changed(decoder=replace("a", "b" * MAX_CONTENT)), changed(decoder=replace("a", "b" * (MAX_CONTENT + 1)))),
        (
            # Of the parts one is the decoder and one the post-processor; the limit is one of time, so that the rest is short.
            changed(normalizer=sequence("normalizer", *[replace("q", "q")] * (MAX_PARTS - 3))),
            changed(normalizer=sequence("normalizer", *[replace("q", "q")] * (MAX_PARTS - 2))),
        ),
        (
            changed(decoder=sequence("decoder", replace("a", "b" * 8), replace("b", "c" * 8))),
            changed(decoder=sequence("decoder", replace("a", "b" * 8), replace("b", "c" * 9))),
        ),
    ),
    ids=("pattern", "added token", "tokens of a template", "content of a decoder", "parts", "growth of decoders"),
)
def test_each_limit_and_one_above_it(within: bytes, beyond: bytes) -> None:
    assert encoded(within)
    with pytest.raises(FormatError, match="does not work"):
        encoded(beyond)


@pytest.mark.usefixtures("works_here")
def test_the_size_of_the_file_has_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_TOKENIZER == 64 << 20
    data = changed()
    monkeypatch.setattr(foreign_tokenizer, "MAX_TOKENIZER", len(data))
    assert encoded(data)
    with pytest.raises(FormatError, match=f"has {len(data) + 1} bytes; at most {len(data)}"):
        encoded(data + b" ")


@pytest.mark.usefixtures("works_here")
def test_the_tokens_of_a_text_have_their_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    found = load(changed())
    count = len(found.encode("abc def", add_special_tokens=False))
    monkeypatch.setattr(foreign_tokenizer, "MAX_TOKENS_PER_BYTE", 0)
    monkeypatch.setattr(foreign_tokenizer, "EXTRA_TOKENS", count)
    assert len(found.encode("abc def", add_special_tokens=False)) == count
    monkeypatch.setattr(foreign_tokenizer, "EXTRA_TOKENS", count - 1)
    with pytest.raises(FormatError, match=f"makes {count} tokens of 7 bytes"):
        found.encode("abc def", add_special_tokens=False)


@pytest.mark.usefixtures("works_here")
@pytest.mark.parametrize("pattern", sorted(LINEAR_PATTERNS))
def test_published_patterns_run_here_and_repeat_nothing_that_repeats(pattern: str) -> None:
    """What repeats a repetition can be searched in more ways than a text has characters; a search of all would not end here."""
    found = load(changed(pre_tokenizer=split(pattern)))
    assert found.is_linear and not repeats_a_repetition(pattern)
    texts = [unit * (64000 // len(unit)) for unit in (" ", "a", "A", "0", "\n", ".", "'s", " \n", "é日", "aA", "/ \r")]
    assert len(found.encode_each(texts, add_special_tokens=False)) == len(texts)


def repeats_a_repetition(pattern: str) -> bool:
    """Whether a group of a regular expression is repeated without a bound and has such a repetition in it."""
    plain = re.sub(r"\[(?:\\.|[^\]])*\]", "x", re.sub(r"\\p\{\w+\}", "x", pattern))
    plain = re.sub(r"\\.", "x", plain)
    while (inner := re.search(r"\(([^()]*)\)([*+]|\{\d+,\})?", plain)) is not None:
        repeated = re.search(r"[*+]|\{\d+,\}", inner[1]) is not None
        if repeated and inner[2]:
            return True
        plain = plain[: inner.start()] + ("x+" if repeated else "x") + (inner[2] or "") + plain[inner.end() :]
    return False


def test_a_repeated_repetition_is_seen() -> None:
    for pattern in ("(x+x+)+y", "(a*)*b", r"(?:[a\]b]{2,}|c)+", "((a+)b)*"):
        assert repeats_a_repetition(pattern)
    assert not repeats_a_repetition(r"(?:\p{L}|[*+])+(?!\+)")


def test_any_other_pattern_runs_in_a_child_with_the_same_result() -> None:
    other = load(changed(pre_tokenizer=split(r"(?:\w+|\W)+?")))
    assert not other.is_linear
    library = other.tokenizer
    for text in ("def f(x):\n    return x", "naïve 日本 🙂", ""):
        assert other.encode(text, add_special_tokens=True) == library.encode(text, add_special_tokens=True).ids
    texts = ["a b", "", "c"]
    assert other.encode_each(texts, add_special_tokens=False) == [
        library.encode(t, add_special_tokens=False).ids for t in texts
    ]


def test_what_runs_where() -> None:
    """In this process only what is bounded: growth 64, a content of 16 bytes, known patterns."""
    growing = [replace("a", "b" * 8), replace("b", "c" * 8), replace("c", "dd")]
    assert is_linear({**PLAIN, "normalizer": sequence("normalizer", *growing[:2])})
    assert not is_linear({**PLAIN, "normalizer": sequence("normalizer", *growing)})
    assert is_linear({**PLAIN, "normalizer": replace("a", "b" * MAX_CONTENT)})
    assert not is_linear({**PLAIN, "normalizer": replace("a", "b" * (MAX_CONTENT + 1))})
    assert not is_linear({**PLAIN, "normalizer": replace("a*", "b", "Regex")})
    assert not is_linear({**PLAIN, "normalizer": charsmap(b"\4\0\0\0")})
    llama = sequence("normalizer", {"type": "Prepend", "prepend": "▁"}, replace(" ", "▁"))
    assert is_linear({**PLAIN, "normalizer": llama})
    word = {"type": "WordPiece", "vocab": {"a": 0}, "continuing_subword_prefix": "##"}
    longest = tokenizer_rules.MAX_WORD
    assert is_linear({"model": {**word, "max_input_chars_per_word": longest}})
    assert not is_linear({"model": {**word, "max_input_chars_per_word": longest + 1}})
    piece = tokenizer_rules.MAX_PIECE
    assert is_linear({"model": {"type": "Unigram", "vocab": [["a" * piece, 0.0]]}})
    assert not is_linear({"model": {"type": "Unigram", "vocab": [["a" * (piece + 1), 0.0]]}})


def test_a_tokenizer_is_checked_once_on_this_machine(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, calls = changed(), 0

    def counted(work: Any, limits: ConfinementLimits) -> str:
        nonlocal calls
        calls += 1
        return str(work())

    monkeypatch.setattr(foreign_tokenizer, "confined", counted)
    assert load(data).is_linear and load(data).is_linear and calls == 1
    (kept,) = cache.iterdir()
    assert kept.read_text() == "linear"
    kept.write_text("damaged")
    assert load(data).is_linear and calls == 2
    load(changed() + b" ")
    assert calls == 3 and len(list(cache.iterdir())) == 2
    monkeypatch.setattr(foreign_tokenizer, "_RULES", "2")
    assert load(data).is_linear and calls == 4


def test_what_was_refused_is_not_remembered(cache: Path) -> None:
    for _ in range(2):
        with pytest.raises(FormatError):
            load(HOSTILE["a table of eight gigabytes"])
    assert not cache.exists()


def test_without_a_cache_folder_it_is_checked_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    assert load(changed()).is_linear


def test_pairs_have_the_same_tokens_and_segments_in_a_child(tmp_path: Path) -> None:
    write_word_pieces(tmp_path)
    here = load((tmp_path / "tokenizer.json").read_bytes())
    assert here.is_linear
    pairs = [("the paris", "A b"), ("a", "\n"), ("é", "c" * 300)]
    found = here.encode_pairs(pairs)
    assert found[0] == ([2, 89, 90, 3, 5, 6, 3], [0, 0, 0, 0, 1, 1, 1])
    assert SafeTokenizer(here.tokenizer, False).encode_pairs(pairs) == found
    with pytest.raises(InputError, match="not valid UTF-8"):
        here.encode_pairs([("a", "\ud800")])
