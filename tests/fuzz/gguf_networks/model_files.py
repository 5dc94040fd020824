"""Model files of families that `model_files.py` does not make, converted from sound GGUF files, and what they do."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from file_trials import MAX_RUN, Sample, changed_metadata, opened
from gguf_trials import NETWORK_FILES, encoded
from mutation import refused
from PIL import Image

from edgeq.converters.convert import carry_out
from edgeq.converters.importers.gguf_source import GgufSource
from edgeq.converters.planning.options import ConvertOptions
from edgeq.converters.planning.preflight import planned
from edgeq.errors import EdgeqError
from edgeq.format.container import ModelFile
from edgeq.pictures.prompt import with_pictures
from edgeq.runtime import Model
from gguf_networks.towers import TOWERS, language_model

CONTEXT = 40
MAX_POSITIONS = 1 << 12
"""Positions that a mutant could claim: what follows from them is not made for more."""


def families(folder: Path) -> list[Sample]:
    """A file of each network, and of each tower with its language model, of 30 to 600 KB."""
    return [*_samples(folder)]


def _samples(folder: Path) -> Iterator[Sample]:
    model, mmproj, path = (folder / name for name in ("m.gguf", "mmproj.gguf", "m.edgeq"))
    for kind in (None, *TOWERS):
        for files in NETWORK_FILES if kind is None else [language_model(kind)]:
            model.write_bytes(encoded(random.Random(1), *files))
            if kind is not None:
                mmproj.write_bytes(encoded(random.Random(1), *TOWERS[kind]))
            source = GgufSource.open(model, mmproj=mmproj if kind else None)
            path.unlink(missing_ok=True)
            carry_out(planned(source, ConvertOptions()), path, lambda done, total, label: None)
            yield Sample.of(path.read_bytes())


def family(rng: random.Random, samples: Sequence[Sample], path: Path) -> str:
    """A file whose metadata are well formed but for some fields, or sound, does what it is for on the reference."""
    sample = rng.choice(samples)
    path.write_bytes(changed_metadata(rng, sample) if rng.random() < 0.98 else sample.whole)
    outcome = opened(path, rng, damaged=False)
    if not outcome.startswith("opened"):
        return outcome
    try:
        config = ModelFile.open(path).metadata.config
        if config.max_position_embeddings > MAX_POSITIONS or (config.vision and config.vision.most_tokens > MAX_RUN):
            return "not run"
        context = min(CONTEXT, config.max_position_embeddings)
        with Model.load(path, target="reference", context=context) as model, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with np.errstate(all="ignore"):
                found = used(model)
    except EdgeqError as error:
        return refused(error)
    return "ran" if np.isfinite(found).all() else "not finite"


def used(model: Model) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """Vectors, scores or logits, of tokens or after a picture."""
    config, tokens = model.config, [1, 2, 3]
    if config.pooling and config.pooling.ranks:
        return np.array([each.relevance_score for each in model.rerank("a", ["b", "ab"])], np.float32)
    if config.pooling:
        return np.asarray(model.embed([tokens]))
    with model.session() as session:
        if config.vision:
            picture = model.read_image(Image.new("RGB", (16, 16), "red"))
            seen = [1, config.vision.image_token_id, 2]
            return session.prefill(with_pictures(seen, [picture], config.vision, model.text.encode_part)).copy()
        logits = [session.prefill(tokens).copy(), session.decode(4).copy(), session.decode(5).copy()]
    return np.array(logits)
