"""Patch embedding, tower, features, positions and logits of a float32 file equal those of transformers.

Keys and values are rounded to f16 on both sides (vision_checkpoints.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from vision_checkpoints import END, IMAGE, MODELS, START, TRAINED, build, reference

from edgeq.converters.convert import ConvertOptions, convert
from edgeq.frames import Frame
from edgeq.image import Picture
from edgeq.prompt import Prompt, positions, with_pictures
from edgeq.records import KvCodec
from edgeq.runtime import Model
from edgeq.runtime.pictures import Seen
from edgeq.runtime.session import BatchItem, run_together
from edgeq.runtime.vision import Tower, tower
from edgeq.targets import load
from edgeq.targets.graph import Select
from edgeq.targets.target import Options

TARGETS = ("reference", "cpu")
NAMES = (*MODELS, "trained")
TOLERANCE = 1e-3
GRIDS = ((1, 4, 6), (1, 2, 8), (1, 8, 2))
# Numbers of tokens, and between them pictures: indices of GRIDS.
PROMPTS: dict[str, tuple[int, ...]] = {
    "text_first": (5, 0, 7),
    "image_last": (3, 1, 0),
    "two": (4, 0, 3, 2, 6),
    "three": (0, 0, 1, 1, 3, 2, 4),
    "no_image": (70,),
}
Arrays = dict[str, NDArray[np.float32]]


@dataclass(frozen=True)
class Case:
    """A checkpoint, its float32 file and transformers' model of it."""

    path: Path
    model: Any

    def pictures(self, count: int) -> list[Picture]:
        vision = self.model.config.vision_config
        width = 3 * vision.temporal_patch_size * vision.patch_size**2
        rng = np.random.default_rng(5)
        made = [rng.standard_normal((t * h * w, width), np.float32) for t, h, w in GRIDS[:count]]
        return [Picture(x, g, bytes([i]), (1, 1)) for i, (x, g) in enumerate(zip(made, GRIDS, strict=False))]

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
        return with_pictures(tokens, [pictures[i] for i in order], IMAGE, 2)

    def expected(self, prompt: Prompt) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
        """transformers' logits [tokens, vocab] and positions [3, tokens]."""
        import torch

        ids = torch.tensor([prompt.tokens])
        kinds = (ids == IMAGE).int()
        seen: dict[str, Any] = {}
        if prompt.pictures:
            grids = torch.tensor([picture.grid for picture in prompt.pictures])
            pixels = torch.from_numpy(np.concatenate([picture.patches for picture in prompt.pictures]))
            seen = {"pixel_values": pixels, "image_grid_thw": grids, "mm_token_type_ids": kinds}
        with torch.no_grad():
            logits = self.model(ids, **seen).logits[0].numpy()
            if not prompt.pictures:
                return logits, np.tile(np.arange(len(prompt.tokens), dtype=np.int32), (3, 1))
            found, _ = self.model.model.get_rope_index(ids, mm_token_type_ids=kinds, image_grid_thw=seen["image_grid_thw"])
        return logits, found[:, 0].numpy()


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
    seen = Seen(model.pictures, prompt, prompt.places, Lock()) if model.pictures and prompt.places else None
    found = []
    for start in range(0, len(prompt.tokens), rows):
        chunk = prompt.tokens[start : start + rows]
        vectors = seen.between(start, start + len(chunk)) if seen else None
        found += run_together([BatchItem(session, chunk, range(len(chunk)), prompt.places, vectors)])
    return np.concatenate(found)


def check_logits(case: Case, target: str, prompt: Prompt, rows: int) -> None:
    model = Model.load(case.path, target=target, mode="a16", max_rows=rows, max_logits=rows, context=256)
    wanted, where = case.expected(prompt)
    assert np.array_equal(positions(prompt.places, 0, len(prompt.tokens), 3), where)
    assert near(logits_of(model, prompt, rows), wanted)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("target", TARGETS)
def test_the_tower_equals_transformers(case: Get, target: str, name: str) -> None:
    import torch

    found = case(name)
    file = Model.load(found.path, target="reference").file
    pictures, visual = found.pictures(3), found.model.model.visual
    wanted: Arrays = {}
    hooks = {"patch": visual.patch_embed, "layers": visual.blocks[-1]}
    for key, module in hooks.items():
        module.register_forward_hook(lambda _m, _a, out, key=key: wanted.__setitem__(key, out.numpy()))
    pixels = np.concatenate([picture.patches for picture in pictures])
    with torch.no_grad():
        features = visual(torch.from_numpy(pixels), torch.tensor(GRIDS)).pooler_output
    made = Tower(file, load(target), Options("a16", threads=1), 40)
    assert near(made.encode(pixels, GRIDS), features.numpy())
    # The same list of operations, cut short.
    graph = tower(file.metadata)
    for key, count in (("patch", 2), ("layers", next(i for i, o in enumerate(graph.operations) if isinstance(o, Select)) - 1)):
        short = replace(graph, operations=(*graph.operations[:count], Select(-1, ("x",))), result="x")
        program = load(target).compile(short, file, Options("a16", 1, max_rows=40, max_logits=40, kv=KvCodec()))
        made.program = program
        done = 0
        for picture in pictures:
            part = slice(done, done + len(picture.patches))
            # transformers leaves the layers' outputs window by window.
            order = Frame.of(picture.grid, made.config).order if key == "layers" else slice(None)
            assert near(made.encode(picture.patches, [picture.grid])[order], wanted[key][part]), key
            done = part.stop


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("name", "prompt", "rows"), [("head80", "three", 256), ("padded", "two", 7), ("trained", "text_first", 1)]
)
def test_logits_equal_transformers(case: Get, target: str, name: str, prompt: str, rows: int) -> None:
    check_logits(case(name), target, case(name).prompt(prompt), rows)


@pytest.mark.exhaustive
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("rows", (256, 7, 1), ids=("at_once", "chunked", "token_by_token"))
def test_logits_equal_transformers_everywhere(case: Get, target: str, name: str, prompt: str, rows: int) -> None:
    check_logits(case(name), target, case(name).prompt(prompt), rows)


@pytest.mark.parametrize("target", TARGETS)
def test_a_second_turn_equals_transformers(case: Get, target: str) -> None:
    found = case("padded")
    model = Model.load(found.path, target=target, mode="a16", context=256)
    first, session = found.prompt("text_first"), model.session()
    session.prefill(first)
    more = [*first.tokens, 9, 10, START, *[IMAGE] * 4, END, 12]
    second = found.prompt("two")
    both = with_pictures(
        [*(t for t in first.tokens if t != IMAGE), 9, 10, START, IMAGE, END, 12][:6]
        + [IMAGE, END, *first.tokens[-7:]]
        + [9, 10, START, IMAGE, END, 12],
        [first.pictures[0], second.pictures[1]],
        IMAGE,
        2,
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
    other = replace(prompt, pictures=(replace(prompt.pictures[0], patches=prompt.pictures[0].patches[::-1].copy()),))
    assert not near(found.expected(other)[0], found.expected(prompt)[0])
