"""Weights made anew for what a session reads (test-time quantization: Koike-Akino, Liu, Wang, arXiv 2603.19296).

A prompt runs with the master weights, and the squares of what every linear layer reads are summed per channel.  Behind it the
masters, their input channels scaled by s, are rounded into a copy of the weights, with which the answer is decoded:

    s_i = (sum over tokens of x_i^2 + damping)^(alpha / 2),    y = Q[W diag(s)] (x / s) + B (A x)

Large inputs get finer weights.  Only future rounding changes, so keys and values in the cache stay valid.  The copy belongs to
its session: two sessions have two, each as large as the weights that it replaces, and what they decode is not batched.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock
from time import perf_counter
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from edgeq.container import ModelFile
from edgeq.errors import InputError, UnsupportedError
from edgeq.targets import Program
from edgeq.targets.requantization import InputSums, Weights

When = Literal["prompt", "drift", "never"]
WHEN: tuple[When, ...] = ("prompt", "drift", "never")

SPREAD = 1e4
"""Scales stay within this factor of their median: f16 scales of W s hold no more."""

ArrayF32 = NDArray[np.float32]


@dataclass(frozen=True)
class Requantization:
    """When and how weights are made anew.

    when         "prompt": behind every new prompt; "drift": where scales have turned, or much was read since; "never": the
                 file's own weights, for prompts too
    alpha        0: plain rounding of the masters; 1: scales grow as the inputs do
    damping      keeps channels that saw nothing from vanishing (the paper's lambda)
    per_token    mean squares instead of sums: then damping counts the same for prompts of every length
    min_tokens   with fewer tokens read the file's own weights stay
    cosine       of old and new scales of a layer's input: below it, the input has drifted
    drifted      the share of inputs that may have, before "drift" acts
    growth       "drift" also acts when the tokens read since are more than this many times those read before

    InputError: a value out of range.
    """

    when: When = "prompt"
    alpha: float = 0.5
    damping: float = 0.4
    per_token: bool = False
    min_tokens: int = 16
    cosine: float = 0.9
    drifted: float = 0.1
    growth: float = 1.0

    def __post_init__(self) -> None:
        if self.when not in WHEN:
            raise InputError(f"requantize {self.when!r} is not known; supported: {', '.join(WHEN)}")
        ranges = {"alpha": (0, 2), "damping": (0, 1e6), "min_tokens": (1, 1 << 20), "cosine": (-1, 1), "drifted": (0, 1)}
        for name, (least, most) in (ranges | {"growth": (0, 1e6)}).items():
            value = getattr(self, name)
            if not (math.isfinite(value) and least <= value <= most):
                raise InputError(f"requantize {name.replace('_', ' ')} is {value}; expected {least:g} to {most:g}")


def chosen(asked: Requantization | None, file: ModelFile) -> Requantization | None:
    """What to do with `file`: what was asked, else the default where it has masters; None: nothing.

    UnsupportedError: it was asked for and there is no master.
    """
    masters = any(layer.master for layer in file.metadata.linears.values())
    if asked is not None and asked.when != "never" and not masters:
        raise UnsupportedError(
            f"{file.path}: no layer has a master to requantize from; convert with --master i8, or leave --requantize out"
        )
    settings = asked or Requantization()
    return settings if masters and settings.when != "never" else None


def scales(sums: InputSums, settings: Requantization) -> list[ArrayF32]:
    """s float32 [columns] of every input.  A factor common to all channels is lost on purpose: rounding does not see it."""
    tokens = max(1, sums.tokens) if settings.per_token else 1
    found = []
    for squares in sums.squares():
        s = (squares.astype(np.float64) / tokens + settings.damping) ** (settings.alpha / 2)
        positive = s[s > 0]
        # `np.median` would import a quarter of numpy that nothing else needs.
        middle = float(np.partition(positive, len(positive) // 2)[len(positive) // 2]) if len(positive) else 1.0
        s = np.clip(s, middle / SPREAD, middle * SPREAD)
        found.append((s / np.sqrt(s.max() * s.min())).astype(np.float32))
    return found


def drifted(old: Sequence[ArrayF32], new: Sequence[ArrayF32], settings: Requantization) -> bool:
    """Whether more inputs than allowed have scales that point elsewhere."""
    cosines = [float(a @ b) / float(np.linalg.norm(a) * np.linalg.norm(b)) for a, b in zip(old, new, strict=True)]
    return sum(cosine < settings.cosine for cosine in cosines) > settings.drifted * len(cosines)


class Requantizer:
    """The sums and the copy of one session.

    weights   what to decode with; None: the file's own
    tokens    read for that copy
    """

    def __init__(self, program: Program, settings: Requantization, turn: Lock) -> None:
        self.sums = program.new_sums()
        self.weights: Weights | None = None
        self.tokens = 0
        self._program, self._settings, self._turn = program, settings, turn
        self._scales: list[ArrayF32] = []
        self._judged = 0  # tokens read when `update` last decided: it is asked before every step

    def begin(self) -> None:
        """Nothing is left of what was read."""
        self.sums.clear()
        self.tokens = self._judged = 0

    def keeps(self, common: int) -> bool:
        """Whether sums over a prompt of which the first `common` tokens stay still speak for it."""
        return 2 * common >= self.sums.tokens

    def update(self) -> float:
        """Make the copy anew if it is time; the seconds that it took.

        With too few tokens read there is none.
        """
        if self.sums.tokens == self._judged:
            return 0.0
        if self.sums.tokens < self._settings.min_tokens:
            self.weights, self.tokens = None, self.sums.tokens
            self._judged = self.tokens
            return 0.0
        before = perf_counter()
        new = scales(self.sums, self._settings)
        if self._is_time(new):
            with self._turn:
                if self.weights is None:
                    self.weights = self._program.new_weights()
                # Interrupted, it is half of one copy and half of another: made again, whatever was read since.
                self.tokens = 0
                self._program.requantize(self.weights, new)
            self._scales, self.tokens = new, self.sums.tokens
        self._judged = self.sums.tokens
        return perf_counter() - before

    def _is_time(self, new: Sequence[ArrayF32]) -> bool:
        fresh = self.sums.tokens - self.tokens
        if self.weights is None or self.tokens == 0:
            return True
        if self._settings.when == "prompt":
            # One token runs again where a prompt is repeated.
            return fresh > 1
        return fresh > self._settings.growth * self.tokens or drifted(self._scales, new, self._settings)
