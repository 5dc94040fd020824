"""Pictures among the tokens of a session whose layers have a state: the bits of a plain run, wherever it is cut."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeq.converters.convert import ConvertOptions, convert
from edgeq.network.config import VisionConfig
from edgeq.pictures.image import Picture
from edgeq.pictures.prompt import with_pictures
from edgeq.runtime import Model, Prompt, Sampling
from edgeq.runtime.batching.job import Job
from edgeq.runtime.batching.scheduler import Scheduler
from edgeq.runtime.request import Request
from edgeq.runtime.speculative.speculator import DraftSource
from edgeq.targets.rows import PAGE
from tests.checkpoints.drafts import add_draft_layer
from tests.checkpoints.vision import IMAGE, build
from tests.runtime.network.random_vlm import IMAGE_TOKEN, STATES, VISION, no_texts, picture, write

A, B, WIDE = picture(3, 4, 1), picture(3, 4, 2), picture(2, 9, 3)
"""A and B have the same tokens."""
TEXT = [int(t) for t in np.random.default_rng(0).integers(2, 80, 30)]
TARGETS = ("reference", "cpu")


def prompt(*parts: int | Picture) -> Prompt:
    """Tokens and pictures one after another."""
    tokens = [IMAGE_TOKEN if isinstance(part, Picture) else part for part in parts]
    return with_pictures(tokens, [part for part in parts if isinstance(part, Picture)], VISION, no_texts)


LONG = prompt(*TEXT, A, WIDE, B, 5, 6)
"""The last picture lies on both sides of a page's end."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("states") / "states.edgeq", STATES)


@pytest.fixture(scope="module", params=TARGETS)
def model(request: pytest.FixtureRequest, path: Path) -> Iterator[Model]:
    with Model.load(path, target=request.param, context=200, threads=1) as loaded:
        yield loaded


def plain(model: Model, whole: Prompt) -> np.ndarray[Any, Any]:
    return model.session().prefill(whole)


@pytest.mark.parametrize("rows", [1, 7])
def test_chunks_give_what_a_whole_prompt_gives(model: Model, path: Path, rows: int) -> None:
    with Model.load(path, target=model.target, context=200, max_rows=rows, max_logits=1, threads=1) as chunked:
        assert np.array_equal(chunked.session().prefill(LONG), plain(model, LONG))


def test_the_order_of_rows_changes_no_bit(model: Model, path: Path) -> None:
    with Model.load(path, target=model.target, context=200, row_order="modality", threads=1) as other:
        assert np.array_equal(other.session().prefill(LONG), plain(model, LONG))


def test_another_picture_is_not_taken_for_one_with_the_same_tokens(model: Model) -> None:
    session, first, second = model.session(), prompt(*TEXT[:5], A, 7, 8), prompt(*TEXT[:5], B, 7, 8)
    assert first.tokens == second.tokens
    ours = session.prefill(first)
    kept = session.keep_prefix(second)
    assert kept <= 5
    theirs = session.prefill(second.after(kept))
    assert not np.array_equal(ours, theirs) and np.array_equal(theirs, plain(model, second))


def test_a_session_goes_on_from_every_place_within_a_picture(model: Model) -> None:
    whole = prompt(3, WIDE, 4, 5)
    wanted, session = plain(model, whole), model.session()
    for length in range(len(whole.tokens)):
        session.prefill(whole.after(len(session.tokens)))
        # What the last run added can be forgotten; what was before it only where a page ends.
        kept = session.rewind(length)
        assert kept <= length and (kept == length or not kept)
        assert np.array_equal(session.prefill(whole.after(kept)), wanted), length
        session.rewind(0)


def test_forks_and_files_have_states_and_pictures(model: Model, tmp_path: Path) -> None:
    session, loaded = model.session(), model.session()
    session.prefill(LONG)
    session.save(tmp_path / "seen.session")
    loaded.load(tmp_path / "seen.session")
    assert loaded.places == session.places
    wanted = plain(model, prompt(*TEXT, A, WIDE, B, 5, 6, WIDE, 9))
    more = prompt(WIDE, 9)
    assert np.array_equal(session.fork().prefill(more), wanted)
    assert np.array_equal(loaded.prefill(more), wanted)


def asks(model: Model) -> tuple[VisionConfig, Picture, Picture, list[int]]:
    """How a converted model sees, two pictures of noise, and a text."""
    vision = model.config.vision
    assert vision is not None
    rng, grid = np.random.default_rng(1), (1, 6, 8)
    first, other = (
        Picture(rng.standard_normal((48, vision.patch_width), np.float32), grid, bytes([i]) * 16, (48, 36)) for i in (1, 2)
    )
    return vision, first, other, [int(t) for t in rng.integers(2, 2048, 47)]


def test_prompts_that_begin_alike_share_a_snapshot_only_with_the_same_pictures(tmp_path: Path) -> None:
    path = convert(str(build(tmp_path / "states", "states")), tmp_path / "m.edgeq", ConvertOptions(), lambda *_: None).path
    with Model.load(path, context=200, threads=1) as model:
        vision, first, other, text = asks(model)

        def asked(*pictures: Picture) -> Prompt:
            tokens = [*text, *[IMAGE] * len(pictures), 5, 6]
            return with_pictures(tokens, pictures, vision, no_texts)

        scheduler = Scheduler(model, 2, shares_prefixes=True)
        # The second picture lies on both sides of a page's end.
        prompts = ((asked(first, other), 0), (asked(first, other), PAGE), (asked(first, first), 0), (asked(other, other), 0))
        assert len({tuple(whole.tokens) for whole, _ in prompts}) == 1
        for whole, cached in prompts:
            ticket = scheduler.submit(Job(whole, Request(max_tokens=6, ignore_eos=True), Sampling(), 1))
            found: list[int] = []
            while scheduler.busy:
                for update in scheduler.step():
                    assert update.error is None
                    found += [piece.token for piece in update.pieces]
            alone = model.generate(whole, max_tokens=6, sampling=Sampling(), ignore_eos=True)
            alone.text()
            assert found == alone.tokens and ticket.cached_tokens == cached


@pytest.mark.parametrize("target", TARGETS)
def test_drafts_after_pictures_change_no_text(target: str, tmp_path: Path) -> None:
    """By the layer that was trained for them, which sees the rows of the pictures too."""
    add_draft_layer(source := build(tmp_path / "states", "states"))
    path = convert(str(source), tmp_path / "m.edgeq", ConvertOptions(), lambda *_: None).path
    given: dict[str, Any] = {"target": target, "context": 200, "max_rows": 7, "threads": 1}
    with Model.load(path, draft_layer=True, **given) as model, Model.load(path, **given) as without:
        vision, first, other, text = asks(model)
        whole = with_pictures([*text, IMAGE, 5, IMAGE, 6], [first, other], vision, no_texts)
        session, wanted = model.session(), without.generate(whole, max_tokens=24, ignore_eos=True)
        wanted.text()
        drafts: tuple[DraftSource, ...] = ("mtp", "auto")
        for draft in drafts:
            found = model.generate(whole, max_tokens=24, ignore_eos=True, draft=draft, gamma=2, session=session)
            found.text()
            assert found.tokens == wanted.tokens and sum(found.measurement.speculation.drafted) > 0
        # What was drafted and forgotten, and pictures of another prompt, leave nothing behind.
        changed = with_pictures([*text[:40], IMAGE, 7], [other], vision, no_texts)
        kept = session.keep_prefix(changed)
        assert np.array_equal(session.prefill(changed.after(kept)), plain(without, changed))
