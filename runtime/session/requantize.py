"""Test-time requantization: weights rounded again for what a session reads (Koike-Akino, Liu, Wang, arXiv 2603.19296).

A prompt runs with the master weights, and the squares of what every linear layer reads are summed per channel.  After it the
masters, their input channels scaled by s, are rounded to the weights with which the answer is decoded:

    s_i = (sum over tokens of x_i^2 + damping)^(alpha / 2),    y = Q[W diag(s)] (x / s) + B (A x)

Large inputs get finer weights.  Only future rounding changes, so keys and values in the cache stay valid.  Requantized weights
belong to their session: two sessions have two sets, each as large as the weights that it replaces, and what they decode is not
batched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock
from time import perf_counter
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from edgeq.errors import UnsupportedError
from edgeq.format.container import ModelFile
from edgeq.format.records import Mode
from edgeq.runtime.arguments import flag, integer, real, wrong
from edgeq.targets.capabilities import Requantizable
from edgeq.targets.requantization import InputSums, Weights
from edgeq.targets.rows import Rows

When = Literal["prompt", "drift", "never"]
WHEN: tuple[When, ...] = ("prompt", "drift", "never")

MAX_RATIO = 1e4
"""Scales stay within this factor of their median: f16 scales of W s hold no more."""

ArrayF32 = NDArray[np.float32]


@dataclass(frozen=True)
class Requantization:
    """When and how weights are requantized.

    when         "prompt": after every new prompt; "drift": when the scales have changed, or much was read since; "never": the
                 file's own weights, for prompts too
    alpha        0: plain rounding of the masters; 1: scales grow as the inputs do
    damping      keeps channels that were always zero from vanishing (the paper's lambda)
    per_token    mean squares instead of sums: then damping counts the same for prompts of every length
    min_tokens   with fewer tokens read the file's own weights are used
    cosine       an input has drifted if the cosine between its old and new scales is below this
    drifted      "drift" acts when more than this share of the inputs has drifted
    growth       "drift" also acts when the tokens read since are more than this many times those read before

    InputError: a value of the wrong type or out of range.
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
            raise wrong("when", self.when, f"one of {', '.join(WHEN)}")
        real("alpha", self.alpha, 0, 2)
        real("damping", self.damping, 0, 1e6)
        flag("per_token", self.per_token)
        integer("min_tokens", self.min_tokens, 1, 1 << 20)
        real("cosine", self.cosine, -1, 1)
        real("drifted", self.drifted, 0, 1)
        real("growth", self.growth, 0, 1e6)


NEVER = Requantization(when="never")


def chosen(asked: Requantization | None, file: ModelFile) -> Requantization | None:
    """The settings for `file`: what was asked for, else the default if it has masters; None: nothing is requantized.

    UnsupportedError: it was asked for and there is no master.
    """
    masters = any(layer.master for layer in file.metadata.linears.values())
    if asked is not None and asked.when != "never" and not masters:
        raise UnsupportedError(
            f"{file.path}: no layer has a master to requantize from; convert the checkpoint again with `master=i8`, "
            "or leave `requantization` out"
        )
    settings = asked or Requantization()
    return settings if masters and settings.when != "never" else None


def scales(sums: InputSums, settings: Requantization) -> list[ArrayF32]:
    """s float32 [columns] of every input.  A factor common to all channels is removed: rounding does not depend on it."""
    tokens = max(1, sums.tokens) if settings.per_token else 1
    found = []
    for squares in sums.squares():
        s = (squares.astype(np.float64) / tokens + settings.damping) ** (settings.alpha / 2)
        positive = s[s > 0]
        # `np.median` would import a quarter of numpy that nothing else needs.
        middle = float(np.partition(positive, len(positive) // 2)[len(positive) // 2]) if len(positive) else 1.0
        s = np.clip(s, middle / MAX_RATIO, middle * MAX_RATIO)
        found.append((s / np.sqrt(s.max() * s.min())).astype(np.float32))
    return found


def drifted(old: Sequence[ArrayF32], new: Sequence[ArrayF32], settings: Requantization) -> bool:
    """Whether the scales of more inputs than allowed have changed direction."""
    cosines = [float(a @ b) / float(np.linalg.norm(a) * np.linalg.norm(b)) for a, b in zip(old, new, strict=True)]
    return sum(cosine < settings.cosine for cosine in cosines) > settings.drifted * len(cosines)


class SessionRequantizer:
    """The activation statistics and the requantized weights of one session.

    weights   what to decode with; None: the file's own
    tokens    tokens that `weights` were requantized for
    """

    def __init__(self, program: Requantizable, settings: Requantization, lock: Lock) -> None:
        self.sums = program.new_sums()
        self.weights: Weights | None = None
        self.tokens = 0
        self._program, self._settings, self._lock = program, settings, lock
        self._scales: list[ArrayF32] = []
        self._shared = False  # another session may decode with `weights`
        self._judged = 0  # tokens read when `update` last decided: it is asked before every step

    def fork(self) -> SessionRequantizer:
        """The same statistics for another session; the weights are shared until one of the two requantizes."""
        forked = SessionRequantizer(self._program, self._settings, self._lock)
        forked.sums.values[:], forked.sums.tokens = self.sums.values, self.sums.tokens
        forked.weights, forked.tokens, forked._scales, forked._judged = self.weights, self.tokens, self._scales, self._judged
        self._shared = forked._shared = True
        return forked

    def run(self, rows: Rows, mode: Mode | None, summing: bool) -> ArrayF32:
        """A run of the session: with the masters while inputs are summed, else with its requantized weights if it has some."""
        if summing:
            with self.sums.transaction():
                return self._program.run_summing(rows, self.sums, mode)
        if self.weights is None:
            return self._program.run(rows, mode)
        return self._program.run_requantized(rows, self.weights, mode)

    def reset(self) -> None:
        """Discard the statistics."""
        self.sums.reset()
        self.tokens = self._judged = 0

    def keeps(self, common: int) -> bool:
        """Whether the statistics still hold for a prompt of which the first `common` tokens stay."""
        return 2 * common >= self.sums.tokens

    def update(self) -> float:
        """Requantize if it is time; the seconds that it took.

        With too few tokens read, or sums that are not finite, the file's own weights are used.
        """
        if self.sums.tokens == self._judged:
            return 0.0
        # Scales that are not numbers would be rounded to other weights by every target.
        if self.sums.tokens < self._settings.min_tokens or not np.isfinite(self.sums.values).all():
            self.weights, self.tokens = None, self.sums.tokens
            self._judged = self.tokens
            return 0.0
        before = perf_counter()
        new = scales(self.sums, self._settings)
        if self._is_time(new):
            with self._lock:
                if self.weights is None or self._shared:
                    self.weights, self._shared = self._program.new_weights(), False
                # If interrupted, half of the weights are old: they are requantized again, whatever was read since.
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
