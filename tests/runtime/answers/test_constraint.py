"""Texts that are held to a JSON Schema or a grammar: what comes fits, or the schema is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeq.errors import InputError, UnsupportedError
from edgeq.runtime import Model, Sampling
from edgeq.runtime.answers import constraint as constraints
from edgeq.runtime.batching.job import Job
from edgeq.runtime.batching.scheduler import Scheduler
from edgeq.runtime.request import Request
from edgeq.text.tokenizer import Tokenizer

pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")

from tests.runtime.server.schemas import COUNT, REFUSED, SCHEMAS, TREE, array, record  # noqa: E402

CHECKS = jsonschema.Draft202012Validator.FORMAT_CHECKER
DIGITS = {"type": "grammar", "grammar": "start: /[0-9]{8}/"}


@pytest.fixture(scope="module")
def model(model_path: Callable[..., Path]) -> Model:
    path = model_path("tiny-llama", bits=4, group_size=32)
    return Model.load(path, mode="a8", threads=1, threads_prefill=1, context=512)


def held(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"schema": schema}}


def check(model: Model, schema: dict[str, Any], seed: int) -> None:
    """A text of this seed validates, or is the beginning of one; one of six seeds ends."""
    for attempt in range(6):
        sampling = Sampling(temperature=1.0, seed=seed + 1000 * attempt)
        generation = model.generate("record = ", max_tokens=500, sampling=sampling, response_format=held(schema))
        text = generation.text()
        if generation.finish_reason == "stop":
            jsonschema.Draft202012Validator(schema, format_checker=CHECKS).validate(json.loads(text))
            return
    raise AssertionError(f"no text ended: {text[:200]!r} of {json.dumps(schema)[:200]}")


@pytest.mark.usefixtures("works_here")
@pytest.mark.parametrize("index", range(3, len(SCHEMAS), len(SCHEMAS) // 6))
def test_some_schemas(model: Model, index: int) -> None:
    check(model, SCHEMAS[index], index)


@pytest.mark.exhaustive
@pytest.mark.parametrize("index", range(len(SCHEMAS)))
def test_every_schema(model: Model, index: int) -> None:
    check(model, SCHEMAS[index], index)


@pytest.mark.parametrize(("schema", "named"), REFUSED, ids=[named for _, named in REFUSED])
def test_what_is_not_supported_is_refused_by_name(model: Model, schema: Any, named: str) -> None:
    with pytest.raises(InputError, match=named):
        model.generate("x", response_format=held(schema))


def test_there_are_two_hundred() -> None:
    assert len(SCHEMAS) >= 200
    assert len({json.dumps(schema) for schema in SCHEMAS}) == len(SCHEMAS)
    for schema in SCHEMAS:
        jsonschema.Draft202012Validator.check_schema(schema)


@pytest.mark.parametrize("draft", ["lookup", "qspec"])
def test_drafts_change_no_greedy_text_and_forced_tokens_need_fewer_runs(model: Model, draft: Any) -> None:
    schema = record(customer_name={"const": "somebody"}, remaining_balance={"const": "nothing at all"})
    plain = model.generate("x = ", max_tokens=60, sampling=Sampling(), response_format=held(schema))
    drafted = model.generate("x = ", max_tokens=60, sampling=Sampling(), response_format=held(schema), draft=draft, gamma=2)
    assert drafted.text() == plain.text() and drafted.finish_reason == plain.finish_reason == "stop"
    assert sum(drafted.measurement.speculation.accepted) > len(plain.tokens) // 3
    assert drafted.measurement.speculation.cycles < plain.measurement.decode_steps


def test_sampled_texts_fit_with_drafts_that_do_not(model: Model) -> None:
    """The text repeats what the grammar does not have: those drafts are taken back, and the grammar with them."""
    for seed in range(4):
        generation = model.generate(
            "abc def abc def abc def ", max_tokens=80, sampling=Sampling(temperature=1.5, seed=seed), draft="both", gamma=4,
            response_format=held(TREE),
        )  # fmt: skip
        text = generation.text()
        if generation.finish_reason == "stop":
            jsonschema.validate(json.loads(text), TREE)


@pytest.mark.usefixtures("works_here")
def test_lark_and_gbnf(model: Model) -> None:
    assert model.generate("x", response_format=DIGITS).text().isdigit()
    gbnf = {"type": "grammar", "syntax": "gbnf", "grammar": 'root ::= "yes" | "no"'}
    assert model.generate("x", response_format=gbnf).text() in ("yes", "no")
    assert model.generate("x = ", response_format={"type": "json_object"}, max_tokens=2).text().startswith("{")


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        ({"type": "xml"}, "'xml'; supported: text, json_object, json_schema, grammar"),
        ({"type": "json_schema"}, "needs"),
        ("json", "`response_format` is 'json'"),
        ({"type": "grammar", "grammar": "start: missing"}, "missing"),
        ({"type": "grammar", "grammar": " "}, "empty"),
        ({"type": "grammar", "grammar": "start: " + "x" * 70_000}, "70007 characters"),
        ({"type": "grammar", "grammar": "x", "syntax": "peg"}, "supported: lark, gbnf"),
        ({"type": "grammar", "grammar": "root ::= (", "syntax": "gbnf"}, "cannot be read"),
        ({"type": "grammar", "grammar": "root ::= " + "(" * 20_000, "syntax": "gbnf"}, "cannot be read"),
    ],
)
def test_formats_that_are_refused(model: Model, asked: Any, error: str) -> None:
    with pytest.raises(InputError, match=error):
        model.generate("x", response_format=asked)


def test_deep_and_nested_schemas_end_within_the_limits(model: Model) -> None:
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(70):
        deep = {"type": "array", "items": deep}
    with pytest.raises(InputError, match="more than 64 deep"):
        model.generate("x", response_format=held(deep))
    nested = model.generate(
        "x", max_tokens=40, sampling=Sampling(temperature=1, seed=1),
        response_format=held({"type": "string", "pattern": "^((a{1,1000}){1,1000}){1,1000}$"}),
    )  # fmt: skip
    try:
        nested.text()
    except InputError as error:
        assert "too complex" in str(error)


def test_a_stop_token_must_be_able_to_come(model: Model) -> None:
    with pytest.raises(InputError, match="ignore_eos"):
        model.generate("x", ignore_eos=True, response_format=DIGITS)
    texts = list[list[int]]()
    for draft in ("off", "lookup"):
        early = model.generate("x", min_tokens=30, max_tokens=40, response_format=DIGITS, draft=draft)  # type: ignore[arg-type]
        with pytest.raises(InputError, match="min_tokens"):
            early.text()
        texts.append(early.tokens)
    assert texts[0] == texts[1]
    other = model.generate("x", ignore_eos=True, stop_tokens=[7], response_format=DIGITS)
    assert other.text().isdigit() and other.tokens[-1] == 7


def test_without_llguidance_it_says_what_to_install(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constraints, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match=r'pip install "edgeq\[grammar\]"'):
        model.generate("x", response_format=DIGITS)


def test_a_matcher_follows_a_text_forth_and_back(model: Model) -> None:
    held_to = model.constraints.compile(constraints.of_lark('start: "abc" | "axy"'))
    stops = model.text.eos
    tokens = {letter: model.text.encode_plain(letter)[0] for letter in "abcxy"}

    def allowed(matcher: constraints.Matcher, word: str) -> set[int]:
        return set(np.flatnonzero(matcher.allowed([9, *(tokens[letter] for letter in word)])).tolist())

    used = held_to.begin(1, stops)
    for word in ("", "a", "ab", "abc", "ax", "a", "axy", "", "abc"):
        assert allowed(used, word) == allowed(held_to.begin(1, stops), word)
    assert allowed(used, "abc") == set(stops)
    # What follows the end, as a draft may have it, changes nothing.
    end = min(stops)
    ended = used.allowed([9, *(tokens[letter] for letter in "abc"), end, 77])
    assert np.flatnonzero(ended).tolist() == sorted(stops)
    assert allowed(used, "a") == allowed(held_to.begin(1, stops), "a")


@pytest.mark.parametrize("draft", ["off", "lookup"])
def test_masks_that_are_made_while_the_model_runs_are_the_same(
    model: Model, monkeypatch: pytest.MonkeyPatch, draft: Any
) -> None:
    given: dict[str, Any] = {"max_tokens": 60, "sampling": Sampling(temperature=1.0, seed=2), "response_format": held(TREE)}
    given |= {} if draft == "off" else {"draft": draft, "gamma": 3}
    alone = model.generate("x = ", **given).text()
    monkeypatch.setattr(constraints, "AHEAD_FROM", 1)
    assert model.generate("x = ", **given).text() == alone


def test_a_text_that_made_room_goes_on_in_its_grammar(model: Model) -> None:
    """Several texts of two schemas in a cache for one context: each has the tokens that it has alone."""
    long, word = array(record(n=COUNT), 20, 20), array({"type": "string", "pattern": "^[a-z]{3}$"}, 20, 20)
    prompt = model.prompt("".join(f"value_{i} = {i}\n" for i in range(32)))
    jobs = list[Job]()
    for seed in range(3):
        asked = Request(max_tokens=120, response_format=held((long, word)[seed % 2]))
        jobs.append(Job(prompt, asked.compiled(model.constraints.compile, model.text), Sampling(temperature=1.0, seed=seed)))
    scheduler = Scheduler(model, 4, pages=8, shares_prefixes=True)
    found = {scheduler.submit(job): list[int]() for job in jobs}
    tickets = list(found)
    while scheduler.busy:
        for update in scheduler.step():
            assert not update.error, update.error
            found[update.ticket] += [piece.token for piece in update.pieces]
    assert scheduler.totals.preemptions > 0
    for job, ticket in zip(jobs, tickets, strict=True):
        given: dict[str, Any] = {"max_tokens": 120, "sampling": job.sampling, "response_format": job.request.response_format}
        alone = model.generate(prompt, **given)
        alone.text()
        assert found[ticket] == alone.tokens


@pytest.mark.usefixtures("works_here")
def test_compiled_grammars_are_kept_but_not_without_end(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constraints, "MAX_COMPILED", 2)
    kept, grammars = model.constraints, [constraints.of_lark(f"start: /a{{{i}}}/") for i in (1, 2, 3)]
    first = kept.compile(grammars[0])
    assert kept.compile(grammars[0]) is first
    second = kept.compile(grammars[1])
    assert kept.compile(grammars[0]) is first and len(kept._compiled) == 2
    kept.compile(grammars[2])
    assert kept.compile(grammars[0]) is first and kept.compile(grammars[1]) is not second


@pytest.mark.usefixtures("works_here")
def test_bytes_and_spaces_of_sentencepiece() -> None:
    """As Llama 2's: a space comes before what is encoded, and is none of what the grammar has; other characters are bytes."""
    from tokenizers import Tokenizer as ForeignTokenizer
    from tokenizers import decoders, models, normalizers

    words = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "\u2581", *"abcdefgh", "\u2581ab", "cd"]
    tokenizer = ForeignTokenizer(models.Unigram([(w, -float(i)) for i, w in enumerate(words)], unk_id=0, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    text, draw = Tokenizer(tokenizer.to_str(), {"eos_token_ids": [2]}), np.random.default_rng(0)
    compiled = constraints.Constraints(lambda: text, len(words))
    for wanted in ("cd ab", "\u65e5\U0001f642 ab"):
        matcher = compiled.compile(constraints.of_schema(constraints.schema_text({"const": wanted}))).begin(1, text.eos)
        tokens = [1]
        forced = matcher.forced(tokens)
        while tokens[-1] != 2:
            tokens.append(int(draw.choice(np.flatnonzero(matcher.allowed(tokens)))))
        assert text.decode(tokens[1:-1]) == f'"{wanted}"'
        assert forced == tokens[1 : 1 + len(forced)] and len(forced) > 3
