"""What is kept of predictions, the divergence from it, and its file in the cache folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeq.format import container, kernel_pack
from edgeq.runtime.batching import page_file
from edgeq.runtime.session import session_file
from edgeq.tools.quality import kept_predictions
from edgeq.tools.quality.kept_predictions import ENDING, kept_or_made, read
from edgeq.tools.quality.predictions import SAMPLED, TOP, Collector, Divergence, Predictions

TOKENS, VOCAB = 400, 2000
Logits = np.ndarray[Any, np.dtype[np.float32]]


def logits(seed: int, vocab: int = VOCAB) -> Logits:
    """With a heavy tail: a third of the probability is outside the largest 128."""
    return np.random.default_rng(seed).normal(0, 2, (TOKENS, vocab)).astype(np.float32)


def targets(vocab: int = VOCAB) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.random.default_rng(9).integers(0, vocab, TOKENS)


def parts(whole: Logits, slab: int, positions: int = 150) -> Iterator[tuple[int, int, Logits]]:
    """Slabs of the vocabulary, each for all positions, as a checkpoint gives them."""
    for entry in range(0, whole.shape[1], slab):
        for first in range(0, len(whole), positions):
            yield first, entry, whole[first : first + positions, entry : entry + slab]


def kept(whole: Logits, slab: int = VOCAB) -> Predictions:
    collector = Collector(targets(whole.shape[1]), whole.shape[1])
    for part in parts(whole, slab):
        collector.add(*part)
    return collector.finish()


def compared(source: Predictions, whole: Logits, slab: int = VOCAB) -> Divergence:
    divergence = Divergence(source, targets(whole.shape[1]))
    for part in parts(whole, slab):
        divergence.add(*part)
    return divergence


def log_softmax(whole: Logits) -> np.ndarray[Any, np.dtype[np.float64]]:
    x = whole.astype(np.float64)
    return np.asarray(x - np.log(np.exp(x).sum(1, keepdims=True)))


def exact(p: Logits, q: Logits) -> float:
    a, b = log_softmax(p), log_softmax(q)
    return float((np.exp(a) * (a - b)).sum(1).mean())


@pytest.mark.parametrize("noise", [0.01, 0.1, 1.0])
@pytest.mark.parametrize("slab", [VOCAB, 700])
def test_the_divergence_is_that_of_whole_logits(noise: float, slab: int) -> None:
    p = logits(1)
    q = p + noise * logits(2)
    divergence = compared(kept(p, slab), q, slab)
    assert divergence.kl().mean() == pytest.approx(exact(p, q), rel=0.01)
    np.testing.assert_allclose(divergence.nll, -log_softmax(q)[np.arange(TOKENS), targets()], rtol=1e-5)
    assert np.array_equal(divergence.agrees, p.argmax(1) == q.argmax(1))


def test_without_the_sample_it_would_be_far_too_low() -> None:
    """The tail of this text of numbers matters: what the test above holds is not held by the largest logits alone."""
    p = logits(1)
    q, a = p + 0.1 * logits(2), log_softmax(p)
    order = np.argsort(-a, 1)[:, :TOP]
    a, b = (np.take_along_axis(x, order, 1) for x in (a, log_softmax(q)))
    rest, others = (1 - np.exp(x).sum(1) for x in (a, b))
    bound = (np.exp(a) * (a - b)).sum(1) + rest * np.log(rest / others)
    assert bound.mean() < 0.8 * exact(p, q)


def test_the_same_logits_diverge_by_exactly_nothing() -> None:
    p = logits(1)
    divergence = compared(kept(p), p)
    assert not divergence.kl().any() and divergence.agrees.all()


def test_a_small_vocabulary_is_kept_whole() -> None:
    p, q = logits(1, 100), logits(2, 100)
    found = compared(kept(p, 48), q, 48).kl()
    assert found.mean() == pytest.approx(exact(p, q), rel=1e-6)


@pytest.mark.parametrize("slab", [VOCAB, 500])
def test_what_is_kept_is_the_largest_and_a_sample_of_the_others(slab: int) -> None:
    p = logits(3)
    found = kept(p, slab)
    assert found.ids.shape == (TOKENS, TOP + SAMPLED)
    assert np.array_equal(found.ids[:, :TOP], np.argsort(-p, 1, kind="stable")[:, :TOP])
    assert np.array_equal(found.logits, np.take_along_axis(p, found.ids.astype(np.int64), 1))
    # Entries come into the sample as often as their probability outside the top says: here by tenths of the vocabulary.
    tail = np.exp(log_softmax(p))
    np.put_along_axis(tail, found.ids[:, :TOP].astype(np.int64), 0, 1)
    expected = (tail / tail.sum(1, keepdims=True)).reshape(TOKENS, 10, -1).sum(2).mean(0)
    drawn = np.histogram(found.ids[:, TOP:], 10, (0, VOCAB))[0] / (TOKENS * SAMPLED)
    np.testing.assert_allclose(drawn, expected, atol=4 * 0.3 / np.sqrt(TOKENS * SAMPLED))
    top = found.ids[:, :TOP, None] == found.ids[:, None, TOP:]
    assert not top.any()


def test_logits_that_are_no_numbers_are_refused() -> None:
    p = logits(1)
    p[5, 7] = np.nan
    with pytest.raises(FloatingPointError):
        kept(p)


# The file.

KEY = {"source": "a", "tokens": "b"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(kept_predictions, "cache_folder", lambda: tmp_path)
    return tmp_path / "predictions"


def no_wait() -> None:
    raise AssertionError("nobody else makes it")


def never() -> Predictions:
    raise AssertionError("it is there")


def keep(make: Callable[[], Predictions] = lambda: kept(logits(1)), key: dict[str, Any] = KEY) -> Predictions:
    return kept_or_made(key, TOKENS, VOCAB, make, no_wait)


def same(a: Predictions, b: Predictions) -> bool:
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for name in ("ids", "logits", "log_sum", "nll"))


def test_predictions_are_made_once_for_a_key(folder: Path) -> None:
    made = keep()
    assert same(keep(never), made)
    other = keep(lambda: kept(logits(4)), KEY | {"tokens": "c"})
    assert not same(other, made) and same(keep(never), made)
    assert [path.suffix for path in folder.iterdir()] == [ENDING, ENDING]


@pytest.mark.parametrize("damage", ["flipped", "cut", "longer", "empty", "of another key"])
def test_a_damaged_file_is_made_again(folder: Path, damage: str) -> None:
    made = keep()
    (path,) = folder.iterdir()
    data = bytearray(path.read_bytes())
    if damage == "flipped":
        data[-100] ^= 1
    elif damage == "of another key":
        keep(key=KEY | {"tokens": "c"})
        data = bytearray(next(other for other in folder.iterdir() if other != path).read_bytes())
    path.write_bytes({"cut": data[:-1], "longer": data + b"\0", "empty": b""}.get(damage, bytes(data)))
    again: list[int] = []
    assert same(keep(lambda: again.append(1) or kept(logits(1))), made) and again
    assert same(keep(never), made)


def test_entries_outside_the_vocabulary_and_infinities_are_no_predictions(folder: Path) -> None:
    for array, value in (("ids", VOCAB), ("logits", np.nan), ("log_sum", np.inf)):
        wrong = kept(logits(1))
        getattr(wrong, array).flat[3] = value
        keep(lambda wrong=wrong: wrong, KEY | {"wrong": array})
        (path,) = folder.glob(f"*{ENDING}")
        key = KEY | {"wrong": array, "top": TOP, "sampled": SAMPLED}
        assert read(path, key, TOKENS, VOCAB) is None
        path.unlink()


def test_no_other_kind_of_file_begins_as_kept_predictions_do() -> None:
    magics = [module.MAGIC for module in (container, page_file, session_file, kernel_pack, kept_predictions)]
    assert len(set(magics)) == len(magics) and {len(magic) for magic in magics} == {8}


def test_a_folder_that_cannot_be_written_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_predictions, "cache_folder", lambda: Path(os.devnull) / "edgeq")
    assert same(keep(), keep())


def test_files_that_were_not_used_for_longest_go_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "abc":
        keep(key={"source": name})
    size = next(folder.iterdir()).stat().st_size
    for place, path in enumerate(sorted(folder.iterdir())):
        os.utime(path, (place, place))
    oldest, middle, _ = sorted(folder.iterdir())
    os.utime(oldest)  # used again
    monkeypatch.setattr(kept_predictions, "MAX_BYTES", 3 * size)
    keep(key={"source": "d"})
    assert oldest.exists() and not middle.exists() and len(list(folder.iterdir())) == 3


def test_another_process_that_makes_the_same_is_waited_for(folder: Path) -> None:
    import fcntl
    import threading

    made = kept(logits(1))
    folder.mkdir()
    started, waiting = threading.Event(), threading.Event()

    def slow() -> Predictions:
        started.set()
        assert waiting.wait(60)
        return made

    first = threading.Thread(target=lambda: keep(slow))
    first.start()
    assert started.wait(60)
    (new,) = folder.glob("*.new")
    with open(new, "rb") as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert same(kept_or_made(KEY, TOKENS, VOCAB, never, waiting.set), made)
    first.join()
    assert [path.suffix for path in folder.iterdir()] == [ENDING]
