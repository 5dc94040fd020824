"""Drafts change how fast a text comes, never the text: greedy token by token, drawn by its law, the cache bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeq.errors import InputError
from edgeq.runtime import Batch, Model, Sampling
from edgeq.runtime.decode import Stream
from edgeq.runtime.sampling import Rules, Sampler, distribution
from edgeq.runtime.session.runs import run_together
from edgeq.runtime.speculative import drafts
from edgeq.runtime.speculative.drafts import Draft
from edgeq.runtime.speculative.lookup import Lookup
from edgeq.runtime.speculative.planner import DraftPlanner, expected_tokens
from edgeq.runtime.speculative.speculator import Speculator, accept, residual
from edgeq.runtime.stats import MAX_DRAFT

CODE = "def read_file(path):\n    with open(path) as file:\n        return file.read()\n\n\n"
PROMPTS = (CODE * 2 + "def read_", "class Point:\n    def __init__(self, x", "The return value is a tuple of")


@pytest.fixture(scope="module")
def model(model_path: Callable[..., Path]) -> Model:
    return Model.load(model_path("tiny-llama", bits=4, group_size=32), mode="a16", threads=1, max_logits=64)


def prompts(model: Model) -> list[list[int]]:
    return [model.text.encode(text) for text in PROMPTS]


def tokens_of(model: Model, prompt: Sequence[int], **options: Any) -> list[int]:
    generation = model.generate(prompt, **{"max_tokens": 48, **options})
    list(generation.pieces())
    return generation.tokens


class FixedLogits:
    """A session whose logits do not matter."""


def stream_with(tokens: list[int], sampling: Sampling) -> Stream:
    return Stream(FixedLogits(), Sampler(sampling), tokens)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def without_drafts(model: Model) -> list[list[int]]:
    """The greedy tokens of each prompt."""
    return [tokens_of(model, prompt) for prompt in prompts(model)]


@pytest.mark.parametrize(
    ("gamma", "draft"),
    [
        # Every number with one way by turns in `make test`.
        pytest.param(gamma, draft, marks=() if (i + j) % 3 == 0 else pytest.mark.exhaustive)
        for i, gamma in enumerate((1, 2, 4, 7, None))
        for j, draft in enumerate(("qspec", "lookup", "both"))
    ],
)
def test_greedy_text_is_the_one_without_drafts(
    model: Model, without_drafts: list[list[int]], draft: Any, gamma: int | None
) -> None:
    assert [tokens_of(model, prompt, draft=draft, gamma=gamma) for prompt in prompts(model)] == without_drafts


def test_penalties_count_drafts_position_by_position(model: Model) -> None:
    sampling = Sampling(repeat_penalty=1.3)
    for prompt in prompts(model):
        assert tokens_of(model, prompt, draft="both", gamma=4, sampling=sampling) == tokens_of(model, prompt, sampling=sampling)


def no_letter_e(model: Model) -> Any:
    """A processor that bans every token with this letter, and looks at the tokens so far."""
    banned = [t for t in range(model.config.vocab_size) if "e" in model.text.decode([t])]

    def processor(tokens: Sequence[int], logits: np.ndarray) -> np.ndarray:
        logits[banned] = -np.inf
        logits[tokens[-1]] -= 2
        return logits

    return processor


@pytest.mark.parametrize("draft", ["qspec", "lookup", "both"])
def test_greedy_text_with_everything_that_changes_logits_is_the_one_without_drafts(model: Model, draft: Any) -> None:
    sampling = Sampling(presence_penalty=0.4, frequency_penalty=0.3, repeat_penalty=1.1, logit_bias={5: 2.0, 300: -5.0})
    options: dict[str, Any] = {"sampling": sampling, "processors": [no_letter_e(model)], "min_tokens": 20, "logprobs": 3}
    for prompt in prompts(model):
        plain = model.generate(prompt, max_tokens=48, **options)
        drafted = model.generate(prompt, max_tokens=48, draft=draft, gamma=4, **options)
        assert plain.text() == drafted.text() and "e" not in plain.text()
        assert plain.tokens == drafted.tokens and plain.logprobs == drafted.logprobs
        assert [found.token for found in plain.logprobs] == plain.tokens and len(plain.logprobs[0].top) == 3


def test_stop_tokens_and_those_of_the_file(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = prompts(model)[0]
    plain = tokens_of(model, prompt)
    end = plain[6]
    at = plain.index(end)
    for draft in ("off", "lookup"):
        ended = model.generate(prompt, max_tokens=48, stop_tokens=[end], draft=draft)  # type: ignore[arg-type]
        assert (
            ended.text() == model.text.decode(plain[:at]) and ended.finish_reason == "stop" and ended.tokens == plain[: at + 1]
        )
        late = tokens_of(model, prompt, stop_tokens=[end], min_tokens=at + 4, draft=draft)
        assert end not in late[: at + 4] and late[:at] == plain[:at]
    monkeypatch.setattr(model.text, "eos", frozenset([end]))
    assert tokens_of(model, prompt) == plain[: at + 1]
    assert tokens_of(model, prompt, ignore_eos=True) == plain
    stop = model.text.decode(plain[:2])[-2:]
    assert tokens_of(model, prompt, ignore_eos=True, stop=[stop], min_tokens=2)[:2] == plain[:2]


def test_logprobs_are_of_the_logits_that_the_session_gave(model: Model) -> None:
    prompt = prompts(model)[1]
    for options in ({}, {"draft": "lookup", "gamma": 3}, {"sampling": Sampling(temperature=0.8, seed=2)}):
        generation = model.generate(prompt, max_tokens=12, logprobs=2, **options)  # type: ignore[arg-type]
        generation.text()
        session, logits = model.session(), model.session().prefill(prompt)
        logits = session.prefill(prompt)
        for token, found in zip(generation.tokens, generation.logprobs, strict=True):
            law = np.log(distribution(logits, Sampling(temperature=1.0)))
            assert found.logprob == pytest.approx(law[token], abs=1e-9) and found.top[0][0] == int(logits.argmax())
            logits = session.decode(token)


@pytest.mark.parametrize("draft", ["qspec", "lookup"])
def test_the_cache_after_cycles_is_the_plain_one_bit_by_bit(model: Model, draft: Any) -> None:
    prompt = prompts(model)[0]
    plain, drafted = model.session(), model.session()
    assert tokens_of(model, prompt, session=plain) == tokens_of(model, prompt, session=drafted, draft=draft, gamma=5)
    assert plain.tokens == drafted.tokens
    following = [5, 6, 7]
    assert np.array_equal(plain.prefill(following), drafted.prefill(following))


def test_an_interrupted_draft_leaves_nothing_of_its_mode_behind(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, runs = prompts(model)[0], []

    def interrupted(parts: Any, mode: Any) -> Any:
        runs.append(mode)
        if len(runs) == 4:
            raise KeyboardInterrupt
        return run_together(parts, mode)

    session = model.session()
    session.prefill(prompt[:-1])
    monkeypatch.setattr(drafts, "run_together", interrupted)
    with pytest.raises(KeyboardInterrupt):
        drafts.drafted([Stream(session, Sampler(Sampling()), list(prompt))], [5], "a8")
    assert session.tokens == prompt[:-1] and runs == ["a8"] * 4
    assert np.array_equal(session.prefill(prompt[-1:]), model.session().prefill(prompt))


def test_logits_of_the_session_are_those_behind_its_last_token(model: Model) -> None:
    prompt = prompts(model)[0]
    stream = Stream(model.session(), Sampler(Sampling()), list(prompt))
    stream.tokens.append(int(stream.session.prefill(prompt).argmax()))
    Speculator("lookup", 3, "a8").step([stream], [20])
    logits = stream.session.logits
    fresh = model.session().prefill(stream.tokens[:-1])
    assert logits is not None and np.array_equal(logits, fresh)


def test_all_drafts_accepted_give_gamma_and_one_tokens() -> None:
    logits = np.full((4, 8), -10.0, np.float32)
    logits[[0, 1, 2, 3], [3, 1, 4, 1]] = 10
    stream = stream_with([0], Sampling())
    draft = Draft([3, 1, 4], [(np.array([t]), np.ones(1)) for t in (3, 1, 4)])
    assert accept(stream, draft, logits) == [3, 1, 4, 1] and stream.tokens == [0, 3, 1, 4, 1]


def test_all_drafts_rejected_give_the_token_without_drafts() -> None:
    logits = np.zeros((3, 8), np.float32)
    logits[0, 5] = 10
    stream = stream_with([0], Sampling())
    draft = Draft([2, 2], [(np.array([2]), np.ones(1))] * 2)
    assert accept(stream, draft, logits) == [5]


# With a tenth of the cycles a law must be further from the right one to be seen.
CYCLES = pytest.mark.parametrize("cycles", [6_000, pytest.param(60_000, marks=pytest.mark.exhaustive)])


@CYCLES
def test_drawn_tokens_have_the_law_of_the_exact_logits(cycles: int) -> None:
    """100,000 tokens of 60,000 cycles: the first follows p, and the second p given the first, whatever q was."""
    random = np.random.default_rng(3)
    exact = random.normal(0, 1.5, (3, 6)).astype(np.float32)
    cheap = (exact[:2] + random.normal(0, 1.0, (2, 6))).astype(np.float32)
    sampling = Sampling(temperature=0.9, top_k=5, seed=11)
    first, second = np.zeros(6), np.zeros(6)
    stream = stream_with([], sampling)
    for _ in range(cycles):
        stream.tokens.clear()
        q = [stream.sampler.candidates(row, []) for row in cheap]
        draft = Draft([stream.sampler.pick(row) for row in q], q)
        tokens = accept(stream, draft, exact)
        first[tokens[0]] += 1
        if len(tokens) > 1:
            second[tokens[1]] += 1
    assert first.sum() + second.sum() > cycles * 5 / 3
    for seen, row in ((first, exact[0]), (second, exact[1])):
        p = distribution(row, sampling)
        assert seen[p == 0].sum() == 0
        expected = p[p > 0] * seen.sum()
        chi = ((seen[p > 0] - expected) ** 2 / expected).sum()
        assert chi < 18.5  # the 99.9 % point of chi-square with 4 degrees of freedom


@pytest.mark.exhaustive
@CYCLES
def test_drawn_tokens_have_the_law_that_penalties_bias_and_processors_make(cycles: int) -> None:
    """As above, where p itself depends on the tokens before: the second token follows p given the first."""
    random = np.random.default_rng(5)
    exact = random.normal(0, 1.0, (3, 5)).astype(np.float32)
    cheap = (exact[:2] + random.normal(0, 0.7, (2, 5))).astype(np.float32)
    sampling = Sampling(temperature=0.9, presence_penalty=0.8, frequency_penalty=0.4, logit_bias={1: 1.0, 4: -1.0}, seed=13)

    def odd_after_even(tokens: Sequence[int], logits: np.ndarray) -> np.ndarray:
        logits[tokens[-1]] = -np.inf
        return logits

    rules = Rules(start=1, min_tokens=2, ends=frozenset([3]), processors=(odd_after_even,))
    stream = Stream(FixedLogits(), Sampler(sampling, rules), [0])  # type: ignore[arg-type]
    seen = np.zeros((5, 5))
    for _ in range(cycles):
        stream.tokens[:] = [0]
        draft = Draft()
        for row in cheap:
            draft.candidates.append(stream.sampler.candidates(row, stream.tokens + draft.tokens))
            draft.tokens.append(stream.sampler.pick(draft.candidates[-1]))
        tokens = accept(stream, draft, exact)
        if len(tokens) == 1:
            # A further token is drawn plainly, as the next cycle would.
            stream.draw(exact[1])
            tokens = stream.tokens[1:]
        seen[tokens[0], tokens[1]] += 1
    first = distribution(exact[0], sampling, [0], rules)
    expected = cycles * np.array([first[t] * distribution(exact[1], sampling, [0, t], rules) for t in range(5)])
    assert seen[expected == 0].sum() == 0 and first[0] == first[3] == 0
    keep = expected > 0
    chi, freedom = ((seen[keep] - expected[keep]) ** 2 / expected[keep]).sum(), keep.sum() - 1
    assert expected[keep].min() > 5 and chi < freedom + 4 * np.sqrt(2 * freedom)


def test_first_tokens_of_a_real_prompt_have_the_law_of_the_plain_sampler(model: Model) -> None:
    """3,000 draws behind one prompt, each through draft, verification and acceptance."""
    prompt = prompts(model)[1]
    session = model.session()
    session.prefill(prompt[:-1])
    exact = np.concatenate(list(session.all_logits([prompt[-1]])))
    cheap = exact[0] + np.random.default_rng(0).normal(0, 0.7, exact.shape[1]).astype(np.float32)
    sampling = Sampling(temperature=1.0, top_p=0.9, seed=5)
    stream = stream_with([], sampling)
    q = stream.sampler.candidates(cheap, prompt)
    p = distribution(exact[0], sampling, prompt)
    seen = np.zeros(len(p))
    for _ in range(3_000):
        stream.tokens[:] = prompt
        seen[accept(stream, Draft([stream.sampler.pick(q)], [q]), np.concatenate([exact, exact]))[0]] += 1
    likely = p * 3_000 >= 5
    groups = np.append(seen[likely], seen[~likely].sum()), np.append(p[likely], p[~likely].sum()) * 3_000
    keep = groups[1] > 0
    chi = ((groups[0] - groups[1])[keep] ** 2 / groups[1][keep]).sum()
    freedom = keep.sum() - 1
    assert seen[p == 0].sum() == 0 and chi < freedom + 4 * np.sqrt(2 * freedom)


def test_what_is_left_of_equal_laws_is_the_law_itself() -> None:
    p = np.array([1, 4]), np.array([0.25, 0.75])
    assert np.array_equal(residual(p, p)[1], p[1])
    tokens, left = residual(p, (np.array([4, 1]), np.array([0.75, 0.25])))
    assert tokens.tolist() == [1, 4] and left.tolist() == [0.25, 0.75]


def test_a_stop_string_inside_an_accepted_run_ends_the_text_and_the_cache_there(model: Model) -> None:
    prompt = prompts(model)[0]
    plain = model.generate(prompt, max_tokens=48)
    text = "".join(plain)
    stop = text[8:12]
    ends = [model.generate(prompt, max_tokens=48, stop=[stop], draft=d, gamma=g) for d, g in (("off", None), ("lookup", 7))]
    assert len({"".join(end) for end in ends}) == 1
    assert ends[0].tokens == ends[1].tokens and ends[0].finish_reason == ends[1].finish_reason == "stop"


@pytest.mark.parametrize("most", [1, 2, 5])
def test_no_more_tokens_come_than_were_asked_for(model: Model, most: int) -> None:
    prompt, session = prompts(model)[0], model.session()
    tokens = tokens_of(model, prompt, max_tokens=most, draft="lookup", gamma=7, session=session)
    assert tokens == tokens_of(model, prompt, max_tokens=most)
    assert session.tokens == [*prompt, *tokens[:-1]]


def test_a_full_context_ends_the_text_where_it_ends_without_drafts(model_path: Callable[..., Path]) -> None:
    small = Model.load(model_path("tiny-llama", bits=4, group_size=32), mode="a16", threads=1, context=64)
    prompt = small.text.encode(CODE)[:50]
    plain, drafted = (small.generate(prompt, draft=d, gamma=g) for d, g in (("off", None), ("lookup", 7)))
    assert "".join(plain) == "".join(drafted) and plain.finish_reason == drafted.finish_reason == "context"
    assert plain.tokens == drafted.tokens


@pytest.mark.parametrize("draft", ["off", "lookup", "both"])
def test_texts_of_a_batch_are_those_of_single_runs(model: Model, draft: Any) -> None:
    many = [p[: 4 + 3 * i] for i, p in enumerate(prompts(model) * 3)]
    batch = Batch(model, 4, max_tokens=24, draft=draft, gamma=None if draft == "off" else 3)
    answers = sorted(batch.run(many), key=lambda answer: answer.index)
    assert [answer.tokens for answer in answers] == [tokens_of(model, prompt, max_tokens=24) for prompt in many]
    assert [answer.finish_reason for answer in answers] == ["length"] * 9
    if draft == "lookup":
        speculation = batch.measurement.speculation
        assert 0 < sum(speculation.accepted) <= sum(speculation.drafted)


def test_a_batch_serves_first_who_came_first(model: Model) -> None:
    lengths = [prompts(model)[1]] * 5
    order = [answer.index for answer in Batch(model, 2, max_tokens=6).run(lengths)]
    assert order == [0, 1, 2, 3, 4]


def test_a_batch_larger_than_the_model_was_loaded_for_is_refused(model: Model) -> None:
    with pytest.raises(InputError, match="a batch of 65; this model was loaded for 1 to 64"):
        Batch(model, 65)


def test_lookup_offers_what_followed_the_last_time() -> None:
    lookup = Lookup()
    assert lookup.propose([1, 2, 3], 4) == []
    assert lookup.propose([1, 2, 3, 9, 1, 2], 3) == [3, 9, 1]
    assert lookup.propose([1, 2, 3, 9, 1, 2, 4, 1, 2], 2) == [4, 1]


def test_lookup_goes_on_with_a_repetition() -> None:
    assert Lookup().propose([7, 5, 5, 5], 4) == [5, 5, 5, 5]
    assert Lookup().propose([1, 2, 1, 2, 1, 2], 5) == [1, 2, 1, 2, 1]


def test_expected_tokens_of_a_cycle() -> None:
    assert expected_tokens(0.0, 5) == 1 and expected_tokens(1.0, 5) == 6
    assert expected_tokens(0.5, 2) == pytest.approx(1 + 0.5 + 0.25)


def paced(beta: float, c: float, v: float, cycles: int = 400) -> tuple[DraftPlanner, list[int]]:
    """Gammas that are chosen where a plain step takes 1, a draft step c and each further row of a verification v."""
    pace, random, gammas = DraftPlanner(None, MAX_DRAFT), np.random.default_rng(1), []
    for _ in range(cycles):
        plan = pace.plan(1, MAX_DRAFT, None, ("mode",))
        gammas.append(plan.gamma)
        if plan.gamma:
            pace.record("mode", 1, c)
            accepted = int(np.argmin(np.append(random.random(plan.gamma) < beta, False)))
            pace.acceptance["mode"].count(accepted, plan.gamma)
        pace.record("exact", plan.gamma + 1, 1 + v * plan.gamma)
    return pace, gammas


def test_drafting_is_given_up_where_it_cannot_pay() -> None:
    _, gammas = paced(beta=0.95, c=1.0, v=0.1)
    assert sum(g > 0 for g in gammas) <= 2


def test_drafting_that_is_never_accepted_is_tried_seldom() -> None:
    _, gammas = paced(beta=0.0, c=0.3, v=0.1)
    assert sum(g > 0 for g in gammas[100:]) <= 4


def test_drafting_that_pays_is_found_with_the_gamma_that_pays_most() -> None:
    _, gammas = paced(beta=0.9, c=0.2, v=0.05)
    speed = {g: expected_tokens(0.9, g) / (g * 0.2 + 1 + 0.05 * g) for g in range(MAX_DRAFT + 1)}
    assert max(speed.values()) / np.mean([speed[g] for g in gammas[50:]]) < 1.05


def test_wrong_drafts_are_refused(model: Model) -> None:
    with pytest.raises(InputError, match="`gamma` is 8; expected 1 to 7"):
        model.generate([5], draft="lookup", gamma=8)
    with pytest.raises(InputError, match="draft 'medusa' is not known; supported: off, qspec"):
        model.generate([5], draft="medusa")  # type: ignore[arg-type]
