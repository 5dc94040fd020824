"""Loops of a text: which tokens lose how much, and that an answer comes out of one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from edgeq.errors import InputError
from edgeq.runtime import Batch, Model, Sampling
from edgeq.runtime.answers import repetition
from edgeq.runtime.answers.repetition import BASE, LOOP, MAX_REPEATED, MIN_REPEATED, WINDOW, Breakers, penalties
from edgeq.runtime.sampling import Rules, Sampler, distribution, needed

WORDS = [" the", " sea", " is", " a", " place", " of", " love", ",", "\n", " 7", "_id", " é", "</think>", "ly"]
THE, SEA, IS, A, PLACE, OF, LOVE, COMMA, LINE, SEVEN, ID, ACCENT, END, LY = range(len(WORDS))
DRY = Sampling(dry_multiplier=0.8)
PROMPT = "def f(x):\n    return"


@pytest.fixture
def breakers() -> Breakers:
    # Further tokens are words of two letters.
    further = [f" {chr(97 + token % 26)}{chr(97 + token // 26)}" for token in range(len(WORDS), 300)]
    text: Any = SimpleNamespace(token_bytes=lambda token: [*WORDS, *further][token].encode(), added_ids=frozenset([END]))
    return Breakers(text)


@pytest.fixture(scope="module")
def model(model_path: Callable[..., Path]) -> Model:
    path = model_path("tiny-llama", bits=4, group_size=32)
    return Model.load(path, mode="a16", threads=1, threads_prefill=1, context=512)


def test_the_penalty_grows_with_the_length_of_the_repetition() -> None:
    said = [THE, SEA, IS, A, PLACE, OF, LOVE]
    for length in range(1, 6):
        wanted = {said[length]: 0.8 * BASE ** (length - MIN_REPEATED)} if length >= MIN_REPEATED else {}
        assert penalties([*said, COMMA, *said[:length]], 0.8) == pytest.approx(wanted)
    # Each token that has followed one, and each time.
    told = [*said[:5], ACCENT, *said[1:5], OF, LINE, *said[:5]]
    longest = 2.0 * BASE ** (5 - MIN_REPEATED)
    assert penalties(told, 2.0) == pytest.approx({ACCENT: longest, OF: longest / BASE})
    many = list(range(100, 100 + 2 * MAX_REPEATED))
    assert penalties([*many, 1, *many[:-1]], 1.0) == {many[-1]: BASE ** (MAX_REPEATED - MIN_REPEATED)}


def test_it_is_what_a_search_through_the_text_finds(breakers: Breakers, monkeypatch: pytest.MonkeyPatch) -> None:
    # The other rule, of what stands there for the third time in a row, has a test of its own.
    monkeypatch.setattr(repetition, "LOOP", 1000)

    def searched(text: list[int]) -> dict[int, float]:
        found = dict[int, float]()
        for place in range(1, len(text)):
            length = 0
            while length < min(place, MAX_REPEATED) and text[place - 1 - length] == text[-1 - length]:
                if text[-1 - length] in (LINE, SEVEN, ID):
                    break
                length += 1
            if length >= MIN_REPEATED and text[place] not in (LINE, SEVEN, ID):
                found[text[place]] = found.get(text[place], 0) + 0.5 * BASE ** (length - MIN_REPEATED)
        return found

    random, hits = np.random.default_rng(3), 0
    for _ in range(2000):
        text = random.choice([THE, SEA, IS, LINE, ID], int(random.integers(1, 40)), p=[0.5, 0.3, 0.1, 0.05, 0.05]).tolist()
        found = penalties(text, 0.5, breakers)
        assert found == pytest.approx(searched(text)), text
        hits += bool(found)
    assert hits > 200


@pytest.mark.parametrize("breaker", [LINE, SEVEN, ID])
def test_lines_numbers_and_code_break_a_repetition(breakers: Breakers, breaker: int) -> None:
    data = [THE, SEA, A, PLACE, breaker, OF, LOVE]
    assert penalties([*data, COMMA, *data[:6]], 0.8) and not penalties([*data, COMMA, *data[:6]], 0.8, breakers)
    prose = [THE, SEA, A, PLACE, ACCENT, OF, LOVE]
    assert set(penalties([*prose, COMMA, *prose[:6]], 0.8, breakers)) == {LOVE}
    # It may come itself after what came before it.
    assert penalties([*data, COMMA, *data[:4]], 0.8) and not penalties([*data, COMMA, *data[:4]], 0.8, breakers)


def test_a_word_is_always_spelled_to_its_end(breakers: Breakers) -> None:
    said = [THE, SEA, LOVE, LY]
    assert penalties([*said, COMMA, *said[:3]], 0.8, breakers) == {}
    assert set(penalties([*said, COMMA, *said[:2]], 0.8, breakers)) == {LOVE}


def test_prose_that_goes_round_the_same_words_has_to_end(breakers: Breakers) -> None:
    random = np.random.default_rng(5)
    words = [THE, SEA, IS, A, PLACE, OF, LOVE, COMMA]
    said = random.choice(words, 200).tolist()
    logits = np.zeros(len(WORDS), np.float32)
    ends = Rules(start=9, ends=frozenset([END, 99]), breakers=breakers)

    def drawn(text: list[int], rules: Rules = ends, sampling: Sampling = DRY) -> float:
        return float(distribution(logits, replace(sampling, temperature=1.0), [*[THE] * 9, *text], rules)[END])

    assert drawn(said) == 1
    assert drawn(said[:80]) < 0.5 and drawn(said[:120], replace(ends, min_tokens=130)) == 0
    assert drawn(said, Rules(start=9, breakers=breakers)) < 0.5 and drawn(said, sampling=Sampling()) < 0.5
    # Nor where each word is followed by data, where most of it differs, or where it has only begun after a thought.
    assert drawn([token for word in said for token in (word, SEVEN)]) < 0.5
    assert drawn([token for word in range(100, 200) for token in (word, THE)]) < 0.5
    assert drawn([*said[:150], END, *said[150:]]) < 0.5


def test_an_answer_may_repeat_what_was_thought_before_it(breakers: Breakers) -> None:
    said = [THE, SEA, IS, A, PLACE, OF, LOVE]
    assert penalties([*said, COMMA, *said[:6]], 0.8, breakers)
    assert penalties([*said, END, *said[:6]], 0.8, breakers) == {}


@pytest.mark.parametrize("block", [[LINE], [SEVEN, COMMA], [THE, SEA, LINE], [A, SEVEN, ID, LOVE, LINE]])
def test_nothing_breaks_what_stands_there_for_the_third_time_in_a_row(breakers: Breakers, block: list[int]) -> None:
    before, text = [OF, LOVE], list[int]()
    for count in range(60):
        text.append(block[count % len(block)])
        # Of the tokens so far those after the first block repeat the ones before.
        beyond = count + 1 - len(block) - max(LOOP, 2 * len(block))
        wanted = {block[(count + 1) % len(block)]: 0.8 * BASE ** min(beyond, MAX_REPEATED)} if beyond >= 0 else {}
        assert penalties([*before, *text], 0.8, breakers) == pytest.approx(wanted), count


def test_only_the_end_of_a_long_text_counts() -> None:
    said = [THE, SEA, IS, A, PLACE, OF]
    filling = list(range(100, 100 + WINDOW - 2 * len(said) + 1))
    assert penalties([*said, *filling, *said[:5]], 0.8)
    assert penalties([*said, *filling, *range(5000, 5010), *said[:5]], 0.8) == {}


def test_the_prompt_may_be_quoted_and_the_text_may_not() -> None:
    said = [THE, SEA, IS, A, PLACE, OF]
    logits = np.zeros(len(WORDS), np.float32)
    quoted = distribution(logits, Sampling(temperature=1, dry_multiplier=0.8), [*said, COMMA, *said[:5]], Rules(start=7))
    assert np.allclose(quoted, 1 / len(WORDS))
    found = distribution(logits, Sampling(temperature=1, dry_multiplier=0.8), [*said, COMMA, *said[:5]])
    wanted = np.exp(np.where(np.arange(len(WORDS)) == OF, -0.8 * BASE ** (5 - MIN_REPEATED), 0))
    assert np.allclose(found, wanted / wanted.sum())


def test_all_logits_are_needed_only_where_something_repeats() -> None:
    said = [THE, SEA, IS, A, PLACE, OF]
    narrow = Sampling(temperature=0.7, top_k=12, dry_multiplier=0.8)
    assert needed(narrow, [*said, COMMA, *said[:1]]) == 12 and needed(DRY, said) == 1
    assert needed(narrow, [*said, COMMA, *said[:5]]) == needed(DRY, [*said, COMMA, *said[:5]]) == 0
    assert needed(narrow, [*said, COMMA, *said[:5]], Rules(start=7)) == 12


def test_a_greedy_text_comes_out_of_a_loop(breakers: Breakers) -> None:
    """The model always says the same line again, as SmolLM2 did for 80 tokens."""
    line = [THE, SEA, IS, A, PLACE, OF, LOVE, COMMA, LINE]

    def text(sampling: Sampling) -> list[int]:
        sampler, said = Sampler(sampling, Rules(breakers=breakers)), [THE]
        for _ in range(200):
            logits = np.zeros(len(WORDS), np.float32)
            logits[line[(line.index(said[-1]) + 1) % len(line)] if said[-1] in line else THE] = 20
            said.append(sampler.draw(logits, said))
        return said

    assert text(Sampling()) == (line * 23)[:201]
    found = text(DRY)
    assert not any(found[at : at + 5 * len(line)] == line * 5 for at in range(len(found)))


def test_a_multiplier_out_of_range_is_refused() -> None:
    for bad in (-0.1, 101, float("nan"), "1"):
        with pytest.raises(InputError, match="dry_multiplier"):
            Sampling(dry_multiplier=bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("sampling", [DRY, Sampling(temperature=0.7, top_p=0.95, min_p=0.05, dry_multiplier=0.8, seed=4)])
def test_a_text_is_the_same_alone_beside_others_and_with_drafts(model: Model, sampling: Sampling) -> None:
    options: dict[str, Any] = {"max_tokens": 120, "ignore_eos": True}
    alone = model.generate(PROMPT, sampling=sampling, **options).text()
    prompts = ["import os\n", PROMPT, "class A:\n"]
    beside = {answer.index: answer.text for answer in Batch(model, 3, sampling=sampling, **options).run(prompts)}
    assert beside[1] == alone
    assert model.generate(PROMPT, sampling=sampling, draft="lookup", gamma=4, **options).text() == alone
    held: dict[str, Any] = {"type": "grammar", "grammar": 'start: /[ "a-z,0-9\\n]{1,80}/'}
    del options["ignore_eos"]
    fitting = model.generate(PROMPT, sampling=sampling, response_format=held, **options).text()
    drafted = model.generate(PROMPT, sampling=sampling, response_format=held, draft="lookup", gamma=4, **options).text()
    (batched,) = Batch(model, 1, sampling=sampling, response_format=held, **options).run([PROMPT])
    assert fitting == drafted == batched.text


def test_the_rule_changes_the_greedy_text_of_a_model_that_loops(model: Model) -> None:
    def texts(sampling: Sampling) -> str:
        return model.generate("# " + "the " * 8, sampling=sampling, max_tokens=200, ignore_eos=True).text()

    assert texts(Sampling()) != texts(DRY)
