"""Pictures among the tokens of a session: positions, prefixes, chunks, forks, files, batches, drafts, order of rows."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from edgeq.errors import FormatError, InputError
from edgeq.format.container import ModelFile
from edgeq.network.image_config import ImageConfig
from edgeq.network.rope import picture_positions
from edgeq.pictures.image import Picture
from edgeq.pictures.prompt import PicturePlace, positions, with_pictures
from edgeq.runtime import Model, Prompt, Session
from edgeq.runtime import model as model_module
from edgeq.runtime.network import vision as vision_module
from edgeq.runtime.network.pictures import Pictures, check_image_tokens
from edgeq.runtime.session.runs import BatchItem, run_together
from edgeq.targets import TargetChoice, pick
from edgeq.targets.rows import VISION as SEEN
from edgeq.targets.rows import Rows
from edgeq.targets.target import Target
from tests.runtime.network.random_vlm import CONFIG, IMAGE_TOKEN, VISION, no_texts, picture, write

A, B, WIDE = picture(3, 4, 1), picture(3, 4, 2), picture(2, 9, 3)
"""A and B have the same tokens."""
TARGETS = ("reference", "cpu")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("vlm") / "random.edgeq")


@pytest.fixture(scope="module")
def model(path: Path) -> Model:
    return Model.load(path, target="reference", context=200)


def prompt(*parts: int | Picture) -> Prompt:
    """Tokens and pictures one after another."""
    tokens = [IMAGE_TOKEN if isinstance(part, Picture) else part for part in parts]
    return with_pictures(tokens, [part for part in parts if isinstance(part, Picture)], VISION, no_texts)


TEXT = [int(t) for t in np.random.default_rng(0).integers(2, 80, 30)]
PROMPTS = {
    "picture first": prompt(A, *TEXT[:5]),
    "text first": prompt(*TEXT[:5], A, 7),
    "picture last": prompt(*TEXT[:5], A),
    "only a picture": prompt(WIDE),
    "three pictures": prompt(3, A, 4, WIDE, B, *TEXT[:9]),
    "no picture": prompt(*TEXT),
}


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """The grids of all pictures that towers encode from now on."""
    found: list[tuple[int, int, int]] = []
    encode = vision_module.Tower.encode

    def spy(self: Any, pixels: Any, grids: Sequence[tuple[int, int, int]], *rest: Any) -> Any:
        found.extend(grids)
        return encode(self, pixels, grids, *rest)

    monkeypatch.setattr(vision_module.Tower, "encode", spy)
    return found


def test_a_prompt_has_as_many_image_tokens_as_features() -> None:
    found = prompt(3, A, 4, WIDE)
    assert found.tokens == [3, *[IMAGE_TOKEN] * 12, 4, *[IMAGE_TOKEN] * 18] and found.visual_tokens == 30
    assert [(p.start, p.end, p.grid) for p in found.places] == [(1, 13, (1, 3, 4)), (14, 32, (1, 2, 9))]
    rest = found.after(10)
    assert rest.tokens == found.tokens[10:] and [p.start for p in rest.places] == [-9, 4] and rest.pictures == (A, WIDE)
    assert found.after(13).pictures == (WIDE,) and found.after(33).places == ()


@pytest.mark.parametrize("pictures", [[], [A, B]])
def test_images_and_places_have_to_be_as_many(pictures: list[Picture]) -> None:
    with pytest.raises(
        InputError, match=f"has 1 place for an image .* and {len(pictures)} images are given; give one for each"
    ):
        with_pictures([3, IMAGE_TOKEN], pictures, VISION, no_texts)


def test_a_picture_that_the_model_cannot_take_is_refused(model: Model) -> None:
    other = Picture(A.patches[:, 1:], A.grid, A.digest)
    with pytest.raises(InputError, match="read for another model"):
        model.prompt([IMAGE_TOKEN, 3], images=[other])
    with pytest.raises(InputError, match="read for another model"):
        model.prompt(prompt(other, 3))
    with pytest.raises(InputError, match="has 110 tokens, and this model is loaded for 100"):
        model.prompt([IMAGE_TOKEN, 3], images=[picture(10, 11, 4)])
    with pytest.raises(InputError, match="has its pictures already"):
        model.prompt(prompt(A, 3), images=[A])


def test_what_follows_a_picture_goes_on_after_its_largest_position() -> None:
    places = prompt(3, 5, WIDE, 6, A, 7, 8).places
    found = positions(places, 0, 36, 3)
    assert found[:, :2].tolist() == [[0, 1]] * 3
    assert (found[:, 2:20] == picture_positions(2, (1, 2, 9))).all()
    assert found[:, 20].tolist() == [11] * 3
    assert (found[:, 21:33] == picture_positions(12, (1, 3, 4))).all()
    assert found[:, 33:].tolist() == [[16, 17, 18]] * 3
    for start in range(36):
        assert (positions(places, start, 36, 3) == found[:, start:]).all()
        assert (positions(places, 0, start, 3) == found[:, :start]).all()
    assert positions(places, 4, 9, 1).tolist() == [[4, 5, 6, 7, 8]]


def test_after_a_part_of_a_picture_the_next_position_is_one_above_the_largest_kept(model: Model) -> None:
    session = model.session()
    session.prefill(prompt(3, WIDE, 4))
    session.rewind(5)
    assert [(p.start, p.kept) for p in session.places] == [(1, 4)]
    # One row of 9 columns, of which 4 are kept: columns 1 to 4.
    assert positions(session.places, 5, 7, 3).tolist() == [[5, 6]] * 3


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", PROMPTS)
def test_chunks_give_what_a_whole_prompt_gives(path: Path, name: str, target: str) -> None:
    whole = Model.load(path, target=target, context=200).session().prefill(PROMPTS[name])
    with Model.load(path, target=target, context=200, max_rows=5) as chunked:
        assert np.array_equal(chunked.session().prefill(PROMPTS[name]), whole)
    with Model.load(path, target=target, context=200, max_rows=1, max_logits=1) as single:
        assert np.array_equal(single.session().prefill(PROMPTS[name]), whole)


def test_another_picture_is_not_taken_for_one_with_the_same_tokens(model: Model, encoded: list[Any]) -> None:
    session = model.session()
    first, second = prompt(*TEXT[:5], A, 7, 8), prompt(*TEXT[:5], B, 7, 8)
    assert first.tokens == second.tokens
    ours = session.prefill(first)
    assert session.keep_prefix(second) == 5
    theirs = session.prefill(second.after(5))
    assert not np.array_equal(ours, theirs) and len(encoded) == 2
    assert np.array_equal(theirs, model.session().prefill(second))


def test_a_kept_picture_is_not_encoded_again(model: Model, encoded: list[Any]) -> None:
    session = model.session()
    session.prefill(prompt(3, A, 4))
    longer = prompt(3, A, 4, *TEXT, WIDE, 9)
    assert session.keep_prefix(longer) == 14
    logits = session.prefill(longer.after(14))
    assert encoded == [A.grid, WIDE.grid] and session.vision_s > 0
    assert np.array_equal(logits, model.session().prefill(longer))


def test_a_prompt_that_ends_in_a_picture_runs_its_last_token_again(model: Model) -> None:
    session, same = model.session(), prompt(3, A)
    wanted = session.prefill(same)
    assert session.keep_prefix(same) == 12 and session.places[0].kept == 11
    assert np.array_equal(session.prefill(same.after(12)), wanted) and session.places == same.places


def test_text_in_place_of_a_picture_is_noticed(model: Model) -> None:
    session = model.session()
    session.prefill(prompt(3, A, 4))
    assert session.keep_prefix([3, *[IMAGE_TOKEN] * 12, 4, 5]) == 1


def test_decoding_goes_on_after_a_picture(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tokens have one position each, which is told once."""
    run, ran = model.program.run, list[Rows]()
    monkeypatch.setattr(model.program, "run", lambda rows, mode: (ran.append(rows), run(rows, mode))[1])
    session = model.session()
    session.prefill(prompt(3, WIDE))
    for token in TEXT[:3]:
        logits = session.decode(token)
    assert [len(rows.positions) for rows in ran] == [3, 1, 1, 1]
    assert np.array_equal(logits, model.session().prefill(prompt(3, WIDE, *TEXT[:3])))


def test_a_fork_has_the_pictures(model: Model) -> None:
    session = model.session()
    session.prefill(prompt(3, A, 4))
    forked = session.fork()
    session.rewind(1)
    assert np.array_equal(forked.decode(5), model.session().prefill(prompt(3, A, 4, 5)))
    assert forked.keep_prefix(prompt(3, B, 4)) == 1


def test_a_saved_session_has_the_pictures(model: Model, tmp_path: Path, encoded: list[Any]) -> None:
    session, longer = model.session(), prompt(3, A, 4, WIDE, 5)
    session.prefill(longer)
    session.save(tmp_path / "seen.session")
    loaded = model.session()
    loaded.load(tmp_path / "seen.session")
    assert loaded.places == session.places
    assert loaded.keep_prefix(longer) == len(longer.tokens) - 1
    assert np.array_equal(loaded.decode(5), session.logits) and len(encoded) == 2


def test_a_session_cut_within_a_picture_is_saved_as_it_is(model: Model, tmp_path: Path) -> None:
    session = model.session()
    session.prefill(prompt(3, A, 4))
    session.rewind(6)
    session.save(tmp_path / "cut.session")
    loaded = model.session()
    loaded.load(tmp_path / "cut.session")
    assert loaded.places == session.places and loaded.places[0].kept == 5


def test_text_after_a_part_of_a_picture_keeps_its_positions(model: Model, tmp_path: Path) -> None:
    session = model.session()
    session.prefill(prompt(3, A, 4))
    session.rewind(6)
    session.prefill([IMAGE_TOKEN, 9])
    session.save(tmp_path / "cut.session")
    loaded = model.session()
    loaded.load(tmp_path / "cut.session")
    assert loaded.places == session.places and loaded.places[0].kept == 5
    assert np.array_equal(loaded.decode(5), session.decode(5))
    # The image token after the part is text, not the rest of the picture.
    assert loaded.keep_prefix(prompt(3, A, 4)) == 6


def test_the_span_of_a_part_is_that_of_its_positions() -> None:
    for grid in np.ndindex(3, 3, 4):
        whole = picture_positions(0, (grid[0] + 1, grid[1] + 1, grid[2] + 1))
        for kept in range(1, whole.shape[1] + 1):
            place = PicturePlace(5, (grid[0] + 1, grid[1] + 1, grid[2] + 1), b"", kept)
            assert place.span == whole[:, :kept].max() + 1


@pytest.mark.parametrize(
    ("start", "rows", "kept"), [(0, 3, 18), (14, 0, 18), (15, 3, 18), (16, 3, 18), (14, 1 << 31, 18), (14, 2, 0), (14, 2, 19)]
)
def test_hostile_places_of_a_saved_session_are_refused(model: Model, tmp_path: Path, start: int, rows: int, kept: int) -> None:
    """The first picture has tokens 1 to 12, the second begins at 14."""
    session, file = model.session(), tmp_path / "seen.session"
    session.prefill(prompt(3, A, 4, WIDE, 5))
    session.save(file)
    data = bytearray(file.read_bytes()[:-16])
    at = 80 + 4 * len(session.tokens) + 36
    data[at : at + 20] = b"".join(n.to_bytes(4, "little") for n in (start, 1, rows, 9, kept))
    file.write_bytes(bytes(data) + xxhash.xxh3_128(data).digest())
    if start == 15:
        # Within the tokens and after the first: sound, though another picture.
        model.session().load(file)
        return
    with pytest.raises(FormatError, match="a picture of"):
        model.session().load(file)


def test_rows_of_pictures_come_first_and_keep_their_order() -> None:
    count = 6
    rows = Rows(
        tokens=np.arange(count, dtype=np.int32),
        positions=np.arange(2 * count, dtype=np.int32).reshape(2, -1),
        slots=np.arange(count, dtype=np.int32) + 10,
        sessions=np.array([0, 0, 0, 1, 1, 1], np.int32),
        pages=[[], []],
        wanted=np.array([5, 2], np.int32),
        vectors=np.zeros((3, 4), np.float32),
        vector_of=np.array([-1, 0, -1, 1, 2, -1], np.int32),
        modality=np.array([0, 1, 0, 1, 1, 0], np.uint8),
    )
    found = rows.by_modality()
    assert found.tokens.tolist() == [1, 3, 4, 0, 2, 5] and found.slots.tolist() == [11, 13, 14, 10, 12, 15]
    assert found.positions.tolist() == [[1, 3, 4, 0, 2, 5], [7, 9, 10, 6, 8, 11]]
    assert found.vector_of is not None and found.vector_of.tolist() == [0, 1, 2, -1, -1, -1]
    assert found.modality is not None and found.modality.tolist() == [SEEN] * 3 + [0] * 3
    assert found.tokens[found.wanted].tolist() == [5, 2] and found.sessions.tolist() == [0, 1, 1, 0, 0, 1]


def turns(model: Model) -> list[np.ndarray[Any, Any]]:
    """Logits of everything that one model can be asked: pictures and text, chunks, a second turn, decoding, a batch."""
    found = [model.session().prefill(each) for each in PROMPTS.values()]
    session = model.session()
    session.prefill(prompt(3, A, 4))
    found += [session.prefill(prompt(5, WIDE, 6)), session.decode(7)]
    sessions = [model.session() for _ in range(3)]
    for each, start in zip(sessions, (PROMPTS["picture last"], PROMPTS["no picture"], PROMPTS["three pictures"]), strict=True):
        each.prefill(start)
    found += [logits[0] for logits in run_together([BatchItem(each, [9], [0]) for each in sessions])]
    if model.program.options.max_rows < 100:
        return found
    # Prompts of unequal lengths in one run.
    items = [_item(model.session(), each) for each in (PROMPTS["text first"], PROMPTS["no picture"], PROMPTS["only a picture"])]
    return [*found, *(logits[-1] for logits in run_together(items))]


def _item(session: Session, whole: Prompt) -> BatchItem:
    from edgeq.runtime.network.pictures import PictureFeatures

    assert session._pictures is not None
    seen = PictureFeatures(session._pictures, whole, whole.places, session.lock)
    return BatchItem(session, whole.tokens, [len(whole.tokens) - 1], whole.places, seen.between(0, len(whole.tokens)))


@pytest.mark.parametrize("mode", ["a16", "a8"])
@pytest.mark.parametrize("target", TARGETS)
def test_the_order_of_rows_changes_no_bit(path: Path, target: str, mode: Any) -> None:
    for rows in (0, 7):
        with Model.load(path, target=target, mode=mode, context=200, max_rows=rows, max_logits=7) as model:
            as_they_come = turns(model)
        with Model.load(
            path, target=target, mode=mode, context=200, max_rows=rows, max_logits=7, row_order="modality"
        ) as model:
            assert all(np.array_equal(a, b) for a, b in zip(as_they_come, turns(model), strict=True))


def test_pictures_of_one_size_leave_no_choice_of_tokens() -> None:
    image = ImageConfig(sizing="fixed", mean=(0.5,) * 3, std=(0.5,) * 3, height=24, width=16)
    config = replace(CONFIG, vision=replace(VISION, image=image))
    check_image_tokens(config, 6)
    with pytest.raises(InputError, match="`image_tokens` is 5; expected 6, those of every picture of this model"):
        check_image_tokens(config, 5)
    assert Pictures(config, 8, None, lambda *_: pytest.fail("not asked for")).most_tokens == 6


def test_a_closed_model_holds_no_target(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The context of a GPU that failed ends with the last that holds it; the model itself may be held on to."""
    targets: list[weakref.ref[Target]] = []

    def picked(name: str | None, file: ModelFile) -> TargetChoice:
        choice = pick(name, file)
        targets.append(weakref.ref(choice.target))
        return choice

    monkeypatch.setattr(model_module, "pick", picked)
    model = Model.load(path, target="reference", context=200)
    model.prepare_images()
    model.close()
    gc.collect()
    assert [target() for target in targets] == [None]
    with pytest.raises(InputError, match="the model is closed"):
        model.prepare_images()
