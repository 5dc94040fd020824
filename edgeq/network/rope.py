"""How attention knows positions: rotations (Su et al. 2021, arXiv 2104.09864), their frequencies, and the positions of
pictures; or slopes of scores (Press et al. 2022, arXiv 2108.12409)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgeq.errors import FormatError, UnsupportedError
from edgeq.network.json_records import check_flag, check_integer, check_positive, known, list_of

ROPE_KINDS = ("default", "linear", "llama3", "longrope", "learned", "axial", "yarn", "proportional", "alibi")
UNROTATED = ("learned", "alibi")
"""Kinds that leave queries and keys as they are, in all layers."""
IN_SECTIONS = ("default", "axial")
"""Kinds whose pairs can belong to several axes."""
MAX_AXES = 3
MAX_HEAD = 1024
NEWER_FIELDS = ("sections", "interleaved", "beta_fast", "beta_slow", "truncate", "alibi_bias_max")
"""Fields that came after the first files: written only where they are set, so that other files keep their bytes."""


@dataclass(frozen=True)
class Rope:
    """How queries and keys are rotated by their positions, halves of a head against each other as in Llama.

    kind    "default"; "linear" (positions divided by factor); "llama3" (Llama 3.1: low frequencies divided by factor, a smooth
            step between original_max_position_embeddings / high_freq_factor and / low_freq_factor); "longrope" (Ding et al.
            2024, arXiv 2402.13753: each frequency divided by its entry of long_factor where the context is longer than
            original_max_position_embeddings, else of short_factor; cosines and sines times attention_factor); "learned" (none:
            an entry of a table is added to the embedding instead); "axial" (each section has the whole spectrum, as rows and
            columns of a picture have in a tower); "yarn" (Peng et al. 2023, arXiv 2309.00071: frequencies of more than
            beta_fast turns in the original context stay, those of less than beta_slow are divided by factor, between them the
            two are mixed linearly in the index of the pair; cosines and sines times attention_factor); "proportional" (Gemma 4:
            the whole head is pairs, of which the first partial_rotary_factor of all turn, and the others stay); "alibi" (none:
            scores grow with the positions of keys, see `alibi_slopes`)
    sections      pairs that each of several axes rotates; in "default" time, height and width share one spectrum (M-RoPE, Wang
                  et al. 2024, arXiv 2409.12191); empty: one axis rotates all
    interleaved   of "default": pairs i with i % 3 = 1 and 2 belong to height and width, as many as their sections say, and all
                  others to time (Qwen3-VL); else the sections follow one another
    truncate      of "yarn": the indices between which frequencies are mixed are rounded, down and up
    alibi_bias_max   of "alibi": slopes begin below 1 and end at 2^-alibi_bias_max, all times attention_factor

    The first head_dim * partial_rotary_factor channels of a head are rotated, but in "proportional".
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    partial_rotary_factor: float = 1.0
    attention_factor: float = 1.0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    sections: tuple[int, ...] = ()
    interleaved: bool = False
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    alibi_bias_max: float = 8.0

    @property
    def axes(self) -> int:
        """Positions that a token has."""
        return len(self.sections) or 1

    def rotary_size(self, head_dim: int) -> int:
        """Channels of a head that are rotated."""
        return head_dim if self.kind == "proportional" else int(head_dim * self.partial_rotary_factor)

    def check(self, head_dim: int, name: str) -> None:
        """UnsupportedError: the kind; FormatError: a number that is out of range or does not fit `head_dim`."""
        if self.kind not in ROPE_KINDS:
            raise UnsupportedError(f"rope kind {self.kind!r} is not supported; supported: {', '.join(ROPE_KINDS)}")
        if self.kind in UNROTATED and name != "rope":
            raise UnsupportedError(
                f"config {name} of kind {self.kind!r} is not supported; supported: a rope of that kind, of all layers"
            )
        lists = {"short_factor": self.short_factor, "long_factor": self.long_factor}
        apart = ("kind", "sections", "interleaved", "truncate", *lists)
        numbers = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in apart}
        numbers.update({f"{key}[{i}]": value for key, values in lists.items() for i, value in enumerate(values)})
        for key, value in numbers.items():
            check_positive(f"{name}.{key}", value)
        size = self.rotary_size(head_dim)
        if self.partial_rotary_factor > 1 or size < 2 or size % 2:
            raise FormatError(f"config {name} rotates {size} of {head_dim} channels; expected an even number of them")
        for key, values in lists.items():
            if len(values) != (size // 2 if self.kind == "longrope" else 0):
                raise FormatError(f"config {name}.{key} has {len(values)} entries for {size // 2} pairs of a {self.kind} rope")
        check_flag(f"{name}.truncate", self.truncate)
        if self.kind == "yarn" and (self.theta <= 1 or self.beta_slow >= self.beta_fast):
            raise FormatError(
                f"config {name} has theta {self.theta}, beta_slow {self.beta_slow} and beta_fast {self.beta_fast}; a yarn rope "
                "needs theta above 1, and the first beta smaller than the second"
            )
        self._check_sections(size // 2, name)

    def _check_sections(self, pairs: int, name: str) -> None:
        for number in self.sections:
            check_integer(f"{name}.sections", number, 1, pairs)
        if type(self.interleaved) is not bool or (self.interleaved and (self.kind != "default" or self.axes != MAX_AXES)):
            raise FormatError(f"config {name}.interleaved is {self.interleaved!r} for {self.axes} axes of a {self.kind} rope")
        if not self.sections and self.kind != "axial":
            return
        if self.kind not in IN_SECTIONS:
            raise UnsupportedError(f"config {name}.sections with rope kind {self.kind!r}; supported: {', '.join(IN_SECTIONS)}")
        if len(self.sections) > MAX_AXES or sum(self.sections) != pairs:
            raise FormatError(f"config {name}.sections are {self.sections}; expected at most {MAX_AXES} that add up to {pairs}")
        if self.interleaved and any(3 * n > pairs + 2 - axis for axis, n in enumerate(self.sections) if axis):
            raise FormatError(f"config {name}.sections are {self.sections}; interleaved, axes 1 and 2 take every third pair")

    def to_json(self) -> dict[str, Any]:
        """What JSON holds of it; fields of NEWER_FIELDS only where they are set."""
        unset = {f.name: f.default for f in fields(self) if f.name in NEWER_FIELDS}
        return {key: value for key, value in asdict(self).items() if key not in unset or value != unset[key]}

    @classmethod
    def from_json(cls, data: Any, where: str) -> Rope:
        """FormatError, UnsupportedError: a key or a list that cannot be one; `check` looks at the numbers."""
        values = dict(known(cls, data, where))
        for key, most in (("short_factor", MAX_HEAD), ("long_factor", MAX_HEAD), ("sections", MAX_AXES)):
            values[key] = list_of(values, key, most, where)
        return cls(**values)


class Rotation(NamedTuple):
    """frequencies   radians per position of each rotated pair;  axes: which of a row's positions turns it, empty: the first."""

    frequencies: tuple[float, ...]
    axes: tuple[int, ...]


def rotation(rope: Rope, head_dim: int, context: int = 0) -> Rotation:
    """How each pair of a head is rotated in sessions of up to `context` positions.

    FormatError: the bounds of a llama3 rope are in the wrong order.
    """
    if rope.kind == "axial":
        # Section s of n pairs has the frequencies theta^(-i / n).
        spectrum = [rope.theta ** (-i / n) for n in rope.sections for i in range(n)]
        return Rotation(tuple(spectrum), tuple(axis for axis, n in enumerate(rope.sections) for _ in range(n)))
    found = frequencies(rope, head_dim, context)
    if not rope.interleaved:
        return Rotation(found, tuple(axis for axis, n in enumerate(rope.sections) for _ in range(n)))
    axes = [0] * len(found)
    for axis in range(1, rope.axes):
        for i in range(rope.sections[axis]):
            axes[3 * i + axis] = axis
    return Rotation(found, tuple(axes))


def alibi_slopes(rope: Rope, heads: int) -> tuple[float, ...]:
    """By how much the scores of each head grow from a key to the next one, after they are scaled (Press et al. 2022, arXiv
    2108.12409).

    Of n heads, a power of two, head h from 1 on has 2^(-h m / n), m = alibi_bias_max.  Else the first p heads, the largest
    power of two below their number, have those of p, and the others every second one of 2 p, from the first on.  What a
    token's score has in common for all keys leaves no trace in the softmax, so positions may be counted from anywhere.
    """
    power = 1 << heads.bit_length() - 1
    exponents = [(h + 1) / power for h in range(power)] + [(2 * h + 1) / (2 * power) for h in range(heads - power)]
    return tuple(rope.attention_factor * 2 ** (-rope.alibi_bias_max * each) for each in exponents)


def frequencies(rope: Rope, head_dim: int, context: int = 0) -> tuple[float, ...]:
    """Radians per position of each rotated pair where one spectrum serves all, for sessions of up to `context` positions.

    FormatError: the bounds of a llama3 rope are in the wrong order.
    """
    size = rope.rotary_size(head_dim)
    if rope.kind == "proportional":
        turning = int(rope.partial_rotary_factor * head_dim // 2)
        return tuple(rope.theta ** (-2 * i / head_dim) if i < turning else 0.0 for i in range(head_dim // 2))
    plain = [rope.theta ** (-2 * i / size) for i in range(size // 2)]
    if rope.kind == "linear":
        return tuple(f / rope.factor for f in plain)
    if rope.kind == "llama3":
        if rope.low_freq_factor >= rope.high_freq_factor:
            raise FormatError(
                f"config rope has low_freq_factor {rope.low_freq_factor} and high_freq_factor {rope.high_freq_factor}; "
                "the first must be smaller"
            )
        return tuple(_llama3(f, rope) for f in plain)
    if rope.kind == "longrope":
        # One choice for a whole session: keys already in its cache keep the rotation that they got.
        factors = rope.long_factor if context > rope.original_max_position_embeddings else rope.short_factor
        return tuple(f / factor for f, factor in zip(plain, factors, strict=True))
    if rope.kind == "yarn":
        return tuple(_yarn(plain, rope, size))
    return tuple(plain)


def _yarn(plain: list[float], rope: Rope, size: int) -> Iterator[float]:
    """YaRN's mix of frequencies, section 3.2: pair i turns beta times in the original context at the index that `at` gives."""

    def at(beta: float) -> float:
        return size * math.log(rope.original_max_position_embeddings / (2 * math.pi * beta)) / (2 * math.log(rope.theta))

    low, high = at(rope.beta_fast), at(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    width = high - low or 0.001
    for i, frequency in enumerate(plain):
        share = min(1.0, max(0.0, (i - low) / width))
        yield (1 - share) * frequency + share * frequency / rope.factor


def _llama3(frequency: float, rope: Rope) -> float:
    """Llama 3.1's long context: wavelengths beyond the original context are stretched by `factor`, short ones stay.

    With n = original_max_position_embeddings / wavelength turns in the original context: n > high_freq_factor stays,
    n < low_freq_factor is divided by `factor`, between them the two are mixed linearly in n.
    """
    turns = rope.original_max_position_embeddings * frequency / (2 * math.pi)
    share = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    share = min(1.0, max(0.0, share))
    return (1 - share) * frequency / rope.factor + share * frequency


def picture_positions(start: int, grid: tuple[int, int, int]) -> NDArray[np.int32]:
    """Positions int32 [3, t * h * w] of a picture's tokens in a decoder with M-RoPE, frame by frame, row by row.

    start   1 + the largest position before it
    grid    frames, rows and columns of tokens, after merging

    A token has the positions (start + frame, start + row, start + column) (Wang et al. 2024, arXiv 2409.12191, section 2.1).
    What follows goes on after the largest: at start + max(t, h, w).
    """
    places = np.indices(grid, np.int32).reshape(3, -1)
    return np.asarray(places + np.int32(start), np.int32)
