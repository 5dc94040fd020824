"""PaliGemma: the tokens of a prompt see each other both ways, those of an answer what is before them.

Logits of a float32 file equal those of transformers; keys and values are rounded to f16 on both sides
(tests/checkpoints/vision.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from edgeq.converters.convert import ConvertOptions, convert
from edgeq.converters.families import recognise
from edgeq.errors import EdgeqError, InputError, UnsupportedError
from edgeq.format.container import ModelFile
from edgeq.network.config import ModelConfig
from edgeq.pictures.image import Picture
from edgeq.pictures.prompt import Prompt, with_pictures
from edgeq.runtime import Batch, Model
from edgeq.runtime.batching.job import Job
from edgeq.runtime.batching.scheduler import Scheduler
from edgeq.runtime.request import Request
from edgeq.runtime.sampling import Sampling
from edgeq.runtime.session.runs import BatchItem, run_together
from tests.checkpoints.vision import IMAGE, build, reference

TARGETS = ("reference", "cpu")
TOLERANCE, MAX_DIVERGENCE = 1e-3, 1e-8
ANSWER = [7, 1033, 900, 12, 5, 2000, 64, 3, 3, 411, 18, 19, 20]
Logits = NDArray[np.float32]


@dataclass(frozen=True)
class Case:
    """A checkpoint, its float32 file and transformers' model of it."""

    folder: Path
    path: Path

    @cached_property
    def model(self) -> Any:
        return reference(self.folder)

    @cached_property
    def config(self) -> ModelConfig:
        return ModelFile.open(self.path).metadata.config

    def prompt(self, pictures: int, texts: int = 5) -> Prompt:
        vision, rng = self.config.vision, np.random.default_rng(5)
        assert vision
        side = vision.image.height // vision.patch_size
        shape = side * side, vision.patch_width
        made = [Picture(rng.standard_normal(shape, np.float32), (1, side, side), bytes([i]), (1, 1)) for i in range(pictures)]
        tokens = [*[IMAGE] * pictures, 0, *rng.integers(2, 2048, texts).tolist()]
        return with_pictures(tokens, made, vision, lambda text: [])

    def expected(self, prompt: Prompt, answer: list[int]) -> Logits:
        """transformers' logits after every token."""
        import torch

        vision, ids = self.config.vision, torch.tensor([[*prompt.tokens, *answer]])
        assert vision
        seen: dict[str, Any] = {}
        if prompt.pictures:
            (_, rows, columns), side = prompt.pictures[0].grid, vision.patch_size
            patches = np.stack([picture.patches for picture in prompt.pictures])
            images = patches.reshape(-1, rows, columns, 3, side, side).transpose(0, 3, 1, 4, 2, 5)
            rest = vision.image.height - rows * side
            images = images.reshape(-1, 3, rows * side, columns * side)
            seen["pixel_values"] = torch.from_numpy(np.pad(images, ((0, 0), (0, 0), (0, rest), (0, rest))))
        kinds = torch.tensor([[0] * len(prompt.tokens) + [1] * len(answer)])
        with torch.no_grad():
            found: Logits = self.model(ids, token_type_ids=kinds, **seen).logits[0].numpy()
        return found


Get = Callable[[str], Case]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Get:
    known: dict[str, Case] = {}

    def get(name: str) -> Case:
        if name not in known:
            folder = tmp_path_factory.mktemp(name)
            source = build(folder / "checkpoint", name)
            convert(str(source), folder / "model.edgeq", ConvertOptions(method="none", dtype="f32"), lambda *_: None)
            known[name] = Case(source, folder / "model.edgeq")
        return known[name]

    return get


def logits_of(model: Model, prompt: Prompt, answer: list[int], pieces: tuple[int, ...]) -> Logits:
    """The logits after every token, the answer's in runs of so many rows, the last number of them again and again."""
    session = model.session()
    features = session.features(prompt)
    vectors = features.between(0, len(prompt.tokens)) if features else None
    item = BatchItem(session, prompt.tokens, range(len(prompt.tokens)), prompt.places, vectors, whole=True)
    found, done = run_together([item]), 0
    while done < len(answer):
        piece = answer[done : done + pieces[0]]
        found += run_together([BatchItem(session, piece, range(len(piece)))])
        done, pieces = done + len(piece), pieces[1:] or pieces
    return np.concatenate(found)


def divergence(found: Logits, wanted: Logits) -> float:
    ours, theirs = (x - np.log(np.exp(x - x.max(1, keepdims=True)).sum(1, keepdims=True)) - x.max(1, keepdims=True)
                    for x in (found.astype(np.float64), wanted.astype(np.float64)))  # fmt: skip
    return float((np.exp(theirs) * (theirs - ours)).sum(1).mean())


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("name", "pictures", "pieces"),
    [
        ("paligemma", 2, (5, 1)),
        ("paligemma2", 1, (1,)),
        pytest.param("paligemma", 0, (13,), marks=pytest.mark.exhaustive),
        pytest.param("paligemma2", 2, (4, 7), marks=pytest.mark.exhaustive),
    ],
)
def test_logits_equal_transformers(case: Get, target: str, name: str, pictures: int, pieces: tuple[int, ...]) -> None:
    prompt, wanted = case(name).prompt(pictures), case(name).expected(case(name).prompt(pictures), ANSWER)
    model = Model.load(case(name).path, target=target, mode="a16", context=192, max_logits=192)
    found = logits_of(model, prompt, ANSWER, pieces)
    assert np.abs(found - wanted).max() < TOLERANCE * np.abs(wanted).max()
    assert divergence(found, wanted) <= MAX_DIVERGENCE


WRONG: dict[str, tuple[str, Callable[[ModelConfig], ModelConfig]]] = {
    "a prompt that sees what is before": ("paligemma", lambda c: replace(c, bidirectional_prompt=False)),
    "a larger window": ("paligemma2", lambda c: replace(c, sliding_windows=(12, 0))),
    "scores without a cap": ("paligemma2", lambda c: replace(c, attn_logit_softcapping=None)),
    "logits without a cap": ("paligemma2", lambda c: replace(c, final_logit_softcapping=None)),
    "embeddings as they are": ("paligemma", lambda c: replace(c, embedding_multiplier=1.0)),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_choice_shows(case: Get, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the test above would pass with it."""
    which, change = WRONG[name]
    found, opened = case(which), ModelFile.open

    def other(path: Path) -> ModelFile:
        file = opened(path)
        file.metadata = replace(file.metadata, config=change(file.metadata.config))
        return file

    prompt = found.prompt(1)
    wanted = found.expected(prompt, ANSWER)
    monkeypatch.setattr(ModelFile, "open", other)
    model = Model.load(found.path, target="reference", mode="a16", context=192, max_logits=192)
    assert divergence(logits_of(model, prompt, ANSWER, (1,)), wanted) > 10 * MAX_DIVERGENCE


def test_prompts_and_pixels_are_those_of_transformers(case: Get) -> None:
    from transformers import AutoTokenizer, PaliGemmaProcessor, SiglipImageProcessorPil

    found = case("paligemma")
    assert found.config.vision
    side, tokens = found.config.vision.image.height, found.config.vision.most_tokens
    processor = PaliGemmaProcessor(
        SiglipImageProcessorPil(size={"height": side, "width": side}, image_seq_length=tokens),
        AutoTokenizer.from_pretrained(found.folder),
    )
    noise = np.random.default_rng(2).integers(0, 256, (50, 40, 3), np.uint8)
    pictures = [Image.fromarray(noise), Image.fromarray(noise[::-1, :20].copy())]
    wanted = processor(images=[pictures], text="<image><image>def main():")
    model = Model.load(found.path, target="reference", context=192)
    prompt = model.chat_prompt([{"role": "user", "content": "def main():"}], images=pictures)
    assert prompt.tokens == list(wanted["input_ids"][0])
    assert prompt.tokens == model.prompt("<image><image><|begin|>def main():\n", images=pictures).tokens
    for picture, pixels in zip(prompt.pictures, wanted["pixel_values"], strict=True):
        rows, columns, patch = *picture.grid[1:], found.config.vision.patch_size
        inside = np.asarray(pixels)[:, : rows * patch, : columns * patch].reshape(3, rows, patch, columns, patch)
        patches = inside.transpose(1, 3, 0, 2, 4).reshape(rows * columns, -1)
        assert np.abs(picture.patches - patches).max() < 1e-6
    with pytest.raises(InputError, match="answers one question"):
        model.chat_prompt([{"role": "system", "content": "x"}, {"role": "user", "content": "y"}])


def test_bos_is_not_put_first_where_the_template_has_it(case: Get, tmp_path: Path) -> None:
    """Gemma's own tokenizer puts it before a text."""
    import shutil

    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing

    folder = shutil.copytree(case("paligemma2").folder, tmp_path / "checkpoint")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = TemplateProcessing(single="<|begin|> $A", pair=None, special_tokens=[("<|begin|>", 0)])
    tokenizer.save(str(folder / "tokenizer.json"))
    convert(str(folder), tmp_path / "m.edgeq", ConvertOptions(method="none"), lambda *_: None)
    models = [Model.load(path, target="reference", context=192) for path in (tmp_path / "m.edgeq", case("paligemma2").path)]
    question, picture = [{"role": "user", "content": "x"}], Image.new("RGB", (9, 9))
    first, second = (model.chat_prompt(question, images=[picture]).tokens for model in models)
    assert first == second and first.count(0) == 1


def test_a_prompt_is_one_run_and_is_forgotten_as_one(case: Get, tmp_path: Path) -> None:
    found = case("paligemma2")
    model, prompt = Model.load(found.path, target="cpu", mode="a16", context=192), found.prompt(1, 100)
    length = len(prompt.tokens)
    plain = model.session()
    wanted = [plain.prefill(prompt).copy(), *(plain.decode(token).copy() for token in ANSWER)]
    session = model.session()
    session.prefill(prompt)
    fork = session.fork()
    session.save(tmp_path / "saved")
    for i, token in enumerate(ANSWER[:6]):
        assert np.array_equal(session.decode(token), wanted[i + 1])
    # Tokens of an answer can be forgotten, those of the prompt not alone.
    assert session.rewind(length + 2) == length + 2
    assert np.array_equal(session.decode(ANSWER[2]), wanted[3])
    assert np.array_equal(list(session.all_logits(ANSWER[3:]))[0], wanted[4:])
    assert session.keep_prefix(replace(prompt, tokens=[*prompt.tokens, 9])) == 0 and not session.tokens
    assert np.array_equal(session.prefill(prompt), wanted[0])
    assert fork.rewind(length - 1) == 0
    loaded = model.session()
    loaded.load(tmp_path / "saved")
    assert np.array_equal(loaded.decode(ANSWER[0]), wanted[1])
    assert loaded.rewind(length - 1) == 0
    # A text that is not read as a prompt is seen from its beginning on.
    logits = next(loaded.all_logits(prompt.tokens[-5:]))
    assert np.array_equal(logits[:2], next(model.session().all_logits(prompt.tokens[-5:-3])))


def test_drafts_and_batches_give_the_same_text(case: Get) -> None:
    model = Model.load(case("paligemma2").path, target="cpu", mode="a16", context=192)
    prompts = [case("paligemma2").prompt(count, texts) for count, texts in ((1, 3), (0, 40), (2, 12))]
    alone = [model.generate(prompt, max_tokens=140, ignore_eos=True) for prompt in prompts]
    texts = [(generation.text(), generation.tokens) for generation in alone]
    drafted = model.generate(prompts[0], max_tokens=140, ignore_eos=True, draft="lookup", gamma=3)
    assert (drafted.text(), drafted.tokens) == texts[0]
    together = Batch(model, 3, max_tokens=140, ignore_eos=True).run(prompts)
    assert {answer.index: answer.tokens for answer in together} == {i: tokens for i, (_, tokens) in enumerate(texts)}
    # Too few pages for three: the youngest makes room, and reads its prompt and what it said again.
    scheduler = Scheduler(model, 3, pages=7, shares_prefixes=True)
    request = Request(max_tokens=140, ignore_eos=True).compiled(model.constraints.compile, model.text)
    tickets = [scheduler.submit(Job(prompt, request, Sampling())) for prompt in prompts]
    found: dict[int, list[int]] = {i: [] for i in range(3)}
    while scheduler.busy:
        for update in scheduler.step():
            found[tickets.index(update.ticket)] += [piece.token for piece in update.pieces]
    assert scheduler.totals.preemptions > 0
    assert found == {i: tokens for i, (_, tokens) in enumerate(texts)}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"projection_dim": 80}, "projection_dim is 80; supported: that of the decoder's hidden_size, 72"),
        (
            {"text_config": {"model_type": "llama"}},
            "text_config: model_type 'llama' is not supported; supported: gemma, gemma2",
        ),
        ({"text_config": [1]}, "text_config is .1.; expected an object"),
    ],
)
def test_what_is_no_paligemma_is_refused(case: Get, changes: dict[str, Any], says: str) -> None:
    config = json.loads((case("paligemma").folder / "config.json").read_text())
    preprocessor = json.loads((case("paligemma").folder / "preprocessor_config.json").read_text())
    with pytest.raises(EdgeqError, match=says):
        recognise(config | changes, preprocessor)


def test_calibration_pictures_are_refused(case: Get, tmp_path: Path) -> None:
    options = ConvertOptions(method="awq", bits=4, calibration=tmp_path)
    with pytest.raises(UnsupportedError, match="no pictures are calibrated yet; calibrate with a text"):
        convert(str(case("paligemma").folder), tmp_path / "m.edgeq", options, lambda *_: None)
