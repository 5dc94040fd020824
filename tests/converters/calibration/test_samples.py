"""A folder of calibration pictures: what is read of it, and what is refused in one line."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from edgeq.converters.calibration.samples import FILE, PictureSamples, read_samples
from edgeq.converters.checkpoint.download import HubAccess
from edgeq.converters.checkpoint.tokenizer import TextAssets, read_text
from edgeq.converters.families.network import described
from edgeq.converters.importers import open_source
from edgeq.converters.planning.method_options import check_method_options
from edgeq.converters.planning.options import ConvertOptions
from edgeq.converters.planning.preflight import preflight
from edgeq.errors import CheckpointError, EdgeqError, InputError, UnsupportedError
from tests.checkpoints.vision import IMAGE, TRAINED

pytestmark = pytest.mark.usefixtures("works_here")

GOOD = {"image": "a.png", "question": "What does the sign say?", "answer": "A B"}


@pytest.fixture(scope="module")
def model() -> tuple[Any, TextAssets]:
    source = open_source(str(TRAINED), HubAccess())
    _, config = described(source)
    return config, read_text(source, config.vocab_size)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rng = random.Random(0)
    for name, size in (("a.png", (140, 56)), ("b.jpg", (60, 120))):
        pixels = Image.new("RGB", size)
        pixels.putdata([(rng.randrange(256), 3, 4) for _ in range(size[0] * size[1])])
        pixels.save(tmp_path / name)
    return tmp_path


def read(model: tuple[Any, TextAssets], folder: Path, *lines: object, most: int | None = None) -> PictureSamples:
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    (folder / FILE).write_text(text, encoding="utf-8")
    return read_samples(folder, *model, most)


def test_a_sample_is_the_conversation_with_its_answer(model: tuple[Any, TextAssets], folder: Path) -> None:
    several = {"images": ["a.png", "b.jpg"], "question": "Which <|image_pad|> is longer?", "answer": "blue"}
    found = read(model, folder, GOOD, "", several)
    first, second = found.samples
    # 140 x 56 pixels are 5 x 2 tokens of 28 x 28 pixels; a placeholder that is spelled out is text.
    assert first.tokens.count(IMAGE) == 10 and [place.tokens for place in second.places] == [10, 2 * 4]
    assert second.tokens.count(IMAGE) == 18 and first.tokens[-1] == 1
    assert [place.start for place in first.places] == [first.tokens.index(IMAGE)]
    assert found.tokens == len(first.tokens) + len(second.tokens) and found.longest == len(second.tokens)
    assert len(found.pictures) == 3 and found.few(1).samples == (first,)
    other = read(model, folder, GOOD | {"answer": "A C"}, several)
    assert other.sha256 != found.sha256 == read(model, folder, GOOD, several).sha256
    assert [s.tokens for s in read(model, folder, *[GOOD] * 7, several, most=2).samples] == [first.tokens] * 2


def test_a_picture_that_changes_meanwhile_is_refused(model: tuple[Any, TextAssets], folder: Path) -> None:
    (picture,) = read(model, folder, GOOD).pictures
    assert picture.read().grid == picture.grid
    Image.new("RGB", (140, 56)).save(folder / "a.png")
    with pytest.raises(CheckpointError, match=r"a\.png: the picture changed"):
        picture.read()


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "no file": (lambda folder: folder / FILE, r"samples\.jsonl: cannot read it: No such file"),
    "a pipe": (lambda folder: os.mkfifo(folder / FILE), "not a regular file"),
    "endless": (lambda folder: (folder / FILE).symlink_to("/dev/zero"), "not a regular file"),
    "empty": (lambda folder: (folder / FILE).write_text("\n \n"), "no samples; expected a line for each"),
    "not JSON": (lambda folder: (folder / FILE).write_text("{"), "line 1: not JSON"),
    "deep": (lambda folder: (folder / FILE).write_text("[" * 100_000), "line 1: not JSON"),
    "not an object": (lambda folder: (folder / FILE).write_text("[1]"), "line 1: not an object"),
    "bytes": (lambda folder: (folder / FILE).write_bytes(b"\xff\xfe{}"), "line 1: not JSON"),
    "long": (lambda folder: (folder / FILE).write_text(" " * 10 + "1" * (1 << 20)), "line 1: 1048586 bytes; at most 1 MiB"),
}
LINES: dict[str, tuple[dict[str, object], str]] = {
    "no answer": ({"answer": None}, "line 2: answer is 'None'; every sample needs its answer, a text"),
    "empty answer": ({"answer": " "}, "line 2: answer is ' '"),
    "question": ({"question": 7}, "line 2: question is '7'"),
    "no image": ({"image": None}, "line 2: expected `image`, a file name, or `images`"),
    "both": ({"images": ["a.png"]}, "line 2: expected `image`"),
    "many": ({"image": None, "images": ["a.png"] * 65}, "a list of 1 to 64 of them"),
    "none": ({"image": None, "images": []}, "line 2: expected `image`"),
    "outside": ({"image": "../a.png"}, r"line 2: image '\.\./a\.png' is outside of the folder"),
    "absolute": ({"image": "/etc/passwd"}, "is outside of the folder"),
    "missing": ({"image": "c.png"}, r"line 2: .*c\.png: cannot read it: No such file"),
    "NUL": ({"image": "a\0.png"}, r"line 2: .*a\\x00\.png': no file can have this name"),
    "surrogate": ({"image": "\ud800"}, "line 2: .*: no file can have this name"),
    "folder": ({"image": "."}, "line 2: .*a folder; give the path of a picture"),
    "no picture": ({"image": FILE}, "line 2: .*samples.jsonl"),
    "too long": ({"question": "word " * 3000}, "tokens with its pictures; this model takes at most 1024"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_folder_without_samples_is_refused(model: tuple[Any, TextAssets], folder: Path, name: str) -> None:
    write, message = BAD[name]
    write(folder)
    with pytest.raises(InputError, match=message) as caught:
        read_samples(folder, *model)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", LINES)
def test_a_line_that_is_no_sample_is_refused(model: tuple[Any, TextAssets], folder: Path, name: str) -> None:
    change, message = LINES[name]
    with pytest.raises(InputError, match=message) as caught:
        read(model, folder, GOOD, GOOD | change)
    assert "\n" not in str(caught.value)


def test_hostile_pictures_are_refused_by_line(model: tuple[Any, TextAssets], folder: Path) -> None:
    whole = (folder / "a.png").read_bytes()
    wide = Image.new("L", (4001, 20))
    wide.save(folder / "wide.png")
    for name, data in {"cut.png": whole[: len(whole) // 2], "empty.png": b"", "noise.png": bytes(range(256))}.items():
        (folder / name).write_bytes(data)
    for name in ("cut.png", "empty.png", "noise.png", "wide.png"):
        with pytest.raises(InputError, match=rf"line 2: .*{name}") as caught:
            read(model, folder, GOOD, GOOD | {"image": name})
        assert "\n" not in str(caught.value), name


def test_models_that_cannot_use_them_are_refused(model: tuple[Any, TextAssets], folder: Path) -> None:
    from dataclasses import replace

    config, text = model
    (folder / FILE).write_text(json.dumps(GOOD))
    with pytest.raises(InputError, match="this model reads text alone"):
        read_samples(folder, replace(config, vision=None, rope=replace(config.rope, sections=())), text)
    with pytest.raises(UnsupportedError, match="no chat template"):
        read_samples(folder, config, TextAssets({"tokenizer.json": text.blobs["tokenizer.json"]}, text.generation))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "mquant"}, "--activations modality needs calibration pictures"),
        ({"method": "mquant", "activations": "block"}, "--method mquant needs calibration pictures"),
        ({"method": "rtn", "activations": "static"}, "--activations static needs calibration pictures"),
        ({"method": "resq", "calibration": "here"}, "--method resq calibrates with a text"),
        ({"method": "mquant", "calibration": "here", "calibration_length": 64}, "--calibration-length goes with a"),
        ({"method": "gptq", "calibration": "here", "allocation": {"head": "i4 g32"}}, "a budget or a plan goes with a"),
        (
            {"method": "mquant", "calibration": "here", "activation_bits": 16},
            "16 bits have no constant scales; choose 4, 6 or 8",
        ),
        (
            {"method": "mquant", "calibration": "here", "rotate": False, "split_row": True},
            "--split-row goes with a",
        ),
        ({"method": "rtn", "activation_bits": 6}, "6 bits of activations have a scale for every token"),
        ({"method": "awq", "activations": "static"}, "--activations goes with --method"),
    ],
)
def test_options_that_do_not_go_together(folder: Path, options: dict[str, Any], message: str) -> None:
    (folder / FILE).write_text(json.dumps(GOOD))
    if options.get("calibration"):
        options = options | {"calibration": folder}
    with pytest.raises(EdgeqError, match=message):
        settings = ConvertOptions(**options)
        check_method_options(settings)
        preflight(str(TRAINED), settings)
