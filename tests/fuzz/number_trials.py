"""Model files run on the cpu target, in a fence, and on the reference: the same refusal, or the same numbers."""

from __future__ import annotations

import random
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from disturbance import disturbed
from fence import fenced
from file_trials import Sample, changed_metadata, drawn
from model_files import make
from mutation import refused

from edgeq import machine
from edgeq.container import DATA_OFFSET, ModelFile
from edgeq.errors import EdgeqError
from edgeq.records import MODES, Mode
from edgeq.runtime import Model
from edgeq.runtime.requantize import Requantization
from edgeq.targets.cpu.isa import all_isas

HERE = [
    i.name for i in all_isas() if i.needs <= machine.cpu().features and (not i.machines or machine.cpu().arch in i.machines)
]
LENGTHS = (1, 2, 3, 4, 5, 11, 12, 13, 16, 17, 23)
"""Tokens of a prompt: tiles of 12, 4 and 1, alone and together, whole and not."""
DECODED = 2
MANY, TIMES = 48, 4.0
"""Disturbed runs where a few do not explain a difference, and the noise of the last of them beside that of the first."""
LARGEST = 1 << 24
"""Numbers in the buffers of a run, of rows that a mutant could claim: more is not run."""


def same_numbers(path: Path, rng: random.Random, isas: Sequence[str], threads: Sequence[int], mode: Mode | None) -> str:
    """Run a prompt and some tokens in each way; compare what came out, and look at the fence.

    AssertionError: a target refuses what the other runs, without naming the other; the number of threads changes a bit; logits
    differ, or are finite on one target alone, and the reference does not move as far when it is disturbed.
    """
    seed, length = rng.getrandbits(32), rng.choice(LENGTHS)
    wanted = _run(path, "reference", None, 1, mode, seed, length)
    results: dict[str, Any] = {}
    outcome = ""
    for isa in isas:
        for count in threads:
            with fenced() as fence:
                found = _run(path, "cpu", isa, count, mode, seed, length)
                fence.check()
            known = results.setdefault(isa, found)
            same = known == found if isinstance(known, str) or isinstance(found, str) else np.array_equal(known, found, True)
            assert same, f"{isa}: {count} threads give other bits"
        outcome = _compared(path, mode, seed, length, results[isa], wanted, isa)
    return outcome


def _run(path: Path, target: str, isa: str | None, threads: int, mode: Mode | None, seed: int, length: int) -> Any:
    """Logits float32 [1 + DECODED, vocab], or the message of a refusal."""
    rng = random.Random(seed)
    try:
        model = Model.load(
            path, target=target, isa=isa, threads=threads, mode=mode, max_rows=24, max_logits=1, requantization=_settings(path)
        )
        vocab, left = model.config.vocab_size, max(1, model.context - DECODED)
        tokens = [rng.randrange(vocab) for _ in range(min(length, left) + DECODED)][: model.context]
        with warnings.catch_warnings(), np.errstate(all="ignore"), model, model.session() as session:
            warnings.simplefilter("ignore")
            first = tokens[: max(1, len(tokens) - DECODED)]
            logits = [session.prefill(first).copy()]
            logits += [session.decode(token).copy() for token in tokens[len(first) :]]
    except EdgeqError as error:
        refused(error)
        return str(error)
    return np.array(logits)


def _settings(path: Path) -> Requantization | None:
    """Requantize after a prompt of any length, where there are masters."""
    masters = any(linear.master for linear in ModelFile.open(path).metadata.linears.values())
    return Requantization(min_tokens=1) if masters else None


def _compared(path: Path, mode: Mode | None, seed: int, length: int, found: Any, wanted: Any, isa: str) -> str:
    if isinstance(found, str) or isinstance(wanted, str):
        if isinstance(found, str) and isinstance(wanted, str):
            return "refused"
        assert isinstance(found, str) and found.endswith("run with --target reference"), f"{isa}: {found}, reference: {wanted}"
        return "the cpu target names the reference"
    moved: list[Any] = []
    for run in range(MANY):
        # Few runs, as large as they were measured to be, nearly always suffice.
        noise = 1.0 if run < 4 else 1.0 + (TIMES - 1) * run / MANY
        with disturbed(seed + run, noise):
            moved.append(_run(path, "reference", None, 1, mode, seed, length))
        if run % 4 == 3 and (outcome := _explained(found, wanted, moved, 8.0 if run == 3 else 3.0)):
            return outcome
    with np.errstate(all="ignore"):
        size, most = np.abs(wanted).max(axis=1), max(float(np.abs(m - wanted).max()) for m in moved)
        raise AssertionError(f"{isa}: logits differ by {np.abs(found - wanted).max(axis=1)} of {size}; disturbed: {most:.3g}")


def _explained(found: Any, wanted: Any, moved: Sequence[Any], factor: float) -> str:
    """What the comparison of logits [rows, vocab] says; "" where the disturbed runs do not explain a difference."""
    sound, expected = np.isfinite(found).all(axis=1), np.isfinite(wanted).all(axis=1)
    others = np.array([np.isfinite(m).all(axis=1) for m in moved])
    if ((sound != expected) & (others == expected).all(axis=0)).any():
        return ""
    if not (sound & expected).any():
        return "not finite on both" if not (sound | expected).any() else "overflows on one, as when disturbed"
    rows = sound & expected
    with np.errstate(all="ignore"):
        spread = np.max([np.abs(m - wanted).max(axis=1) for m in moved], axis=0)
        size = np.abs(wanted).max(axis=1)
        spread = np.where(others.all(axis=0), spread, np.inf)
        difference = np.abs(found - wanted).max(axis=1)
        if (difference[rows] > factor * spread[rows] + 1e-6 * size[rows]).any():
            return ""
        relative = float((factor * spread[rows] / np.maximum(size[rows], np.float32(1e-30))).max())
    tight = next((name for limit, name in ((1e-3, "0.1 %"), (1e-2, "1 %"), (1e-1, "10 %")) if relative < limit), "more")
    return f"same within {tight}"


def _changed_data(rng: random.Random, sample: Sample) -> bytes:
    """A file in whose data some numbers are extremes, or bits are changed; no digest of its data is right then."""
    changed = bytearray(sample.data)
    words = (
        b"\0\0\xc0\x7f",
        b"\0\0\x80\x7f",
        b"\0\0\x80\xff",
        b"\0\x7e\0\x7e",
        b"\0\x7c\0\x7c",
        b"\xff\xff\x7f\x7f",
        b"\1\0\1\0",
    )
    for _ in range(rng.choice((1, 1, 4, 64))):
        at = rng.randrange(len(changed) // 4) * 4
        if rng.random() < 0.3:
            changed[at : at + 4] = rng.choice(words)
        else:
            changed[at] ^= 1 << rng.randrange(8)
    return sample.whole[:DATA_OFFSET] + bytes(changed) + sample.metadata


def mutant(rng: random.Random, samples: Sequence[Sample], path: Path) -> str:
    """A file with other metadata, one in four with other data, drawn until one opens; in one way."""
    while True:
        sample = drawn(rng, samples)
        path.write_bytes(_changed_data(rng, sample) if rng.random() < 0.25 else changed_metadata(rng, sample))
        try:
            file = ModelFile.open(path)
        except EdgeqError as error:
            refused(error)
            continue
        config = file.metadata.config
        if config.max_position_embeddings * config.head_dim * config.num_hidden_layers < LARGEST:
            return same_numbers(path, rng, [rng.choice(HERE)], [rng.choice((1, 2))], None)


def sound(rng: random.Random, path: Path) -> str:
    """A generated file of sound numbers, one in eight with hostile ones, on every instruction set with one thread and two."""
    make(path, rng.getrandbits(64), 0.0 if rng.random() < 0.875 else 0.5)
    return same_numbers(path, rng, HERE, (1, 2), rng.choice(MODES))
