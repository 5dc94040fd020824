"""A picture in tiles from its file to logits: pixels, texts beside them and positions are those of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import PreTrainedTokenizerFast
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.smolvlm.configuration_smolvlm import SmolVLMVisionConfig
from transformers.models.smolvlm.modeling_smolvlm import SmolVLMVisionEmbeddings
from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

from edgeq.converters.convert import ConvertOptions, convert
from edgeq.pictures.frames import interpolated
from edgeq.runtime import Model
from tests.checkpoints.vision import build, reference
from tests.edgeq.lfm2_vl_processor import processed
from tests.edgeq.lfm2_vl_processor import shown as shown_of_lfm

MAX_DIVERGENCE = 1e-8
IMAGE = "<|image_pad|>"
AROUND, WHOLE = "<fake_token_around_image>", "<global-img>"
SIZES = {"one tile": (36, 36), "in a row": (108, 30), "every tile": (100, 90), "a column": (20, 61)}


class Case(NamedTuple):
    """tokens: of a tile"""

    folder: Path
    path: Path
    model: Any
    tokens: int


@pytest.fixture(scope="module", params=["tiles", "tiles_mistral", "aspect", "aspect_rms", "naflex", "naflex_plain"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = build(tmp_path_factory.mktemp("tiles") / "checkpoint", request.param)
    path = folder.parent / "m.edgeq"
    convert(str(folder), path, ConvertOptions(method="none", dtype="f32"), lambda *_: None)
    return Case(folder, path, reference(folder), 1 if request.param in ("tiles_mistral", "aspect_rms") else 4)


def seen_of(case: Case, pictures: list[Image.Image]) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Pixels of the tiles and their shapes, and what stands in a text for each picture, by transformers' processors."""
    settings = json.loads((case.folder / "preprocessor_config.json").read_text())
    if "Lfm2Vl" in settings["image_processor_type"]:
        seen = processed(settings, pictures)
        texts = [shown_of_lfm(settings, seen, index, IMAGE) for index in range(len(pictures))]
        return {key: seen[key] for key in ("pixel_values", "pixel_attention_mask", "spatial_shapes")}, texts
    if "GotOcr2" in settings["image_processor_type"]:
        # As InternVL's processor does, whose tokenizer has to bring names for its tokens.
        found = GotOcr2ImageProcessorPil(**settings | {"crop_to_patches": True})(pictures, return_tensors="pt")
        pixels = {"pixel_values": found["pixel_values"]}
        return pixels, [f"<img>{IMAGE * case.tokens * int(count)}</img>" for count in found["num_patches"]]
    found = Idefics3ImageProcessorPil(**settings)([pictures], return_row_col_info=True, return_tensors="pt")
    shown = [
        get_image_prompt_string(rows, columns, case.tokens, AROUND, IMAGE, WHOLE)
        for rows, columns in zip(found["rows"][0], found["cols"][0], strict=True)
    ]
    return {"pixel_values": found["pixel_values"]}, shown


def divergence(found: np.ndarray, wanted: np.ndarray) -> float:
    ours, theirs = (x.astype(np.float64) - np.logaddexp.reduce(x.astype(np.float64)) for x in (found, wanted))
    return float((np.exp(theirs) * (theirs - ours)).sum())


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("target", ["reference", "cpu"])
def test_logits_after_pictures_are_those_of_transformers(case: Case, target: str, name: str) -> None:
    rng = np.random.default_rng(3)
    width, height = SIZES[name]
    pictures = [Image.fromarray(rng.integers(0, 256, (h, w, 3), np.uint8)) for h, w in ((height, width), (50, 70))]
    seen, shown = seen_of(case, pictures)
    text = "Of {}what is\nthere,{} and here?"
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(case.folder / "tokenizer.json"))
    ids = tokenizer(text.format(*shown), return_tensors="pt").input_ids
    with Model.load(case.path, target=target, mode="a16", context=400, threads=1) as model:
        prompt = model.prompt(text.format(IMAGE, IMAGE), images=pictures)
        assert prompt.tokens == ids[0].tolist()
        found = model.session().prefill(prompt)
    with torch.no_grad():
        wanted = case.model(ids, **seen).logits[0, -1].numpy()
    assert divergence(found, wanted) <= MAX_DIVERGENCE
    blank = torch.ones_like(seen["pixel_values"])
    with torch.no_grad():
        other = case.model(ids, **seen | {"pixel_values": blank}).logits[0, -1].numpy()
    assert divergence(other, wanted) > 100 * MAX_DIVERGENCE


@pytest.mark.parametrize("side", [14, 24, 26, 27, 28, 32])
def test_a_patch_has_the_position_of_its_row_and_column(side: int) -> None:
    """The sides of published models: transformers finds positions by shares of the side."""
    made = SmolVLMVisionEmbeddings(SmolVLMVisionConfig(hidden_size=1, image_size=side, patch_size=1))
    made.position_embedding.weight.data = torch.arange(side**2).float()[:, None]
    for parameter in made.patch_embedding.parameters():
        parameter.data.zero_()
    with torch.no_grad():
        found = made(torch.zeros(1, 3, side, side), torch.ones(1, side, side, dtype=torch.bool))[0, :, 0]
    assert found.tolist() == list(range(side**2))


@pytest.mark.parametrize("grid", [(3, 2), (5, 7), (9, 4), (16, 16), (1, 20)])
def test_positions_are_resized_as_torch_does_with_antialiasing(grid: tuple[int, int]) -> None:
    table = torch.randn(9, 9, 4, generator=torch.Generator().manual_seed(1))
    resized = [
        torch.nn.functional.interpolate(table.permute(2, 0, 1)[None], grid, mode="bilinear", antialias=antialias)[0]
        for antialias in (True, False)
    ]
    config: Any = SimpleNamespace(antialiased=True, merge=1)
    found = interpolated(table.numpy(), (1, *grid), config).reshape(*grid, 4)
    wanted, without = (each.permute(1, 2, 0).numpy() for each in resized)
    assert np.abs(found - wanted).max() < 1e-6
    # Where one edge gets smaller it makes a difference.
    assert (np.abs(found - without).max() > 1e-2) == (min(grid) < 9)


def test_the_second_picture_is_kept_where_the_first_ends(case: Case) -> None:
    """Tiles are pictures of their own: a session knows each by its pixels."""
    rng = np.random.default_rng(4)
    first, other = (Image.fromarray(rng.integers(0, 256, (90, 100, 3), np.uint8)) for _ in range(2))
    changed = first.copy()
    changed.paste(other.crop((60, 60, 100, 90)), (60, 60))
    with Model.load(case.path, target="reference", mode="a16", context=400, threads=1) as model:
        one, two = (model.prompt(f"See {IMAGE}?", images=[each]) for each in (first, changed))
        assert one.tokens == two.tokens and len(one.pictures) >= 5 and one.places[0].tokens == case.tokens
        session = model.session()
        session.prefill(one)
        kept = session.keep_prefix(two)
        # The upper left tile is the same, the last ones are not; a state is kept where a page ends.
        assert (0 if model.config.state_layers else one.places[0].end) <= kept <= one.places[-2].start
        assert np.array_equal(session.prefill(two.after(kept)), model.session().prefill(two))
