"""The order of a tower's rows and what each patch sees; what a tower refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgeq.converters.convert import ConvertOptions, convert
from edgeq.errors import InputError, ResourceError
from edgeq.network.config import VisionConfig
from edgeq.network.rope import Rope
from edgeq.pictures.frames import FRAME, WINDOW, Frame
from edgeq.runtime import Model
from edgeq.runtime.network.vision import Tower, tower
from edgeq.targets import load
from edgeq.targets.target import MemoryNeed, Options
from tests.checkpoints.vision import TRAINED


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("tower") / "m.edgeq"
    return convert(str(TRAINED), output, ConvertOptions(), lambda *_: None).path


@pytest.fixture(scope="module")
def config(path: Path) -> VisionConfig:
    vision = Model.load(path, target="reference").config.vision
    assert vision
    return vision


@pytest.mark.parametrize("grid", [(1, 10, 6), (1, 4, 4), (2, 2, 14)])
def test_a_patch_sees_its_window_and_its_frame(config: VisionConfig, grid: tuple[int, int, int]) -> None:
    config = replace(config, window_size=2, window_layers=(0,))
    frame, count = Frame.of(grid, config), grid[1] * grid[2]
    assert sorted(frame.order.tolist()) == list(range(count))
    # Patches that become one feature stay together, in their order.
    assert (np.diff(frame.order.reshape(-1, 4), axis=1) == 1).all()
    window = frame.places // (config.merge * config.window_size)
    for i in range(count):
        first, end = frame.spans[WINDOW, :, i]
        seen = np.zeros(count, bool)
        seen[first:end] = True
        assert np.array_equal(seen, (window == window[:, i : i + 1]).all(0))
        assert frame.spans[FRAME, :, i].tolist() == [0, count]


def test_without_windows_rows_come_as_the_picture_has_them(config: VisionConfig) -> None:
    assert np.array_equal(Frame.of((1, 4, 6), config).order, np.arange(24))


def test_every_frame_is_seen_alone_and_progress_is_told(path: Path, config: VisionConfig) -> None:
    file = Model.load(path, target="reference").file
    made = Tower(file, load("cpu"), Options("a16", threads=1), 40)
    pixels = np.random.default_rng(0).standard_normal((48, config.patch_width)).astype(np.float32)
    told: list[tuple[int, int]] = []
    whole = made.encode(pixels, [(2, 4, 4), (1, 2, 8)], lambda done, total: told.append((done, total)))
    assert told == [(16, 48), (32, 48), (48, 48)]
    apart = [made.encode(pixels[a:b], [grid]) for a, b, grid in ((0, 16, (1, 4, 4)), (16, 32, (1, 4, 4)), (32, 48, (1, 2, 8)))]
    assert np.array_equal(whole, np.concatenate(apart))
    assert made.program.options.mode == "a8" and made.encode(pixels[:0], []).shape == (0, config.out_hidden_size)


def test_what_a_tower_refuses(path: Path, config: VisionConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    file, target = Model.load(path, target="reference").file, load("reference")
    made = Tower(file, target, Options("a16"), 16)
    pixels = np.zeros((24, config.patch_width), np.float32)
    for grid in ((1, 4, 6), (1, 3, 8), (1, 0, 0)):
        with pytest.raises(ValueError, match="patches"):
            made.encode(pixels[: grid[1] * grid[2]], [grid])
    with pytest.raises(ValueError, match="pictures of 16 patches"):
        made.encode(pixels, [(1, 4, 4)])
    monkeypatch.setattr(type(target), "room", lambda *_: MemoryNeed(1 << 20, 1 << 20))
    with pytest.raises(ResourceError, match="allow fewer tokens a picture"):
        Tower(file, target, Options("a16"), 4000)


def test_a_text_model_has_no_tower(path: Path) -> None:
    metadata = Model.load(path, target="reference").file.metadata
    config = replace(metadata.config, vision=None, rope=Rope(1e4))
    with pytest.raises(InputError, match="reads text alone"):
        tower(replace(metadata, config=config))
