"""Model files run on the cpu target, in a fence, and on the reference: the same refusal, or the same numbers."""

from __future__ import annotations

import random
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from disturbance import disturbed
from fence import fenced
from file_trials import Sample, changed_metadata, drawn
from model_files import make
from mutation import refused
from numpy.typing import NDArray

from edgeq.errors import EdgeqError
from edgeq.format.container import DATA_OFFSET, ModelFile
from edgeq.format.records import MODES, Mode
from edgeq.runtime import Model
from edgeq.runtime.session.requantize import Requantization
from edgeq.system import machine
from edgeq.targets import pick
from edgeq.targets.cpu.isa import all_isas
from edgeq.targets.target import Options

Logits = NDArray[np.float32]
HERE = [isa.name for isa in all_isas() if isa.runs_on(machine.cpu().arch, machine.cpu().features)]
LENGTHS = (1, 2, 3, 4, 5, 11, 12, 13, 16, 17, 23, 24, 37)
"""Tokens of a prompt: tiles of 12, 4 and 1, alone and together, whole and not, and panels of 32, whole and not."""
DECODED = 2
FEW, MANY, TIMES = 4, 48, 4.0
"""Disturbed runs, those where a few do not explain a difference, and how much more noise the last of them has."""
MAX_NUMBERS = 1 << 24
"""Numbers in the buffers of a run, of rows that a mutant could claim: more is not run."""


@dataclass(frozen=True)
class Prompt:
    """A prompt of `length` tokens, and those that are decoded after it, drawn by `seed`."""

    length: int
    seed: int

    def run(self, model: Model) -> Logits:
        """Logits float32 [1 + DECODED, vocab]; fewer where the context is shorter."""
        rng, vocab, left = random.Random(self.seed), model.config.vocab_size, max(1, model.context - DECODED)
        tokens = [rng.randrange(vocab) for _ in range(min(self.length, left) + DECODED)][: model.context]
        first = tokens[: max(1, len(tokens) - DECODED)]
        with warnings.catch_warnings(), np.errstate(all="ignore"), model.session() as session:
            warnings.simplefilter("ignore")
            logits = [session.prefill(first).copy()]
            logits += [session.decode(token).copy() for token in tokens[len(first) :]]
        return np.array(logits)


def same_numbers(path: Path, rng: random.Random, isas: Sequence[str], threads: Sequence[int], mode: Mode | None) -> str:
    """Run a prompt and some tokens in each way; compare what came out, and look at the fence.

    AssertionError: a target refuses what the other runs, without naming the other; the number of threads changes a bit; logits
    differ, or are finite on one target alone, and the reference does not move as far when it is disturbed.
    """
    prompt = Prompt(rng.choice(LENGTHS), rng.getrandbits(32))
    reference = _loaded(path, "reference", None, 1, mode)
    if isinstance(reference, str):
        wanted: Logits | str = reference
    else:
        wanted = prompt.run(reference)
    outcome = ""
    for isa in isas:
        known: Logits | str | None = None
        for count in threads:
            with fenced() as fence:
                model = _loaded(path, "cpu", isa, count, mode)
                if isinstance(model, str):
                    found: Logits | str = model
                else:
                    with model:
                        found = prompt.run(model)
                fence.check()
            same = known is None or (found == known if isinstance(found, str) else np.array_equal(found, known, True))
            assert same, f"{isa}: {count} threads give other bits"
            known = found
        if isinstance(found, str) or isinstance(reference, str):
            sound = isinstance(found, str) and (isinstance(reference, str) or found.endswith("run with --target reference"))
            assert sound, f"{isa}: {found if isinstance(found, str) else 'runs'}; reference: {reference}"
            outcome = "refused" if isinstance(reference, str) else "the cpu target names the reference"
        else:
            outcome = _compared(reference, prompt, found, wanted, isa)
    return outcome


def _loaded(path: Path, target: str, isa: str | None, threads: int, mode: Mode | None) -> Model | str:
    """The model, or the message of its refusal; weights with a master are requantized after a prompt of any length."""
    try:
        file = ModelFile.open(path)
        masters = any(linear.master for linear in file.metadata.linears.values())
        choice, chosen = pick(target, file), mode or file.metadata.default_mode
        options = Options(chosen, threads, isa, max_rows=40, max_logits=1, kv=file.metadata.kv, requantize=masters)
        return Model(file, choice, options, requantization=Requantization(min_tokens=1) if masters else None)
    except EdgeqError as error:
        refused(error)
        return str(error)


def _compared(reference: Model, prompt: Prompt, found: Logits, wanted: Any, isa: str) -> str:
    moved: list[Any] = []
    for run in range(MANY):
        # Few runs with noise of the size that differences have nearly always suffice.
        with disturbed(prompt.seed + run, 1.0 if run < FEW else 1.0 + (TIMES - 1) * run / MANY):
            moved.append(prompt.run(reference))
        if run % FEW == FEW - 1 and (outcome := _explained(found, wanted, moved, 8.0 if run < FEW else 3.0)):
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
        if config.max_position_embeddings * config.head_dim * config.num_hidden_layers < MAX_NUMBERS:
            return same_numbers(path, rng, [rng.choice(HERE)], [rng.choice((1, 2))], None)


def sound(rng: random.Random, path: Path) -> str:
    """A generated file of sound numbers, one in eight with hostile ones, on every instruction set with one thread and two."""
    make(path, rng.getrandbits(64), 0.0 if rng.random() < 0.875 else 0.5)
    return same_numbers(path, rng, HERE, (1, 2), rng.choice(MODES))
