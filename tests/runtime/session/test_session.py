"""Sessions: chunks, prefixes kept between calls, trimming, limits."""

from __future__ import annotations

import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from edgeq.errors import EdgeqError, FormatError, InputError, ResourceError, UnsupportedError
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
    session.rewind(65)
    assert np.array_equal(session.prefill(TOKENS[65:80]), model.session().prefill(TOKENS[:80]))
    with pytest.raises(ValueError, match="81"):
        session.rewind(81)


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
    with pytest.raises(InputError, match="200 already there.*context 200.*`context`"):
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


def targets() -> list[str]:
    from edgeq.targets import TARGETS, load

    return [name for name in TARGETS if load(name).refusal() is None]


@pytest.mark.parametrize("target", targets())
@pytest.mark.parametrize("kv", ["f16", "int8", "int4"])
def test_a_fork_and_its_origin_do_not_disturb_each_other(tiny_path: Path, target: str, kv: Any) -> None:
    model = Model.load(tiny_path, target=target, context=200, kv=kv, threads=1)

    def fresh(tokens: list[int]) -> np.ndarray:
        # In the same pieces: an int8 cache is the same either way, and so are the logits.
        return model.session().prefill(tokens)

    first = model.session()
    first.prefill(TOKENS[:100])
    second = first.fork()
    third = second.fork()
    assert second.logits is not None and np.array_equal(second.logits, first.logits)  # type: ignore[arg-type]
    assert all(page is other for page, other in zip(first._cache.pages, third._cache.pages, strict=True))
    # Writes into the half full page, then after going back into one that was full.
    assert np.array_equal(first.prefill([7, 8, 9]), fresh([*TOKENS[:100], 7, 8, 9]))
    second.rewind(40)
    assert np.array_equal(second.prefill(TOKENS[120:150]), fresh([*TOKENS[:40], *TOKENS[120:150]]))
    assert np.array_equal(third.prefill(TOKENS[100:110]), fresh(TOKENS[:110]))
    assert np.array_equal(first.decode(5), fresh([*TOKENS[:100], 7, 8, 9, 5]))
    assert first._cache.pages[0] is third._cache.pages[0] is not second._cache.pages[0]


def test_a_fork_costs_no_page_until_it_is_written_to(model: Model) -> None:
    session = model.session()
    session.prefill(TOKENS[:128])
    forks = [session.fork() for _ in range(5)]
    for fork in forks:
        fork.decode(3)
    pages = {id(page) for fork in forks for page in fork._cache.pages}
    assert len(pages) == 2 + 5, "the full pages are shared"


@pytest.mark.parametrize("target", targets())
@pytest.mark.parametrize("kv", ["f16", "int8", "int4"])
def test_a_saved_session_goes_on_as_if_it_had_never_ended(tiny_path: Path, tmp_path: Path, target: str, kv: Any) -> None:
    path = tmp_path / "talk.session"
    first = Model.load(tiny_path, target=target, context=200, kv=kv, threads=1)
    session = first.session()
    session.prefill(TOKENS[:100])
    session.save(path)
    wanted = session.prefill(TOKENS[100:])
    again = Model.load(tiny_path, target=target, context=160, kv=kv, threads=1).session()
    again.load(path)
    assert again.tokens == TOKENS[:100] and again.logits is None
    assert np.array_equal(again.prefill(TOKENS[100:]), wanted)
    assert list(tmp_path.iterdir()) == [path]


def test_an_empty_session_and_a_full_page_are_saved(model: Model, tmp_path: Path) -> None:
    for count in (0, 64, 65):
        session = model.session()
        if count:
            session.prefill(TOKENS[:count])
        session.save(tmp_path / "a")
        again = model.session()
        again.prefill([9, 9])
        again.load(tmp_path / "a")
        assert again.tokens == TOKENS[:count] and len(again._cache.pages) == -(-count // 64)


def test_pages_are_saved_and_loaded_between_the_runs_of_other_threads(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program has one caller at a time: on a GPU a page would be copied through what a run is using."""
    called = []

    def noted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def made(*arguments: Any) -> Any:
            called.append(name)
            assert model._lock.locked(), name
            return call(*arguments)

        return made

    session = model.session()
    session.prefill(TOKENS[:70])
    for name in ("save_page", "load_page"):
        monkeypatch.setattr(model.program, name, noted(name, getattr(model.program, name)))
    session.save(tmp_path / "a")
    session.load(tmp_path / "a")
    assert called == ["save_page", "save_page", "load_page", "load_page"]


def test_another_model_or_other_settings_are_refused(tiny_path: Path, tmp_path: Path, model_path: Callable[..., Path]) -> None:
    path = tmp_path / "a"
    model = Model.load(tiny_path, target="reference", context=128)
    session = model.session()
    session.prefill(TOKENS[:100])
    session.save(path)
    other = Model.load(model_path("tiny-llama", bits=4, group_size=32), target="reference")
    for stranger, words in (
        (other, "another model"),
        (
            Model.load(tiny_path, target="reference", kv="int8"),
            "other settings of this model; here they are reference, a16, int8",
        ),
        (Model.load(tiny_path, target="reference", mode="a8"), "other settings"),
        (Model.load(tiny_path, target="reference", context=99), "100 tokens, the context 99 positions"),
    ):
        with pytest.raises(InputError, match=words):
            stranger.session().load(path)
    Model.load(tiny_path, target="reference", context=100).session().load(path)
    with pytest.raises(InputError, match="no such file"):
        session.load(tmp_path / "none")
    with pytest.raises(ResourceError, match="cannot write it"):
        session.save(tmp_path / "no" / "folder")


def test_long_and_short_rotary_frequencies_are_other_settings(model_path: Callable[..., Path], tmp_path: Path) -> None:
    path = model_path("phi3_longrope", method="none", dtype="f32")
    short, long = (Model.load(path, target="reference", context=context) for context in (64, 128))
    session = short.session()
    session.prefill(TOKENS[:10])
    session.save(tmp_path / "a")
    with pytest.raises(InputError, match="other settings"):
        long.session().load(tmp_path / "a")


def test_damaged_and_hostile_sessions_are_refused_and_change_nothing(model: Model, tmp_path: Path) -> None:
    path = tmp_path / "a"
    session = model.session()
    session.prefill(TOKENS[:70])
    session.save(path)
    sound = path.read_bytes()
    held = model.session()
    held.prefill([5, 6])

    def refused(data: bytes, words: str, error: type[Exception] = FormatError) -> None:
        path.write_bytes(data)
        with pytest.raises(error, match=words):
            held.load(path)
        assert held.tokens == [5, 6]

    for at in (0, 9, 13, 17, 25, 41, 60, 80, 82, 400, len(sound) // 2, len(sound) - 1):
        refused(sound[:at] + bytes([sound[at] ^ 1]) + sound[at + 1 :], ".", EdgeqError)
    for length in (0, 7, 79, 80, 100, 5000, len(sound) - 1):
        refused(sound[:length], "not a saved session|header|implies")
    refused(sound + b"\0", "implies")
    refused(sound[:8] + struct.pack("<I", 5) + sound[12:], "upgrade edgeq", UnsupportedError)
    refused(sound[:8] + struct.pack("<I", 3) + sound[12:], "version 3; this edgeq reads 4: save", UnsupportedError)
    for count in (71, 201, 1 << 40, (1 << 64) - 1):
        refused(sound[:16] + struct.pack("<Q", count) + sound[24:], ".", EdgeqError)

    def signed(data: bytes) -> bytes:
        return data + xxhash.xxh3_128_digest(data)

    assert signed(sound[:-16]) == sound
    refused(signed(sound[:80] + struct.pack("<I", 2048) + sound[84:-16]), "outside the vocabulary")
    refused(signed(sound[:60] + b"x" + sound[61:-16]), "damaged header")
    path.write_bytes(sound)
    held.load(path)
    assert held.tokens == TOKENS[:70]


def test_a_session_with_requantized_weights_is_not_saved(model_path: Callable[..., Path], tmp_path: Path) -> None:
    path = model_path("tiny-llama", method="ttq", bits=4, rank=0, group_size=32)
    with pytest.raises(UnsupportedError, match="requantization=never"):
        Model.load(path, target="reference").session().save(tmp_path / "a")
