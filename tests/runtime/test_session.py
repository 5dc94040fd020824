"""Sessions: chunks, prefixes kept between calls, trimming, limits."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from edgeq.errors import InputError
from edgeq.runtime import Model, Sampling

TOKENS = [int(t) for t in np.random.default_rng(1).integers(2, 2048, 150)]


@pytest.fixture(scope="module")
def model(tiny_path: Path) -> Model:
    return Model.load(tiny_path, target="reference", context=200, max_rows=64)


def test_a_kept_prefix_gives_the_logits_of_a_fresh_session(model: Model) -> None:
    session = model.session()
    session.prefill(TOKENS)
    other = [*TOKENS[:70], 5, 6, 7]
    assert session.keep_prefix(other) == 70
    assert session.tokens == TOKENS[:70] and session.logits is None
    assert np.array_equal(session.prefill(other[70:]), model.session().prefill(other))


def test_of_the_same_prompt_all_but_the_last_token_is_kept(model: Model) -> None:
    session = model.session()
    wanted = session.prefill(TOKENS)
    assert session.keep_prefix(TOKENS) == len(TOKENS) - 1
    assert np.array_equal(session.prefill(TOKENS[-1:]), wanted)


def test_nothing_in_common_keeps_nothing(model: Model) -> None:
    session = model.session()
    session.prefill(TOKENS[:5])
    assert session.keep_prefix([TOKENS[1], *TOKENS]) == 0 and session.tokens == []


def test_trim_forgets_the_tail(model: Model) -> None:
    session = model.session()
    session.prefill(TOKENS)
    session.trim(65)
    assert np.array_equal(session.prefill(TOKENS[65:80]), model.session().prefill(TOKENS[:80]))
    with pytest.raises(ValueError, match="81"):
        session.trim(81)


def test_progress_counts_chunks(tiny_path: Path) -> None:
    heard: list[tuple[int, int]] = []
    model = Model.load(tiny_path, target="reference", context=200, max_rows=64)
    model.session().prefill(TOKENS, lambda done, total: heard.append((done, total)))
    sizes = [b - a for (a, _), (b, _) in zip([(0, 150), *heard], heard, strict=False)]
    assert sizes[0] == 48 and max(sizes) <= 64 and sum(sizes) == 150 and heard[-1] == (150, 150)


def test_all_logits_end_like_prefill(tiny_path: Path, model: Model) -> None:
    many = Model.load(tiny_path, target="reference", context=200, max_logits=48).session()
    parts = list(many.all_logits(TOKENS))
    assert [len(p) for p in parts] == [48, 48, 48, 6]
    assert np.array_equal(parts[-1][-1], model.session().prefill(TOKENS))


def test_pages_grow_with_the_tokens(model: Model) -> None:
    session = model.session()
    session.prefill(TOKENS[:64])
    assert len(session._cache.pages) == 1
    session.decode(3)
    assert len(session._cache.pages) == 2


def test_a_full_context_refuses_another_token(model: Model) -> None:
    session = model.session()
    session.prefill([3] * 200)
    assert session.left == 0
    with pytest.raises(InputError, match="200 already there.*context 200.*-c"):
        session.decode(3)


@pytest.mark.parametrize("token", (-1, 2048))
def test_tokens_outside_the_vocabulary_are_refused(token: int, model: Model) -> None:
    with pytest.raises(InputError, match=f"token {token} .*2048"):
        model.session().prefill([3, token])


def test_nothing_is_refused(model: Model) -> None:
    with pytest.raises(InputError, match="empty"):
        model.session().prefill([])


def test_sessions_do_not_see_each_other(model: Model) -> None:
    a, b = model.session(), model.session()
    a.prefill(TOKENS[:20])
    kept = a.logits
    b.prefill(TOKENS[20:40])
    assert np.array_equal(kept, model.session().prefill(TOKENS[:20]))  # type: ignore[arg-type]
    assert np.array_equal(a.decode(9), model.session().prefill([*TOKENS[:20], 9]))


def test_threads_take_turns(model: Model) -> None:
    prompts = ["def f(", "class A", "import os"]

    def run(prompt: str) -> str:
        return "".join(model.generate(prompt, max_tokens=12, sampling=Sampling(temperature=1.0, seed=4)))

    alone = [run(p) for p in prompts]
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(run, prompts)) == alone


def test_a_prefix_is_kept_with_a_sliding_window_too(model_path: Callable[..., Path]) -> None:
    model = Model.load(model_path("mistral", method="none", dtype="f32"), target="reference", context=200)
    session = model.session()
    session.prefill(TOKENS)
    other = [*TOKENS[:40], 8, 9]
    session.keep_prefix(other)
    assert np.array_equal(session.prefill(other[40:]), model.session().prefill(other))
