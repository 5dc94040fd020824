"""Gemma 4 with pictures: tokens, pixels, features and logits are those of transformers, whatever a wrong choice would give."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Lock
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from transformers import PreTrainedTokenizerFast
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil, get_aspect_ratio_preserving_size
from transformers.models.gemma4.modeling_gemma4 import Gemma4ClippableLinear
from transformers.models.gemma4.processing_gemma4 import Gemma4Processor

from edgeq.converters.convert import ConvertOptions, convert, preflight
from edgeq.converters.families import LAYER_ROWS
from edgeq.converters.families.table import recognise
from edgeq.converters.families.vision import gemma4
from edgeq.converters.families.vision.clips import stored_clips
from edgeq.errors import CheckpointError, FormatError, UnsupportedError
from edgeq.format import manifest
from edgeq.format.container import ModelFile
from edgeq.network.config import ModelConfig
from edgeq.network.image_config import ImageConfig
from edgeq.pictures.prompt import Prompt
from edgeq.pictures.tower_clips import BOUNDED, Clip, LayerClips
from edgeq.pictures.whole_pictures import next_run
from edgeq.runtime import Model
from edgeq.runtime.network.pictures import PictureFeatures
from edgeq.runtime.session.runs import BatchItem, run_together
from tests.checkpoints.vision import IMAGE, build, reference

NAMES = ("gemma4", "gemma4_whole")
TOKEN, BEGIN, END = "<|image_pad|>", "<|image>", "<image|>"
TEXT = f"Of{TOKEN}what is\n{TOKEN} there?"
MAX_DIVERGENCE = 1e-8


def pictures() -> list[Image.Image]:
    """One of which transformers makes a single row of tokens."""
    rng = np.random.default_rng(1)
    return [Image.fromarray(rng.integers(0, 256, size, np.uint8)) for size in ((40, 57, 3), (4, 99, 3))]


@dataclass(frozen=True)
class Case:
    """A checkpoint, its float32 file, what transformers' processor makes of pictures and text, and its model of that.

    tokens int64 [1, n];  processed: pixels and places;  features of each picture;  logits float32 [n, vocab]
    clipped: how much of what each bounded layer reads, and gives, is beyond its bounds
    """

    folder: Path
    path: Path
    tokens: torch.Tensor
    processed: Any
    features: list[NDArray[np.float32]]
    logits: NDArray[np.float32]
    clipped: dict[str, float]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    known: dict[str, Case] = {}

    def get(name: str) -> Case:
        if name not in known:
            folder = build(tmp_path_factory.mktemp(name) / "checkpoint", name)
            path = folder.parent / "m.edgeq"
            convert(str(folder), path, ConvertOptions(method="none", dtype="f32"), lambda *_: None)
            processor = Gemma4ImageProcessorPil(**json.loads((folder / "preprocessor_config.json").read_text()))
            seen = processor(pictures(), return_tensors="pt")
            names = SimpleNamespace(boi_token=BEGIN, eoi_token=END, image_token=TOKEN)
            first, *rest = TEXT.split(TOKEN)
            text = first + "".join(Gemma4Processor.replace_image_token(names, seen, i) + x for i, x in enumerate(rest))
            tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
            tokens = tokenizer(text, return_tensors="pt").input_ids
            model, given = reference(folder), {key: seen[key] for key in ("pixel_values", "image_position_ids")}
            clipped = shares_clipped(model)
            with torch.no_grad():
                features = [each.numpy() for each in model.model.get_image_features(**given).pooler_output]
                logits = model(tokens, **given, mm_token_type_ids=(tokens == IMAGE).int()).logits[0].numpy()
            known[name] = Case(folder, path, tokens, seen, features, logits, clipped)
        return known[name]

    return get


def shares_clipped(model: torch.nn.Module) -> dict[str, float]:
    """Filled when the model runs: how much of what its bounded layers read, and of their products, is beyond the bounds."""
    shares = dict[str, float]()

    def note(name: str, x: torch.Tensor, least: torch.Tensor, most: torch.Tensor) -> None:
        shares[name] = ((x < least) | (x > most)).float().mean().item()

    for name, module in model.named_modules():
        if isinstance(module, Gemma4ClippableLinear) and module.use_clipped_linears:
            before = partial(lambda at, m, _, args: note(f"{at} in", args[0], m.input_min, m.input_max), name, module)
            after = partial(lambda at, m, _, args, y: note(f"{at} out", y, m.output_min, m.output_max), name, module)
            module.register_forward_pre_hook(before)
            module.linear.register_forward_hook(after)
    return shares


def load(path: Path, target: str) -> Model:
    return Model.load(path, target=target, mode="a16", context=256, threads=1, max_rows=128, max_logits=128)


def logits_of(model: Model, prompt: Prompt, rows: int) -> NDArray[np.float32]:
    """The logits after every token, in runs of so many, but of whole pictures where tokens see all of theirs."""
    assert model.pictures
    session, seen = model.session(), PictureFeatures(model.pictures, prompt, prompt.places, Lock())
    found, start = [], 0
    while start < len(prompt.tokens):
        count = next_run(prompt.places, start, rows) if model.config.whole_pictures else rows
        chunk = prompt.tokens[start : start + count]
        vectors = seen.between(start, start + len(chunk))
        found += run_together([BatchItem(session, chunk, range(len(chunk)), prompt.places, vectors)])
        start += len(chunk)
    return np.concatenate(found)


def divergence(found: NDArray[np.float32], wanted: NDArray[np.float32]) -> float:
    """The mean Kullback-Leibler divergence of what is predicted after each token."""
    ours, theirs = (torch.from_numpy(x).double().log_softmax(-1) for x in (found, wanted))
    return float((theirs.exp() * (theirs - ours)).sum(-1).mean())


def near(found: NDArray[np.float32], wanted: NDArray[np.float32]) -> bool:
    return found.shape == wanted.shape and float(np.abs(found - wanted).max()) < 1e-3 * float(np.abs(wanted).max())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("target", "rows"),
    [
        ("cpu", 7),
        pytest.param("cpu", 1, marks=pytest.mark.exhaustive),
        pytest.param("reference", 128, marks=pytest.mark.exhaustive),
    ],
)
def test_tokens_pixels_features_and_logits_are_those_of_transformers(
    case: Callable[[str], Case], name: str, target: str, rows: int
) -> None:
    wanted = case(name)
    with load(wanted.path, target) as model:
        prompt, vision = model.prompt(TEXT, images=pictures()), model.config.vision
        assert vision and model.pictures
        assert prompt.tokens == wanted.tokens[0].tolist()
        for i, picture in enumerate(prompt.pictures):
            side, merge, (_, height, width) = vision.patch_size, vision.merge, picture.grid
            pixels = 2 * wanted.processed["pixel_values"][i, : height * width].numpy() - 1
            patches = pixels.reshape(height // merge, merge, width // merge, merge, side, side, 3)
            patches = patches.transpose(0, 2, 1, 3, 6, 4, 5).reshape(height * width, -1)
            assert np.abs(picture.patches - patches).max() <= 1e-6
            assert near(model.pictures.prepare().encode(picture.patches, [picture.grid]), wanted.features[i])
        found = logits_of(model, prompt, rows)
    assert near(found, wanted.logits)
    assert divergence(found, wanted.logits) <= MAX_DIVERGENCE


def test_pictures_get_the_sizes_of_the_processor() -> None:
    rng = np.random.default_rng(0)
    for tokens in (70, 280):
        settings = ImageConfig(sizing="budget", mean=(0.5,) * 3, std=(0.5,) * 3, max_pixels=tokens * 48**2)
        for height, width in [(1, 1), (1, 199), (1999, 10), (3000, 4000), (48, 48), *rng.integers(20, 3000, (200, 2)).tolist()]:
            wanted = get_aspect_ratio_preserving_size(height, width, 16, 9 * tokens, 3)
            assert settings.size_of(height, width, 48, settings.most_tokens(48)) == wanted, (height, width)
    # Fewer tokens than the file's, down to one.
    assert settings.size_of(480, 480, 48, 1) == (48, 48) and settings.size_of(90, 900, 48, 4) == (48, 192)


def test_rows_of_layers_for_a_picture_are_those_of_a_pad(case: Callable[[str], Case]) -> None:
    """transformers looks them up for `pad_token_id`, 7, whatever the table has for the image token."""
    rows = preflight(str(case("gemma4").folder), ConvertOptions(method="none")).checkpoint.rows
    found, neighbours = rows(LAYER_ROWS, IMAGE - 1, IMAGE + 2), (IMAGE - 1, 7, IMAGE + 1)
    assert np.array_equal(found, np.concatenate([rows(LAYER_ROWS, token, token + 1) for token in neighbours]))
    assert len(np.unique(found[:, 0])) == 3


def _of_tower(config: ModelConfig, **fields: Any) -> ModelConfig:
    assert config.vision
    return replace(config, vision=replace(config.vision, **fields))


def _other_bounds(change: Callable[[LayerClips], LayerClips]) -> Callable[[ModelConfig], ModelConfig]:
    """With the bounds of each layer changed."""
    return lambda c: _of_tower(c, clips=tuple(change(layer) for layer in c.vision.clips) if c.vision else ())


def _swapped(one: str, other: str) -> Callable[[LayerClips], LayerClips]:
    i, j = BOUNDED.index(one), BOUNDED.index(other)
    return lambda layer: tuple(layer[{i: j, j: i}.get(at, at)] for at in range(len(layer)))


WRONG: dict[str, tuple[str, Callable[[ModelConfig], ModelConfig]]] = {
    "tokens of a picture that see what is before them": (
        "gemma4_whole",
        lambda c: replace(c, whole_pictures=False, pictures_in_windows=False),
    ),
    "whole pictures in layers without a window too": ("gemma4_whole", lambda c: replace(c, pictures_in_windows=False)),
    "means as they are": ("gemma4_whole", lambda c: _of_tower(c, mean_scaled=False)),
    "scores by the root of the head": ("gemma4", lambda c: _of_tower(c, query_pre_attn_scalar=None)),
    "values as they are": ("gemma4", lambda c: _of_tower(c, value_norm=False)),
    "inputs as they are": (
        "gemma4",
        _other_bounds(lambda layer: tuple(clip._replace(input_min=None, input_max=None) for clip in layer)),
    ),
    "outputs as they are": (
        "gemma4",
        _other_bounds(lambda layer: tuple(clip._replace(output_min=None, output_max=None) for clip in layer)),
    ),
    "bounds of keys for values": ("gemma4", _other_bounds(_swapped("k", "v"))),
    "bounds of the gate for what it opens": ("gemma4", _other_bounds(_swapped("gate", "up"))),
    "another eps": ("gemma4", lambda c: _of_tower(c, rms_norm_eps=1e-6)),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_choice_shows(case: Callable[[str], Case], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    which, change = WRONG[name]
    wanted, opened = case(which), ModelFile.open

    def other(path: Path) -> ModelFile:
        file = opened(path)
        file.metadata = replace(file.metadata, config=change(file.metadata.config))
        return file

    monkeypatch.setattr(ModelFile, "open", other)
    with load(wanted.path, "reference") as model:
        assert divergence(logits_of(model, model.prompt(TEXT, images=pictures()), 128), wanted.logits) > 10 * MAX_DIVERGENCE


@pytest.mark.exhaustive
@pytest.mark.parametrize("parts", [(0, 2, 1, 3), (0, 1, 2, 3)])
def test_halves_of_heads_turned_otherwise_show(
    case: Callable[[str], Case], tmp_path: Path, parts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Columns in place of rows, or halves of a whole head against each other."""
    wanted = case("gemma4")

    def order(heads: int, head_dim: int) -> tuple[int, ...]:
        of_head = np.concatenate([np.arange(head_dim).reshape(4, -1)[part] for part in parts])
        return tuple((np.arange(heads)[:, None] * head_dim + of_head).reshape(-1).tolist())

    monkeypatch.setattr(gemma4, "halves_apart", order)
    convert(str(wanted.folder), tmp_path / "m.edgeq", ConvertOptions(method="none", dtype="f32"), lambda *_: None)
    with load(tmp_path / "m.edgeq", "reference") as model:
        prompt = model.prompt(TEXT, images=pictures())
        assert model.pictures
        first = prompt.pictures[0]
        assert not near(model.pictures.prepare().encode(first.patches, [first.grid]), wanted.features[0])


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "method"), [("gemma4", "awq+gptq"), ("gemma4_whole", "awq")])
def test_four_bits_calibrated_with_pictures_keep_what_a_picture_says(
    case: Callable[[str], Case], tmp_path: Path, name: str, method: str
) -> None:
    found, samples, source = case(name), tmp_path / "samples", pictures()
    samples.mkdir()
    source[0].save(samples / "a.png")
    (samples / "samples.jsonl").write_text(json.dumps({"image": "a.png", "question": "What is it?", "answer": "red"}))
    options = ConvertOptions(method=method, bits=4, group_size=16, calibration=samples)
    convert(str(found.folder), tmp_path / "m.edgeq", options, lambda *_: None)
    changes = []
    for path in (found.path, tmp_path / "m.edgeq"):
        with load(path, "cpu") as model:
            seen, white = ([source[0], each] for each in (source[1], Image.new("RGB", (57, 40), "white")))
            ours, other = (model.session().prefill(model.prompt(TEXT, images=given)).copy() for given in (seen, white))
            changes.append(ours - other)
    assert np.corrcoef(*changes)[0, 1] > 0.5


def test_layers_are_bounded_as_the_checkpoint_says(case: Callable[[str], Case], tmp_path: Path) -> None:
    """Apart where parts of one layer read within other bounds, where a file with one layer is refused; each bound bites."""
    found = case("gemma4")
    assert len(found.clipped) == 2 * 2 * len(BOUNDED) and min(found.clipped.values()) >= 0.05
    metadata = ModelFile.open(found.path).metadata
    vision = metadata.config.vision
    assert vision and {clip for layer in vision.clips for clip in layer}.isdisjoint({Clip()})
    assert {"vision.layers.0.q", "vision.layers.0.up", "vision.layers.1.qkv", "vision.layers.1.gate_up"} <= set(
        metadata.linears
    )
    other = replace(metadata, config=_of_tower(metadata.config, clips=(vision.clips[0], vision.clips[0])))
    with pytest.raises(FormatError, match="layers.1.qkv is one layer whose parts have other bounds"):
        manifest.check(other)
    assert not preflight(str(case("gemma4_whole").folder), ConvertOptions(method="none")).method.config.vision.clips


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"input_max": None}, "q.input_max is missing, and use_clipped_linears is true"),
        ({"input_min": np.nan}, "q: input_min is nan; expected a number of float32"),
        ({"output_min": np.inf}, "q: output_min is inf; expected a number of float32"),
        ({"output_max": -np.inf}, "q: output_max is -inf"),
        ({"input_min": 2.0}, "q: input_min is 2, above input_max, 1"),
        ({"output_max": [1.0, 2.0]}, r"q.output_max is F32 \(2,\); expected one number"),
    ],
)
def test_bounds_that_are_none_are_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=f"^here: .*{message}"):
        stored_clips(bounds_of(values), [["q"]])


def test_infinite_bounds_are_none() -> None:
    infinite = {"input_min": -np.inf, "input_max": np.inf, "output_min": -np.inf, "output_max": np.inf}
    assert stored_clips(bounds_of(infinite), [["q"], ["q"]]) == ()
    (layer,) = stored_clips(bounds_of(infinite | {"output_max": [0.5]}), [["q"]])
    assert layer == (Clip(output_max=0.5),) and layer[0].inputs is None and layer[0].outputs == (-np.inf, 0.5)


def bounds_of(values: dict[str, Any]) -> Any:
    """A source with the bounds of one module, -1 and 1 but for `values`; None: there is no such tensor."""
    tensors = {}
    for name, value in ({field: -1.0 if field.endswith("min") else 1.0 for field in Clip._fields} | values).items():
        stored = np.array(value, np.float32)
        read = partial(lambda stored, first, count, name: stored.reshape(-1)[first : first + count], stored)
        if value is not None:
            tensors[f"q.{name}"] = SimpleNamespace(dtype="F32", shape=stored.shape, codec=None, read=read)
    return SimpleNamespace(place="here", tensors=lambda: tensors)


@pytest.mark.parametrize(
    ("keys", "kind", "message"),
    [
        (
            {"vision_config__use_clipped_linears": "yes"},
            CheckpointError,
            "use_clipped_linears is 'yes'; expected true or false",
        ),
        ({"vision_config__attention_bias": True}, UnsupportedError, "attention_bias is True"),
        ({"vision_config__standardize": 1}, CheckpointError, "standardize is 1; expected true or false"),
        ({"vision_config__head_dim": 26}, CheckpointError, "head_dim is 26; expected a multiple of 4"),
        (
            {"vision_config__pooling_kernel_size": 5},
            CheckpointError,
            "pooling_kernel_size is 5; expected an integer from 1 to 4",
        ),
        ({"vision_config__position_embedding_size": 139}, CheckpointError, "position_rows is 278; expected .* at least 280"),
        ({"vision_config__hidden_size": 1 << 40}, CheckpointError, "hidden_size is 1099511627776; expected an integer"),
        ({"vision_config__rope_parameters": {"rope_type": "yarn"}}, UnsupportedError, "supported: rope_type axial"),
        ({"vision_config": 3}, CheckpointError, "vision_config is 3; expected an object"),
        ({"text_config__pad_token_id": None}, CheckpointError, "pad_token_id is None; expected a token"),
        ({"text_config__pad_token_id": 2056}, CheckpointError, "pad_token_id is 2056; expected a token"),
        ({"text_config__use_bidirectional_attention": "all"}, UnsupportedError, "use_bidirectional_attention is 'all'"),
        ({"image_token_id": 2056}, CheckpointError, "image_token_id is 2056 of 2056 tokens"),
    ],
)
def test_what_a_gemma_4_cannot_have_is_named(
    case: Callable[[str], Case], keys: dict[str, Any], kind: type[Exception], message: str
) -> None:
    config, settings = (
        json.loads((case("gemma4").folder / f"{x}.json").read_text()) for x in ("config", "preprocessor_config")
    )
    for key, value in keys.items():
        outer, _, inner = key.rpartition("__")
        (config[outer] if outer else config)[inner] = value
    with pytest.raises(kind, match=message):
        recognise(config, settings)
