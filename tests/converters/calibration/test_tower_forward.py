"""Calibration pictures through a tower and a decoder in torch: what the runtime computes of the same file."""

from __future__ import annotations

import json
from pathlib import Path
from threading import Lock

import numpy as np
import pytest
import torch
from PIL import Image

from edgeq.converters.calibration.sample_forward import SampleForward
from edgeq.converters.calibration.samples import PictureSamples
from edgeq.converters.convert import ConvertOptions, convert, preflight
from edgeq.converters.method import features_of
from edgeq.format.codec import unpack_floats
from edgeq.format.container import ModelFile
from edgeq.pictures.prompt import Prompt
from edgeq.runtime import Model
from edgeq.runtime.network.pictures import PictureFeatures
from edgeq.runtime.session.runs import BatchItem, run_together
from tests.checkpoints.vision import build

pytestmark = pytest.mark.usefixtures("works_here")

TOLERANCE = 1e-3
"""As a share of the largest; the runtime keeps keys and values in f16."""
FAMILIES, OTHERS = (
    ("taps", "clip_llama"),
    ("siglip_qwen2", "clip_mistral", "windows", "states", "states_experts", "tiles", "averaged", "aspect", "aspect_rms")
    + ("naflex", "gemma4"),
)


def samples(folder: Path) -> Path:
    """Two pictures of noise, of other shapes, in one sample and in a sample each."""
    folder.mkdir()
    rng = np.random.default_rng(8)
    for name, size in (("a.png", (24, 48, 3)), ("b.png", (36, 36, 3))):
        Image.fromarray(rng.integers(0, 256, size, np.uint8)).save(folder / name)
    lines = [{"images": ["a.png", "b.png"]}, {"image": "b.png"}, {"image": "a.png"}]
    text = "\n".join(json.dumps(line | {"question": "What is it?", "answer": "red"}) for line in lines)
    (folder / "samples.jsonl").write_text(text)
    return folder


@pytest.mark.parametrize("name", [*FAMILIES, *(pytest.param(x, marks=pytest.mark.exhaustive) for x in OTHERS)])
def test_features_and_states_are_the_runtimes(tmp_path: Path, name: str) -> None:
    source, options = build(tmp_path / "source", name), {"calibration": samples(tmp_path / "samples")}
    file = convert(str(source), tmp_path / "f.edgeq", ConvertOptions(method="none", dtype="f32"), lambda *_: None)
    plan = preflight(str(source), ConvertOptions(method="gptq", **options))
    assert plan.tower and isinstance(plan.calibration, PictureSamples)
    features = features_of(plan.tower, plan.calibration.pictures, plan.checkpoint, None)
    forward = SampleForward(plan.method.family, plan.method.config, plan.calibration.samples, features, plan.checkpoint)
    few, layers = forward.few(2), plan.method.config.num_hidden_layers
    for run in (forward, few):
        for index in range(layers):
            run.advance(index, run.load(index))
    assert all(torch.equal(x, y) for x, y in zip(few.states, forward.states[::2], strict=True))
    model = Model.load(file.path, target="reference", mode="a16", max_rows=512, max_logits=512, context=512)
    given = iter(features)
    for sample, states in zip(plan.calibration.samples, forward.states, strict=True):
        prompt = Prompt(sample.tokens, tuple(picture.read() for picture in sample.pictures), sample.places)
        assert model.pictures
        seen = PictureFeatures(model.pictures, prompt, prompt.places, Lock())
        vectors = seen.between(0, len(sample.tokens))
        assert vectors is not None
        mine = np.concatenate([next(given)[0].numpy() for _ in sample.pictures])
        assert near(mine, vectors[0]), name
        logits = run_together([BatchItem(model.session(), sample.tokens, range(len(sample.tokens)), prompt.places, vectors)])[0]
        assert near(head(file, states[0].numpy()), logits), name


def head(file: ModelFile, states: np.ndarray) -> np.ndarray:
    """Logits of the states after the last layer."""
    config, table = file.metadata.config, file.metadata.linears["head"].weights[0]
    norm = file.array(file.metadata.arrays["norm"])
    weight = unpack_floats(file.array(table.arrays["q"]), "f32", table.rows, table.columns)
    logits: np.ndarray = states / np.sqrt((states**2).mean(1, keepdims=True) + config.rms_norm_eps) * norm @ weight.T
    cap = config.final_logit_softcapping
    return logits if cap is None else cap * np.tanh(logits / cap)


def near(found: np.ndarray, wanted: np.ndarray) -> bool:
    return found.shape == wanted.shape and float(np.abs(found - wanted).max()) < TOLERANCE * float(np.abs(wanted).max())
