"""Gemma 3: tokens and pixels are the processor's, and tokens of a picture see all of it however a prompt is cut."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import PreTrainedTokenizerFast
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor

from edgeq.converters.convert import ConvertOptions, convert
from edgeq.converters.families.table import recognise
from edgeq.errors import CheckpointError, UnsupportedError
from edgeq.pictures.prompt import Prompt
from edgeq.pictures.whole_pictures import next_run, seen_ends
from edgeq.runtime import Model, Sampling
from edgeq.runtime.batching.job import Job
from edgeq.runtime.batching.scheduler import Scheduler
from edgeq.runtime.request import Request
from tests.checkpoints.vision import BEGIN, build, reference

TEXT = f"Of{BEGIN}what is\n{BEGIN} there, and a text that goes on for more than one page of the cache? " + "Or not? " * 20


class Case(NamedTuple):
    folder: Path
    path: Path


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = build(tmp_path_factory.mktemp("averaged") / "checkpoint", "averaged")
    convert(str(folder), folder.parent / "m.edgeq", ConvertOptions(method="none", dtype="f32"), lambda *_: None)
    return Case(folder, folder.parent / "m.edgeq")


def picture(seed: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (40, 57, 3), np.uint8))


def load(case: Case, **options: int) -> Model:
    return Model.load(case.path, target="cpu", mode="a16", context=400, threads=1, **options)


def prompt(model: Model, text: str = TEXT, *seeds: int) -> Prompt:
    return model.prompt(text, images=[picture(seed) for seed in seeds or (1, 2)])


def test_tokens_pixels_and_logits_are_those_of_transformers(case: Case) -> None:
    settings = json.loads((case.folder / "preprocessor_config.json").read_text())
    names = {"image_token": "<image_soft_token>", "boi_token": BEGIN, "eoi_token": "<end_of_image>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(case.folder / "tokenizer.json"), extra_special_tokens=names)
    processor = Gemma3Processor(Gemma3ImageProcessorPil(**settings), tokenizer, image_seq_length=4)
    seen = processor(images=[[picture(1), picture(2)]], text=[TEXT], return_tensors="pt")
    with torch.no_grad():
        wanted = reference(case.folder)(**{k: v for k, v in seen.items() if k != "attention_mask"}).logits[0, -1].double()
    with load(case) as model:
        made = prompt(model)
        assert made.tokens == seen["input_ids"][0].tolist()
        pixels = seen["pixel_values"].numpy().reshape(2, 3, 2, 2, 6, 2, 2, 6).transpose(0, 2, 5, 3, 6, 1, 4, 7)
        patches = pixels.reshape(2, 16, -1)
        assert all(np.abs(x.patches - y).max() <= 1e-6 for x, y in zip(made.pictures, patches, strict=True))
        found = torch.from_numpy(model.session().prefill(made)).double()
    wanted, found = wanted.log_softmax(-1), found.log_softmax(-1)
    assert (wanted.exp() * (wanted - found)).sum() <= 1e-8


def test_a_prompt_in_any_chunks_gives_the_same_bits(case: Case) -> None:
    with load(case) as model:
        wanted = model.session().prefill(prompt(model))
        session = model.session()
        session.prefill(prompt(model))
        for length in range(1, 24):
            again = model.session() if length % 5 else session.fork()
            again.prefill(prompt(model)) if length % 5 else None
            left = again.rewind(length)
            # Of a picture that sees itself no part is kept.
            assert left <= length and not any(p.start < left < p.end for p in prompt(model).places)
            assert np.array_equal(again.prefill(prompt(model).after(left)), wanted), length
    for rows in (4, 7):
        with load(case, max_rows=rows) as model:
            assert np.array_equal(model.session().prefill(prompt(model)), wanted), rows


def test_texts_that_run_together_give_what_they_give_alone(case: Case) -> None:
    with load(case, max_rows=8, max_logits=4) as model:
        prompts = [prompt(model), prompt(model, TEXT, 1, 3), prompt(model, f"{BEGIN}?", 4)]
        scheduler = Scheduler(model, 3, shares_prefixes=True)
        tickets = [scheduler.submit(Job(each, Request(max_tokens=5, ignore_eos=True), Sampling(), 1)) for each in prompts]
        found: dict[int, list[int]] = {}
        while scheduler.busy:
            for update in scheduler.step():
                assert update.error is None
                found.setdefault(tickets.index(update.ticket), []).extend(piece.token for piece in update.pieces)
        for number, each in enumerate(prompts):
            alone = model.generate(each, max_tokens=5, sampling=Sampling(), ignore_eos=True)
            alone.text()
            assert found[number] == alone.tokens


@pytest.mark.parametrize(
    ("key", "value", "kind", "message"),
    [
        ("mm_tokens_per_image", 3, UnsupportedError, "mm_tokens_per_image 3 is not supported with 4 x 4 patches"),
        ("mm_tokens_per_image", 9, UnsupportedError, "the square of a number that divides 4"),
        ("mm_tokens_per_image", 0, CheckpointError, "mm_tokens_per_image is 0; expected an integer from 1 to 16"),
        ("image_token_index", 9999, CheckpointError, "image_token_id is 9999 of 2056"),
    ],
)
def test_what_a_gemma_3_cannot_have_is_named(case: Case, key: str, value: int, kind: type[Exception], message: str) -> None:
    config, settings = (json.loads((case.folder / f"{name}.json").read_text()) for name in ("config", "preprocessor_config"))
    config.pop("image_token_id", None)
    with pytest.raises(kind, match=message):
        recognise({**config, key: value}, settings)


def test_a_run_takes_whole_pictures(case: Case) -> None:
    with load(case) as model:
        (place, other), slots = prompt(model).places, np.arange(40, dtype=np.int32)
    places = place, other
    assert next_run(places, 0, place.start) == place.start
    assert next_run(places, 0, place.start + 1) == place.start
    assert next_run(places, place.start, 1) == 4 == next_run(places, place.start + 1, 2) + 1
    ends = seen_ends(places, slots)
    assert ends[place.start : place.end].tolist() == [place.end] * 4 and ends[0] == 1 and ends[place.end] == place.end + 1
    with pytest.raises(ValueError, match="cuts the picture"):
        seen_ends(places, slots[: place.start + 2])
