"""Model files with other bytes or other metadata: opened, compared with their digests, inspected."""

from __future__ import annotations

import io
import json
import pickle
import random
import sys
import warnings
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import flatbuffers
import numpy as np
from model_files import make, make_policy
from mutation import EDGES, changed_bytes, changed_json, refused
from PIL import Image

from edgeq.errors import EdgeqError, FormatError
from edgeq.format.container import DATA_OFFSET, ModelFile
from edgeq.format.schema import model_generated as fb
from edgeq.format.writer import Writer
from edgeq.runtime import Model
from edgeq.tools.commands.inspect import collect, show

sys.path.append(str(Path(__file__).parents[2]))
from tests.edgeq.format.sample_file import seal, split, write_body  # noqa: E402

SEEDS = (166, 164, 199, 279, 117, 466, 212, 402)
"""Files of model_files.py that together have every part and codec: experts, masters, two weight blocks, low rank, transforms,
orders, scales, rotations, every kind of cache and of rotary positions."""
MAX_RUN = 1 << 12
"""Rows of all steps, and tokens of a picture, that a mutant could claim: more is not run."""


@dataclass(frozen=True)
class Sample:
    """A sound file: its bytes, where its parts begin, and its metadata as FlatBuffer objects, pickled."""

    whole: bytes
    data: bytes
    metadata: bytes
    model: bytes

    @classmethod
    def of(cls, whole: bytes) -> Sample:
        data, metadata = split(whole)
        return cls(whole, data, metadata, pickle.dumps(fb.ModelT.InitFromObj(fb.Model.GetRootAs(metadata, 0))))


def samples(folder: Path) -> list[Sample]:
    """Sound files of 40 to 280 KB."""
    path = folder / "sample.edgeq"
    writer = Writer(path)
    writer.finish(write_body(writer))
    found = [Sample.of(path.read_bytes())]
    for seed in SEEDS:
        make(path, seed)
        found.append(Sample.of(path.read_bytes()))
    return found


def policies(folder: Path) -> list[Sample]:
    """Sound files of policies, of 140 to 160 KB."""
    path, found = folder / "sample.edgeq", []
    for seed in (1, 2, 3):
        make_policy(path, seed)
        found.append(Sample.of(path.read_bytes()))
    return found


def acting(rng: random.Random, samples: Sequence[Sample], path: Path) -> str:
    """A policy whose metadata are well formed but for some fields, or sound, acts on a picture, a text and a state."""
    sample = rng.choice(samples)
    path.write_bytes(changed_metadata(rng, sample) if rng.random() < 0.98 else sample.whole)
    outcome = opened(path, rng, damaged=False)
    if not outcome.startswith("opened"):
        return outcome
    try:
        file = ModelFile.open(path)
        policy, vision = file.metadata.config.policy, file.metadata.config.vision
        if policy is None or vision is None or policy.actions * policy.steps > MAX_RUN or vision.most_tokens > MAX_RUN:
            return "not run"
        with Model.load(path, target="reference", context=130) as model, warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            found = model.act([Image.new("RGB", (16, 16), "red")], "a b", [0.5] * min(policy.state_size, 9), seed=1)
        assert found.shape == (policy.actions, policy.action_size) and np.isfinite(found).all()
    except EdgeqError as error:
        return refused(error)
    return "acted"


def opened(path: Path, rng: random.Random, damaged: bool) -> str:
    """Open a file and do what `edgeq inspect` does; one in 64 is shown too.

    damaged   bytes outside the metadata were changed: a comparison with the digests must find it
    """
    try:
        file = ModelFile.open(path)
        facts = collect(file, False)
        json.dumps(facts, allow_nan=False)
        if rng.random() < 1 / 64:
            with redirect_stdout(io.StringIO()) as shown:
                show(facts)
            assert shown.getvalue().replace("\n", "").isprintable(), "control characters in what inspect shows"
    except EdgeqError as error:
        return refused(error)
    try:
        for _ in file.verify():
            pass
    except FormatError as error:
        refused(error)
        return "opened, damage found"
    assert not damaged, "bytes were changed and --verify did not find it"
    return "opened"


def drawn(rng: random.Random, samples: Sequence[Sample]) -> Sample:
    """Those with little metadata, which take less time to read, more often."""
    return rng.choices(samples, [1 / len(sample.metadata) for sample in samples])[0]


def changed_file(rng: random.Random, samples: Sequence[Sample], path: Path) -> str:
    """A file whose bytes are changed or cut; of one in four the metadata alone, with a right digest."""
    sample = drawn(rng, samples)
    whole, kind = sample.whole, rng.randrange(16)
    if kind < 4:
        path.write_bytes(seal(sample.data, changed_bytes(rng, sample.metadata)))
        return opened(path, rng, damaged=False)
    if kind < 7:
        mutant = whole[: rng.randrange(len(whole))]
    elif kind < 9:
        mutant = changed_bytes(rng, whole)
    else:
        # Each part as often as another: header, zeros after it, data, metadata.
        ends = (0, 64, DATA_OFFSET, DATA_OFFSET + len(sample.data), len(whole))
        part = rng.randrange(4)
        begin, end = ends[part], ends[part + 1]
        piece = changed_bytes(rng, whole[begin:end])
        if rng.random() < 0.5:
            piece = piece[: end - begin].ljust(end - begin, b"\0")
        mutant = whole[:begin] + piece + whole[end:]
    path.write_bytes(mutant)
    return opened(path, rng, damaged=mutant != whole)


def changed_metadata(rng: random.Random, sample: Sample) -> bytes:
    """A file whose metadata is well formed but for up to four fields, with a right digest."""
    while True:
        model = pickle.loads(sample.model)
        for _ in range(rng.choice((1, 1, 2, 4))):
            _change_record(rng, model)
        builder = flatbuffers.Builder(1 << 14)
        try:
            builder.Finish(model.Pack(builder), file_identifier=b"EDGQ")
        except Exception:
            # flatbuffers' writer does not take what does not fit its field.
            continue
        return seal(sample.data, bytes(builder.Output()))


def metadata(rng: random.Random, samples: Sequence[Sample], path: Path) -> str:
    path.write_bytes(changed_metadata(rng, drawn(rng, samples)))
    return opened(path, rng, damaged=False)


def _change_record(rng: random.Random, record: Any) -> None:
    """Descend from `record` to a field and change it."""
    while True:
        name = rng.choice(list(vars(record)))
        value = getattr(record, name)
        if isinstance(value, (list, tuple)) and value and hasattr(value[0], "__dict__"):
            if rng.random() < 0.2:
                items = list(value)
                match rng.randrange(3):
                    case 0:
                        items.pop(rng.randrange(len(items)))
                    case 1:
                        items.append(rng.choice(items))
                    case 2:
                        rng.shuffle(items)
                setattr(record, name, items)
                return
            record = rng.choice(value)
        elif hasattr(value, "__dict__"):
            if rng.random() < 0.1:
                setattr(record, name, None)
                return
            record = value
        else:
            setattr(record, name, _other_field(rng, value))
            return


def _other_field(rng: random.Random, value: Any) -> Any:
    if isinstance(value, (bytes, str)):
        text = value if isinstance(value, str) else value.decode("utf-8", "replace")
        if text[:2] == '{"':
            return json.dumps(changed_json(rng, json.loads(text)))
        return rng.choice((text[:-1], f"{text}x", "", "head", "layers.0.q", "x" * rng.choice((256, 257)), "\x1b\n"))
    if isinstance(value, int):
        return rng.choice((*EDGES, 2**63, 2**64 - 64, value + 1, value - 1, value + 64, 2 * value, value // 2)) % 2**64
    if value is None or not hasattr(value, "__len__"):
        return rng.choice((None, 0, 1, [], ""))
    items = [int(item) for item in value]
    return [*items, 1] if rng.random() < 0.5 else [rng.choice(EDGES) for _ in items]
