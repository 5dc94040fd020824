"""Patch embedding, tower, features, positions and logits of a float32 file equal those of transformers.

Keys and values are rounded to f16 on both sides (tests/checkpoints/vision.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgeq.converters.convert import ConvertOptions, convert
from edgeq.format.container import ModelFile
from edgeq.format.records import KvCodec
from edgeq.network.config import ModelConfig, VisionConfig
from edgeq.network.rope import Rope
from edgeq.pictures.frames import Frame, Grid, patch_places
from edgeq.pictures.image import Picture
from edgeq.pictures.prompt import Prompt, positions, with_pictures
from edgeq.pictures.whole_pictures import next_run
from edgeq.runtime import Model
from edgeq.runtime.network.pictures import PictureFeatures
from edgeq.runtime.network.vision import Tower, tower
from edgeq.runtime.session.runs import BatchItem, run_together
from edgeq.targets import load
from edgeq.targets.graph import Select
from edgeq.targets.target import Options
from tests.checkpoints.vision import END, IMAGE, MODELS, START, TRAINED, build, reference

TARGETS = ("reference", "cpu")
NAMES = (*MODELS, "trained")
CUT = ("tiles", "aspect", "naflex")
"""Beginnings of the names of models whose prompts have texts around a picture."""
TOLERANCE, MAX_DIVERGENCE = 1e-3, 1e-8
GRIDS = ((1, 4, 6), (1, 2, 8), (1, 8, 2))
# Numbers of tokens, and between them pictures: indices of GRIDS.
PROMPTS: dict[str, tuple[int, ...]] = {
    "text_first": (5, 0, 7),
    "image_last": (3, 1, 0),
    "two": (4, 0, 3, 2, 6),
    "three": (0, 0, 1, 1, 3, 2, 4),
    "no_image": (70,),
}


def encoded(text: str) -> list[int]:
    """Tokens of a text beside a picture: any that tell such texts apart."""
    return [2 + len(text), 3]


@dataclass(frozen=True)
class Case:
    """A checkpoint, its float32 file and transformers' model of it."""

    path: Path
    model: Any

    @cached_property
    def vision(self) -> VisionConfig:
        found = ModelFile.open(self.path).metadata.config.vision
        assert found
        return found

    @cached_property
    def axes(self) -> int:
        return ModelFile.open(self.path).metadata.config.rope.axes

    @property
    def grids(self) -> tuple[Grid, ...]:
        side = (self.vision.image.height or self.vision.image.tile) // self.vision.patch_size
        return GRIDS if self.vision.sizes_vary else ((1, side, side),) * 3

    def pictures(self, count: int) -> list[Picture]:
        rng = np.random.default_rng(5)
        made = [
            (grid, rng.standard_normal((math.prod(grid), self.vision.patch_width), np.float32)) for grid in self.grids[:count]
        ]
        return [Picture(patches, grid, bytes([i]), (1, 1)) for i, (grid, patches) in enumerate(made)]

    def prompt(self, name: str, seed: int = 0) -> Prompt:
        parts, tokens, order = PROMPTS[name], list[int](), list[int]()
        rng = np.random.default_rng(seed)
        for place, part in enumerate(parts):
            if place % 2:
                tokens += [START, IMAGE, END]
                order.append(part)
            else:
                tokens += rng.integers(2, 2048, part).tolist()
        if name == "image_last":
            del tokens[-1]
        pictures = self.pictures(len(GRIDS))
        return with_pictures(tokens, [pictures[i] for i in order], self.vision, encoded)

    def seen(self, pictures: Sequence[Picture]) -> dict[str, Any]:
        """What transformers' model takes of pictures."""
        import torch

        if self.vision.antialiased:
            return self._padded(pictures)
        patches = np.concatenate([picture.patches for picture in pictures])
        if self.vision.sizes_vary:
            grids = torch.tensor([picture.grid for picture in pictures])
            return {"pixel_values": torch.from_numpy(patches), "image_grid_thw": grids}
        (_, rows, columns), side, merge, image = self.grids[0], self.vision.patch_size, self.vision.merge, self.vision.image
        images = (
            patches.reshape(-1, rows // merge, columns // merge, merge, merge, 3, side, side)
            .transpose(0, 5, 1, 3, 6, 2, 4, 7)
            .reshape(-1, 3, rows * side, rows * side)
        )
        rest = (image.height or image.tile) - rows * side
        pixels = torch.from_numpy(np.pad(images, ((0, 0), (0, 0), (0, rest), (0, rest))))
        # Tiles of a text are one entry of a batch.
        return {"pixel_values": pixels[None] if image.sizing == "tiles" else pixels}

    def _padded(self, pictures: Sequence[Picture]) -> dict[str, Any]:
        """Pictures of as many rows of zeros, patches row by row, in which the colours of a pixel are neighbours."""
        import torch

        side, most = self.vision.patch_size, max(len(picture.patches) for picture in pictures)
        pixels = np.zeros((len(pictures), most, self.vision.patch_width), np.float32)
        mask = np.zeros((len(pictures), most), np.int64)
        for i, picture in enumerate(pictures):
            (row, column), (_, _, columns) = patch_places(picture.grid, self.vision.merge), picture.grid
            colours = picture.patches.reshape(-1, 3, side, side).transpose(0, 2, 3, 1)
            pixels[i, row * columns + column] = colours.reshape(len(colours), -1)
            mask[i, : len(colours)] = 1
        shapes = torch.tensor([picture.grid[1:] for picture in pictures])
        seen = {"pixel_values": torch.from_numpy(pixels), "pixel_attention_mask": torch.from_numpy(mask)}
        return {**seen, "spatial_shapes": shapes}

    def expected(self, prompt: Prompt) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
        """transformers' logits [tokens, vocab] and positions [axes, tokens]."""
        import torch

        ids = torch.tensor([prompt.tokens])
        kinds = (ids == IMAGE).int()
        seen = self.seen(prompt.pictures) if prompt.pictures else {}
        if "image_grid_thw" in seen:
            seen["mm_token_type_ids"] = kinds
        elif self.vision.averaged:
            seen["token_type_ids"] = kinds
        with torch.no_grad():
            logits = self.model(ids, **seen).logits[0].numpy()
            if "image_grid_thw" not in seen:
                return logits, np.tile(np.arange(len(prompt.tokens), dtype=np.int32), (self.axes, 1))
            found, _ = self.model.model.get_rope_index(ids, mm_token_type_ids=kinds, image_grid_thw=seen["image_grid_thw"])
        return logits, found[:, 0].numpy()

    def tower(self, picture: Picture) -> dict[str, NDArray[np.float32]]:
        """transformers' patch embedding, perhaps with positions, stream after the last layer and features of a picture."""
        import torch

        wanted: dict[str, NDArray[np.float32]] = {}
        layers, seen = self.vision.num_hidden_layers, self.seen([picture])
        if "image_grid_thw" in seen:
            visual = self.model.model.visual
            hooks = {"patch": visual.patch_embed, "layers": visual.blocks[layers - 1]}
        elif self.vision.antialiased:
            visual = self.model.model.vision_tower
            hooks = {"placed": visual.embeddings, "layers": visual.encoder.layers[layers - 1]}
        elif self.vision.image.sizing == "aspect":
            # The bias of patches is in the positions.
            visual = self.model.model.vision_tower
            hooks = {"placed": visual.embeddings, "layers": visual.encoder.layer[layers - 1]}
        else:
            visual = self.model.model.vision_model if self.vision.image.tile else self.model.model.vision_tower
            hooks = {"patch": visual.embeddings.patch_embedding, "layers": visual.encoder.layers[layers - 1]}
        taken = [
            module.register_forward_hook(lambda _m, _a, out, key=key: wanted.__setitem__(key, out.numpy()))
            for key, module in hooks.items()
        ]
        with torch.no_grad():
            found = self.model.model.get_image_features(**seen)
        for hook in taken:
            hook.remove()
        features = [found.pooler_output, *getattr(found, "deepstack_features", ())]
        if "image_grid_thw" not in seen:
            (row, column), (_, _, columns) = patch_places(picture.grid, self.vision.merge), picture.grid
            if "patch" in wanted:
                wanted["patch"] = wanted["patch"][0].reshape(len(wanted["patch"][0]), -1).T[row * columns + column]
            for key in wanted.keys() - {"patch"}:
                wanted[key] = wanted[key][0][int(self.vision.class_row) :][row * columns + column]
        return wanted | {"features": np.concatenate([each[0].numpy() for each in features], 1)}


Get = Callable[[str], Case]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Get:
    known: dict[str, Case] = {}

    def get(name: str) -> Case:
        if name not in known:
            folder = tmp_path_factory.mktemp(name)
            source = TRAINED if name == "trained" else build(folder / "checkpoint", name)
            options = ConvertOptions(method="none", dtype="f32")
            convert(str(source), folder / "model.edgeq", options, lambda *_: None)
            known[name] = Case(folder / "model.edgeq", reference(source))
        return known[name]

    return get


def near(found: NDArray[np.float32], wanted: NDArray[np.float32]) -> bool:
    return found.shape == wanted.shape and float(np.abs(found - wanted).max()) < TOLERANCE * float(np.abs(wanted).max())


def logits_of(model: Model, prompt: Prompt, rows: int) -> NDArray[np.float32]:
    """The logits after every token, in runs of at most so many rows."""
    session = model.session()
    seen = PictureFeatures(model.pictures, prompt, prompt.places, Lock()) if model.pictures and prompt.places else None
    found, start = [], 0
    while start < len(prompt.tokens):
        count = next_run(prompt.places, start, rows) if model.config.whole_pictures else rows
        chunk = prompt.tokens[start : start + count]
        vectors = seen.between(start, start + len(chunk)) if seen else None
        found += run_together([BatchItem(session, chunk, range(len(chunk)), prompt.places, vectors)])
        start += len(chunk)
    return np.concatenate(found)


def check_logits(case: Case, target: str, prompt: Prompt, rows: int) -> None:
    # A picture whose tokens see all of it is one run.
    rows = max(rows, case.vision.most_tokens) if case.vision.averaged else rows
    model = Model.load(case.path, target=target, mode="a16", max_rows=rows, max_logits=rows, context=256)
    wanted, where = case.expected(prompt)
    assert np.array_equal(positions(prompt.places, 0, len(prompt.tokens), model.config.rope.axes), where)
    found = logits_of(model, prompt, rows)
    assert near(found, wanted)
    assert divergence(found, wanted) <= MAX_DIVERGENCE


def divergence(found: NDArray[np.float32], wanted: NDArray[np.float32]) -> float:
    """The mean Kullback-Leibler divergence of what is predicted after each token, from what transformers predicts."""
    ours, theirs = (x - np.log(np.exp(x - x.max(1, keepdims=True)).sum(1, keepdims=True)) - x.max(1, keepdims=True)
                    for x in (found.astype(np.float64), wanted.astype(np.float64)))  # fmt: skip
    return float((np.exp(theirs) * (theirs - ours)).sum(1).mean())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("target", TARGETS)
def test_the_tower_equals_transformers(case: Get, target: str, name: str) -> None:
    found = case(name)
    file, pictures, classes = ModelFile.open(found.path), found.pictures(3), int(found.vision.class_feature)
    wanted = [found.tower(picture) for picture in pictures]
    made = Tower(file, load(target), Options("a16", threads=1), 40)
    features = made.encode(np.concatenate([picture.patches for picture in pictures]), found.grids)
    assert near(features, np.concatenate([each["features"] for each in wanted]))
    # The same list of operations, cut short.
    graph = tower(file.metadata)
    last = next(i for i, o in enumerate(graph.operations) if isinstance(o, Select)) - (found.vision.project_norm == "patch")
    for key, count in (("patch", 2), ("placed", 3), ("layers", last)):
        if key not in wanted[0]:
            continue
        short = replace(graph, operations=(*graph.operations[:count], Select(-1, ("x",))), result="x")
        program = load(target).compile(short, file, Options("a16", 1, max_rows=40, max_logits=40, kv=KvCodec()))
        made.program = program
        for picture, expected in zip(pictures, wanted, strict=True):
            # transformers leaves the layers' outputs window by window.
            order = Frame.of(picture.grid, made.config).order if key == "layers" else slice(None)
            assert near(made.encode(picture.patches, [picture.grid])[classes:][order], expected[key]), key


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("name", "prompt", "rows"),
    [
        ("head80", "three", 256),
        ("padded", "two", 7),
        ("trained", "text_first", 1),
        ("taps", "two", 7),
        ("states", "three", 7),
        ("states_experts", "text_first", 256),
        ("tiles", "three", 7),
        ("tiles_mistral", "two", 256),
        ("averaged", "three", 7),
        ("aspect", "three", 7),
        ("aspect_rms", "two", 256),
        ("naflex", "three", 7),
        ("naflex", "two", 1),
        ("clip_llama", "three", 256),
        ("clip_mistral", "text_first", 7),
        ("siglip_qwen2", "image_last", 256),
    ],
)
def test_logits_equal_transformers(case: Get, target: str, name: str, prompt: str, rows: int) -> None:
    check_logits(case(name), target, case(name).prompt(prompt), rows)


WAYS = {"at_once": 256, "chunked": 7, "token_by_token": 1}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("rows", "prompt", "name", "target"),
    [
        # Every model with every prompt, on targets and in ways to cut the prompt by turns: every two of the four meet.
        pytest.param(rows, prompt, name, TARGETS[(i + j) % 2], id=f"{way}-{prompt}-{name}-{TARGETS[(i + j) % 2]}")
        for (i, name), (j, prompt) in product(enumerate(NAMES), enumerate(PROMPTS))
        for n, (way, rows) in enumerate(WAYS.items())
        if (i - j) % 3 == n
    ],
)
def test_logits_equal_transformers_everywhere(case: Get, target: str, name: str, prompt: str, rows: int) -> None:
    check_logits(case(name), target, case(name).prompt(prompt), rows)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    "name",
    [
        "padded",
        *(pytest.param(x, marks=pytest.mark.exhaustive) for x in NAMES if not x.startswith(("padded", *CUT))),
    ],
)
def test_a_second_turn_equals_transformers(case: Get, target: str, name: str) -> None:
    found = case(name)
    model = Model.load(found.path, target=target, mode="a16", context=256)
    first, session = found.prompt("text_first"), model.session()
    session.prefill(first)
    second = found.prompt("two")
    more = [*first.tokens, 9, 10, START, *[IMAGE] * second.places[1].tokens, END, 12]
    both = with_pictures(
        [*(t for t in first.tokens if t != IMAGE), 9, 10, START, IMAGE, END, 12][:6]
        + [IMAGE, END, *first.tokens[-7:]]
        + [9, 10, START, IMAGE, END, 12],
        [first.pictures[0], second.pictures[1]],
        found.vision,
        encoded,
    )
    assert both.tokens == more
    kept = session.keep_prefix(both)
    assert kept == len(first.tokens)
    assert near(session.prefill(both.after(kept)), found.expected(both)[0][-1])
    assert near(session.decode(33), found.expected(replace(both, tokens=[*both.tokens, 33]))[0][-1])


def test_a_picture_makes_a_difference(case: Get) -> None:
    """Else the tests above would pass with pictures that are not seen."""
    found = case("trained")
    prompt = found.prompt("text_first")
    other = replace(prompt, pictures=(replace(prompt.pictures[0], stored=prompt.pictures[0].stored[::-1].copy()),))
    assert not near(found.expected(other)[0], found.expected(prompt)[0])


def test_what_taps_add_makes_a_difference(case: Get, monkeypatch: pytest.MonkeyPatch) -> None:
    found, encode = case("taps"), Tower.encode
    prompt, width = found.prompt("text_first"), found.vision.out_hidden_size

    def without(tower: Tower, *arguments: Any) -> NDArray[np.float32]:
        features = encode(tower, *arguments)
        features[:, width:] = 0
        return features

    monkeypatch.setattr(Tower, "encode", without)
    model = Model.load(found.path, target="reference", mode="a16", context=256)
    assert not near(logits_of(model, prompt, 256), found.expected(prompt)[0])


WRONG: dict[str, tuple[str, Callable[[ModelConfig], ModelConfig]]] = {
    "axes one after another": ("states", lambda c: replace(c, rope=replace(c.rope, interleaved=False))),
    "other sections": ("states", lambda c: replace(c, rope=replace(c.rope, sections=(10, 1, 1)))),
    "one axis": ("states", lambda c: replace(c, rope=replace(c.rope, sections=(), interleaved=False))),
    "all of a head turns": (
        "states",
        lambda c: replace(c, rope=replace(c.rope, sections=(8, 6, 6), partial_rotary_factor=1.0)),
    ),
    "another activation of the tower": ("states", lambda c: _of_tower(c, hidden_act="quick_gelu")),
    "a norm behind the joined": ("tiles", lambda c: _of_tower(c, project_norm="none")),
    "the eps of the layers before a projector": ("aspect", lambda c: _of_tower(c, project_eps=0.0)),
    "no norm over the joined": ("naflex", lambda c: _of_tower(c, project_eps=0.0)),
    "another eps over the joined": ("naflex", lambda c: _of_tower(c, project_eps=3e-2)),
    "tokens of a picture that see what is before them": ("averaged", lambda c: replace(c, whole_pictures=False)),
    "a window that a picture widens": ("averaged", lambda c: replace(c, sliding_windows=(9, 0, 9))),
    "another base in the tower": ("states", lambda c: _of_tower(c, rope=Rope(1e4, "axial", sections=(10, 10)))),
}


def _of_tower(config: ModelConfig, **fields: Any) -> ModelConfig:
    assert config.vision
    return replace(config, vision=replace(config.vision, **fields))


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_choice_shows(case: Get, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the tests above would pass with it."""
    which, change = WRONG[name]
    found, opened = case(which), ModelFile.open

    def other(path: Path) -> ModelFile:
        file = opened(path)
        file.metadata = replace(file.metadata, config=change(file.metadata.config))
        return file

    prompt, wanted = found.prompt("text_first"), found.expected(found.prompt("text_first"))[0]
    monkeypatch.setattr(ModelFile, "open", other)
    model = Model.load(found.path, target="reference", mode="a16", context=256)
    assert divergence(logits_of(model, prompt, 256), wanted) > 10 * MAX_DIVERGENCE
