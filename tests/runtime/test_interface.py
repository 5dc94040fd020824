"""What a program holds in its hands: short names, text in one call, what objects say of themselves, and how they end."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

import edgeq
from edgeq.errors import FormatError, InputError
from edgeq.runtime import Batch, Model, Sampling, Session

PROMPT = "def main():"


@pytest.fixture(scope="module")
def model(tiny_path: Path) -> Model:
    return Model.load(tiny_path, target="reference", context=128)


def test_loading_is_logged(tiny_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="edgeq"):
        model = Model.load(tiny_path, target="reference", context=64)
    assert caplog.messages == [f"{tiny_path.name}: {model.description}; context 64; loaded in {model.load_s:.2f} s"]


@contextmanager
def without_collection() -> Iterator[None]:
    """Memory is freed where the last reference goes, or not at all."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def workers() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("edgeq-")}


def test_the_package_has_what_the_runtime_has_and_imports_it_late() -> None:
    assert edgeq.Model is Model and edgeq.Sampling is Sampling and set(edgeq.__all__) <= set(dir(edgeq))
    with pytest.raises(AttributeError, match="has no attribute 'Modell'"):
        _ = edgeq.Modell  # type: ignore[attr-defined]
    code = "import sys; before = set(sys.modules); import edgeq; print(*sorted(set(sys.modules) - before))"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]
    )
    assert loaded.stdout.split() == ["edgeq", "edgeq.folders", "edgeq.version"]


def test_text_is_all_of_it_however_much_was_iterated_over(model: Model) -> None:
    whole = "".join(model.generate(PROMPT, max_tokens=12))
    assert model.generate(PROMPT, max_tokens=12).text() == whole
    begun = model.generate(PROMPT, max_tokens=12)
    next(begun)
    assert begun.text() == whole == begun.text()


def test_objects_say_what_they_are(model: Model) -> None:
    session = model.session()
    generation = model.generate(PROMPT, max_tokens=3, session=session)
    assert repr(model).endswith("reference target: numpy, mode a16; context 128>") and model.file.path.name in repr(model)
    assert repr(generation) == "<Generation: 0 tokens, not finished: ''>"
    text = generation.text()
    assert repr(generation) == f"<Generation: 3 tokens, length: {text!r}>"
    assert repr(session) == f"<Session: {len(session.tokens)} of 128 positions>"
    assert repr(Sampling()) == "Sampling()"
    assert repr(Sampling(temperature=0.7, logit_bias={5: 1.0})) == "Sampling(temperature=0.7, logit_bias={5: 1.0})"
    assert {Sampling(seed=3), Sampling(seed=3)} == {Sampling(seed=3)}


def test_a_closed_model_has_no_threads_and_refuses(tiny_path: Path) -> None:
    # Its own: threads of models that earlier tests left behind may end meanwhile.
    before = workers()
    with without_collection():
        with Model.load(tiny_path, target="cpu", threads=3, context=64) as opened:
            session = opened.session()
            forked = session.fork()
            opened.generate(PROMPT, max_tokens=2, session=session).text()
            own = workers() - before
            assert len(own) == 2
        assert not any(thread.is_alive() for thread in own)
    assert "closed" in repr(opened) and "closed" in repr(session)
    for call in (lambda: opened.generate(PROMPT), lambda: session.prefill([5]), lambda: forked.decode(5)):
        with pytest.raises(InputError, match="is closed"):
            call()  # type: ignore[no-untyped-call]
    opened.close()


def test_a_closed_session_drops_its_pages_and_leaves_those_of_its_fork(model: Model) -> None:
    with model.session() as session:
        session.prefill([5] * 70)
        forked = session.fork()
    assert session._cache.pages == [] and session.tokens == []
    with pytest.raises(InputError, match="session is closed"):
        session.fork()
    assert forked.decode(6).tolist() == model.session().prefill([5] * 70 + [6]).tolist()


def test_a_closed_generation_gives_nothing_more(model: Model) -> None:
    kept = model.session()
    with model.generate(PROMPT, max_tokens=20, session=kept) as generation:
        first = next(generation)
    assert list(generation) == [] and generation.text() == first and generation.finish_reason is None
    assert "closed" in repr(generation)
    # The session that was passed goes on.
    assert model.generate(PROMPT, max_tokens=4, session=kept).text() == model.generate(PROMPT, max_tokens=4).text()


def test_a_generation_is_ended_from_another_thread(model: Model) -> None:
    generation = model.generate(PROMPT, max_tokens=100)

    def stop(tokens: int, total: int) -> None:
        generation.close()

    pieces = []
    for piece in generation.pieces():
        pieces.append(piece)
        if len(pieces) == 2:
            thread = threading.Thread(target=generation.close)
            thread.start()
            thread.join()
    assert len(pieces) == 2
    generation = model.generate([5] * 100, max_tokens=20, on_progress=stop)
    assert generation.text() == "" and generation.tokens == []


def test_sessions_of_finished_texts_are_closed(model: Model) -> None:
    with without_collection():
        before = len(model._sessions)
        model.generate(PROMPT, max_tokens=2).text()
        list(Batch(model, 2, max_tokens=2).run([PROMPT] * 3, n=2))
        assert len(model._sessions) == before
        held: Session = model.session()
        assert len(model._sessions) == before + 1 and held.left == 128


def test_the_file_recommends_sampling_and_one_rule_serves_all(tiny_path: Path) -> None:
    model = Model.load(tiny_path, target="reference", context=64)
    greedy = model.generate(PROMPT, max_tokens=16).text()
    assert Sampling.recommended(model) == Sampling()
    usual = Sampling(temperature=0.7, top_p=0.95, min_p=0.05, dry_multiplier=0.8)
    assert Sampling.recommended(model, chat=True) == usual
    assert Sampling.recommended(model, chat=True, temperature=0.0) == replace(usual, temperature=0.0)
    stored = {**model.file.metadata.generation, "temperature": 1.3, "top_p": 0.95, "repetition_penalty": 1.1}
    object.__setattr__(model.file.metadata, "generation", stored)
    wanted = Sampling(temperature=1.3, top_p=0.95, repeat_penalty=1.1)
    assert Sampling.recommended(model) == wanted
    assert Sampling.recommended(model, top_p=0.5, seed=9) == Sampling(temperature=1.3, top_p=0.5, repeat_penalty=1.1, seed=9)
    # What a file says of how to draw is not mixed with what is usual where it says nothing.
    assert Sampling.recommended(model, chat=True) == replace(wanted, dry_multiplier=0.8)
    text = model.generate(PROMPT, max_tokens=16).text()
    assert text == model.generate(PROMPT, max_tokens=16, sampling=wanted).text() != greedy
    assert [answer.text for answer in Batch(model, 1, max_tokens=16).run([PROMPT])] == [text]
    for bad in ("hot", -1, [1]):
        object.__setattr__(model.file.metadata, "generation", {"temperature": bad})
        with pytest.raises(FormatError, match="sampling defaults cannot be used: `temperature` is"):
            model.generate(PROMPT)
