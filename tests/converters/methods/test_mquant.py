"""MQuant: its transformations leave the function as it is, its scales are those of text and of pictures, and its options."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from edgeq.converters import methods
from edgeq.converters.calibration.sample_forward import SampleForward
from edgeq.converters.calibration.samples import PictureSamples
from edgeq.converters.calibration.staged import staged
from edgeq.converters.convert import ConvertOptions, convert
from edgeq.converters.method import features_of
from edgeq.converters.methods.mquant import MQuant, MQuantTower
from edgeq.converters.planning import preflight
from edgeq.converters.rotation.hadamard import base_order, best_size, hadamard
from edgeq.converters.running.readback import stored_tensors
from edgeq.errors import UnsupportedError
from edgeq.format.codec import Codec
from edgeq.format.container import ModelFile
from edgeq.format.writer import Writer
from edgeq.pictures.image import Picture
from edgeq.pictures.prompt import Prompt, with_pictures
from edgeq.runtime import Model
from edgeq.runtime.network.pictures import PictureFeatures
from edgeq.runtime.session.runs import BatchItem, run_together
from edgeq.targets.rows import TEXT, VISION
from tests.checkpoints.vision import IMAGE, START, build

pytestmark = pytest.mark.usefixtures("works_here")

TOLERANCE = 1e-3


class ExactDecoder(MQuant):
    """What it transforms, unrounded."""

    gptq = False

    def codec(self, columns: int) -> Codec:
        return Codec("f32")


class ExactTower(MQuantTower):
    calibrates = False

    def codec(self, columns: int) -> Codec:
        return Codec("f32")


def prompt_of(file: ModelFile, spread: float = 1.0) -> Prompt:
    """Text, two pictures, of other shapes where the model takes several, text."""
    vision = file.metadata.config.vision
    assert vision
    rng, image = np.random.default_rng(3), vision.image
    one = (1, *((edge or image.tile) // vision.patch_size for edge in (image.height, image.width)))
    grids = ((1, 4, 6), (1, 8, 2)) if vision.sizes_vary else (one, one)
    pictures = [
        Picture(np.float32(spread) * rng.standard_normal((h * w, vision.patch_width), np.float32), (t, h, w), bytes([i]))
        for i, (t, h, w) in enumerate(grids)
    ]
    tokens = [*rng.integers(2, 2048, 6).tolist(), START, IMAGE, 7, 8, START, IMAGE, *rng.integers(2, 2048, 9).tolist()]
    return with_pictures(tokens, pictures, vision, lambda text: [2 + len(text)])


def logits_of(path: Path, target: str, rows: int = 256, spread: float = 1.0) -> NDArray[np.float32]:
    model = Model.load(path, target=target, mode="a16", max_rows=rows, max_logits=rows, context=256)
    prompt, session = prompt_of(model.file, spread), model.session()
    assert model.pictures
    seen, found = PictureFeatures(model.pictures, prompt, prompt.places, Lock()), []
    for start in range(0, len(prompt.tokens), rows):
        chunk = prompt.tokens[start : start + rows]
        item = BatchItem(session, chunk, range(len(chunk)), prompt.places, seen.between(start, start + len(chunk)))
        found += run_together([item])
    return np.concatenate(found)


def exact(source: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[ModelFile, ModelFile]:
    """The file without a method, and the one with every transformation and no rounding."""
    monkeypatch.setattr(methods, "METHODS", {**methods.METHODS, "mquant": ExactDecoder})
    monkeypatch.setattr(preflight, "TOWERS", {"mquant": ExactTower})
    folder.mkdir()
    plain = convert(str(source), folder / "plain.edgeq", ConvertOptions(method="none", dtype="f32"), lambda *_: None)
    settings = ConvertOptions(method="mquant", activations="block", head=16, vision_activation_bits=16, **options)
    return plain, convert(str(source), folder / "mquant.edgeq", settings, lambda *_: None)


def near(found: NDArray[np.float32], wanted: NDArray[np.float32]) -> bool:
    return found.shape == wanted.shape and float(np.abs(found - wanted).max()) < TOLERANCE * float(np.abs(wanted).max())


OTHERS = ("windows", "head80", "padded", "siglip_qwen2", "clip_llama", "clip_mistral", "aspect")


@pytest.mark.parametrize("name", ["taps", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in OTHERS)])
def test_every_transformation_leaves_the_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    plain, changed = exact(build(tmp_path / "source", name), tmp_path / "files", monkeypatch)
    linears, vision = changed.metadata.linears, changed.metadata.config.vision
    # Where a projector needs the means of the stream, LayerNorm stays.
    assert vision and vision.layer_norm == (vision.project_norm != "patch" or bool(vision.tap_layers))
    taps = [f"vision.taps.{index}.project.1" for index in range(len(vision.tap_layers))]
    for layer in ("layers.0.down", "vision.layers.0.down", "vision.project.1", *taps):
        assert linears[layer].transform and linears[layer].split_row, layer
    wanted = logits_of(plain.path, "reference")
    assert near(logits_of(changed.path, "reference"), wanted)
    assert near(logits_of(changed.path, "cpu", 7), wanted)


def test_norms_of_two_kinds_in_a_tower_are_refused(tmp_path: Path, samples: Path) -> None:
    source = build(tmp_path / "source", "aspect_rms")
    with pytest.raises(UnsupportedError, match="RMS norms in its layers and a LayerNorm before the projector"):
        made(source, samples, tmp_path / "m.edgeq")


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures of noise of several shapes, with questions and answers."""
    from PIL import Image

    folder, rng = tmp_path_factory.mktemp("samples"), np.random.default_rng(8)
    with open(folder / "samples.jsonl", "w", encoding="utf-8") as file:
        for i in range(6):
            pixels = rng.integers(0, 256, (24 + 12 * (i % 3), 48, 3), np.uint8)
            Image.fromarray(pixels).save(folder / f"{i}.png")
            file.write(json.dumps({"image": f"{i}.png", "question": f"What is {i}?", "answer": "red " * (i + 1)}) + "\n")
    return folder


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("padded"), "padded")


@pytest.fixture(scope="module")
def file(source: Path, samples: Path, tmp_path_factory: pytest.TempPathFactory) -> ModelFile:
    return made(source, samples, tmp_path_factory.mktemp("made") / "m.edgeq")


def made(
    source: Path, samples: Path, output: Path, on_progress: Callable[..., None] = lambda *_: None, **more: Any
) -> ModelFile:
    return convert(str(source), output, ConvertOptions(**{"method": "mquant", "calibration": samples} | more), on_progress)


def scaled(file: ModelFile, output: Path, modality: int) -> Path:
    """A copy of `file` whose scales of one modality are 1000 times as large."""
    changed = {x.activation.scales.segment: x for x in file.metadata.linears.values() if x.activation and x.activation.scales}
    writer = Writer(output)
    for index, segment in enumerate(file.segments):
        data = np.fromfile(file.path, np.uint8, segment.length, offset=segment.offset)
        if index in changed:
            scales = data.view(np.float32)
            scales[modality if len(scales) > 1 else 0] *= 1000 if len(scales) > 1 or modality == VISION else 1
        writer.append([data])
    return writer.finish(file.metadata).path


@pytest.mark.parametrize("target", ("reference", pytest.param("cpu", marks=pytest.mark.exhaustive)))
def test_a_row_reads_the_scale_of_its_own_modality(file: ModelFile, tmp_path: Path, target: str) -> None:
    paths = {"": file.path, "vision": scaled(file, tmp_path / "v", VISION), "text": scaled(file, tmp_path / "t", TEXT)}
    models = {name: Model.load(path, target=target, mode="a8", max_logits=64, context=128) for name, path in paths.items()}
    text = np.random.default_rng(1).integers(2, 2048, 20).tolist()
    of_text = {name: next(model.session().all_logits(text)).copy() for name, model in models.items()}
    assert np.array_equal(of_text[""], of_text["vision"]) and not np.array_equal(of_text[""], of_text["text"])
    prompt = prompt_of(file)
    first = next(i for i, token in enumerate(prompt.tokens) if token == IMAGE)
    tokens = prompt.tokens[first:]
    places = tuple(replace(place, start=place.start - first) for place in prompt.places)
    # The tower's features go to all three: its own scale is that of pictures.
    features = np.random.default_rng(2).standard_normal((sum(p.tokens for p in places), 72), np.float32)
    vector_of = np.cumsum([token == IMAGE for token in tokens]) - 1
    vectors = features, np.where([token == IMAGE for token in tokens], vector_of, -1).astype(np.int32)
    rows, sessions = {}, {}
    for name, model in models.items():
        sessions[name] = model.session()
        rows[name] = run_together([BatchItem(sessions[name], tokens, range(len(tokens)), places, vectors)])[0].copy()
    own = places[0].tokens
    assert np.array_equal(rows[""][:own], rows["text"][:own]) and not np.array_equal(rows[""][:own], rows["vision"][:own])
    # A decoding step after one and the same cache.
    saved = [np.frombuffer(models[""].program.save_page(page), np.uint8) for page in sessions[""]._cache.pages]
    sessions["vision"]._cache.pages[:] = [models["vision"].program.load_page(data.copy()) for data in saved]
    assert np.array_equal(sessions["vision"].decode(7), sessions[""].decode(7))


def test_scales_are_the_largest_inputs_of_the_stored_layers(file: ModelFile, source: Path, samples: Path) -> None:
    """For each modality, over the samples, after the online transform, without the column that is kept apart."""
    plan = preflight.preflight(str(source), ConvertOptions(method="mquant", calibration=samples))
    assert plan.tower and isinstance(plan.calibration, PictureSamples)
    stored = stored_tensors(file.path, file.segments, [item for step in plan.steps for item in step.items])
    tensors = plan.method.tensors(plan.checkpoint, {})
    features = features_of(plan.tower, plan.calibration.pictures, plan.checkpoint, stored)
    forward = SampleForward(plan.method.family, plan.method.config, plan.calibration.samples, features, tensors)
    for index in range(2):
        layer = forward.load(index, stored)
        plan.method.install(index, layer)
        run = staged(forward, index, layer)
        for name, path in (("qkv", "self_attn.q_proj"), ("o", "self_attn.o_proj"), ("down", "mlp.down_proj")):
            linear = file.metadata.linears[f"layers.{index}.{name}"]
            assert linear.activation and linear.activation.scales
            largest = np.zeros(2)
            for x, visual in run.inputs(path):
                assert visual is not None
                x = x[:, int(linear.split_row is not None) :].abs()
                largest = np.maximum(largest, [float(x[~visual].max()), float(x[visual].max())])
            assert file.array(linear.activation.scales) == pytest.approx(largest / 120, rel=1e-5), linear.name
        run.finish()
    tower = [x.activation for name, x in file.metadata.linears.items() if name.startswith("vision.")]
    assert all(x and x.scales and x.scales.shape == (1,) for x in tower)
    found = file.metadata.provenance["split_rows"]
    assert isinstance(found, dict) and len(found) == 2 + 3 + 1
    assert {entry["column"] for entry in found.values()} == {0} and all(0 <= x["outputs_over"] <= 1 for x in found.values())


def test_a_file_that_is_there_is_not_made_again(file: ModelFile, source: Path, samples: Path) -> None:
    before = file.path.stat().st_mtime_ns
    assert made(source, samples, file.path).identity == file.identity
    assert file.path.stat().st_mtime_ns == before


class Interrupted(Exception):
    pass


def stopping_at(label: str) -> Callable[..., None]:
    def stop(done: float, total: float, at: str) -> None:
        if at == label:
            raise Interrupted

    return stop


@pytest.mark.exhaustive
@pytest.mark.parametrize("label", ("vision layer 2 of 3", "vision projector", "layer 1 of 2", "layer 2 of 2"))
def test_interrupted_anywhere_it_goes_on_to_the_same_bytes(
    file: ModelFile, source: Path, samples: Path, tmp_path: Path, label: str
) -> None:
    with pytest.raises(Interrupted):
        made(source, samples, tmp_path / "m.edgeq", stopping_at(label))
    assert made(source, samples, tmp_path / "m.edgeq").path.read_bytes() == file.path.read_bytes()


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ("taps", "clip_llama", "clip_mistral", "siglip_qwen2"))
def test_every_family_is_quantized_and_goes_on_where_it_stopped(samples: Path, tmp_path: Path, name: str) -> None:
    source, bits = build(tmp_path / "source", name), {"bits": 8, "activation_bits": 8, "vision_bits": 8}
    found = made(source, samples, tmp_path / "m.edgeq", **bits)

    for label in ("vision projector", "layer 2 of 2"):
        with pytest.raises(Interrupted):
            made(source, samples, tmp_path / "again.edgeq", stopping_at(label), **bits)
    assert made(source, samples, tmp_path / "again.edgeq", **bits).path.read_bytes() == found.path.read_bytes()
    plain = convert(str(source), tmp_path / "p.edgeq", ConvertOptions(method="none", dtype="f32"), lambda *_: None)
    # Within the scales of the samples.
    wanted = logits_of(plain.path, "reference", spread=0.3)
    for target in ("cpu", "reference"):
        error = logits_of(found.path, target, spread=0.3) - wanted
        assert np.sqrt(np.mean(error**2)) < 0.2 * np.sqrt(np.mean(wanted**2)), target


@pytest.mark.exhaustive
@pytest.mark.parametrize("method", ("rtn", "smoothquant", "quarot", "mquant"))
@pytest.mark.parametrize("activations", ("block", "token", "static", "modality"))
def test_every_kind_of_activations_is_stored_and_run(
    source: Path, samples: Path, tmp_path: Path, method: str, activations: str
) -> None:
    more = {"kv_bits": 16} if method == "quarot" else {}
    found = made(
        source, samples, tmp_path / "m.edgeq", method=method, bits=4, activation_bits=8, activations=activations, **more
    )
    stored = found.metadata.linears["layers.0.qkv"].activation
    scales = stored.scales if stored else None
    assert (stored is None) == (activations == "block")
    assert (scales.shape if scales else None) == {"static": (1,), "modality": (2,)}.get(activations)
    assert np.isfinite(logits_of(found.path, "cpu")).all()


@pytest.mark.exhaustive
@pytest.mark.parametrize("method", ("awq", "gptq", "awq+gptq"))
def test_methods_for_weights_take_pictures(source: Path, samples: Path, tmp_path: Path, method: str) -> None:
    found = made(source, samples, tmp_path / "m.edgeq", method=method)
    written = found.metadata.provenance["calibration"]
    assert isinstance(written, dict) and written["source"] == samples.name and written["tokens"] > 6 * 10
    assert np.isfinite(logits_of(found.path, "cpu")).all()


@pytest.mark.parametrize(
    ("channels", "products", "size", "base"),
    [
        (8960, 4608, 9216, 36),
        (3420, 3840, 3584, 28),
        (5120, 2560, 5120, 20),
        (18944, 10752, 18944, 148),
        (29568, 24576, 30720, 60),
    ],
)
def test_sizes_of_transforms_are_chosen_by_cost(channels: int, products: int, size: int, base: int) -> None:
    assert best_size(channels, products) == size and base_order(size) == base
    transform = hadamard(size, constant_row=True)
    assert transform.base is not None and len(transform.base) == base and bool((transform.base[0] == 1).all())


@pytest.mark.parametrize("size", (72, 80, 3584, 9216))
def test_a_transform_has_an_inverse(size: int) -> None:
    x = torch.randn(3, size, dtype=torch.float64)
    for transform in (hadamard(size), hadamard(size, constant_row=True)):
        assert torch.allclose(transform.inverse(transform(x)), x) and torch.allclose(transform(x).norm(), x.norm())
