"""Rounds weights group by group, in torch float32, by named presets.

What papers call the same rounding differs in the range that the integers cover and in whether it holds 0.  Per group of a row,
at b bits, by the name that a file's provenance has (and that of files of earlier versions, which took it from a paper whatever
the method was):

    min-max         (awq-asymmetric)   scale (max - min) / (2^b - 1), zero = clamp(-round(min / scale), 0, 2^b - 1); the range
                    is not forced to contain 0: a group of only positive weights gets zero 0 and its top is clipped
    min-max-zero    (gptq-asymmetric)   the same over a range that has 0 in it (Frantar et al. 2022, arXiv 2210.17323)
    absmax          (awq-symmetric, smoothquant)   scale max|w| / (2^(b-1) - 1); q in -2^(b-1) ... 2^(b-1) - 1, stored plus
                    2^(b-1) (also Xiao et al. 2022, arXiv 2211.10438)
    absmax-full     (gptq-symmetric)   scale 2 max|w| / (2^b - 1), the same integers: the lowest is used, the largest weight is
                    clipped a little
    absmax-search   (quarot)   as absmax, over the range, of 1.00 ... 0.21 of the largest weight, with the least
                    sum |error|^2.4 (Ashkboos et al. 2024, arXiv 2404.00456; the search is that of the GPTQ family's code)
    half            scale 2 max|w| / (2^b - 1), of a grid whose zero lies half way between two integers
    table           scale max|w| / the largest entry of a table, that of a Gaussian (tables.py); the nearest entry is taken
    trellis         the same; of the entries those that 16 rows together are nearest to (ring.py)
    ...-weighed     over the part of that range with the least sum of cost * error^2, where columns have costs (columns.py); of
                    half, table and trellis down to what suits the weights' mean square

The last group of a row is shorter where the group size does not divide the columns.

Scales of four bits are shares of the row's largest one, each the nearest.

Ranges are at least 1e-5 wide.  Rounding is half to even.  The scale is rounded to what the file holds *before* q is computed,
so what a search measured is what it holds, but for scales of four bits, which are rounded when all of a row are known.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from edgeq.converters.checkpoint.source import StoredArrays
from edgeq.converters.rounding.presets import MIN_MAX, Preset
from edgeq.converters.rounding.ring import nearest_rings
from edgeq.converters.rounding.tables import gaussian_levels, trellis_levels
from edgeq.errors import CheckpointError
from edgeq.format.codec import SCALE_CODES, Codec, dequantized
from edgeq.format.quantization import MIN_RANGE
from edgeq.format.trellis import by_subset, ring_indices

SLAB_ROWS = 1024
SEARCH_STEPS = 80
SEARCH_POWER = 2.4
SEARCH_ELEMENTS = 1 << 22
"""Weights that are searched at a time: the search holds several arrays of this size."""


@dataclass(frozen=True)
class Quantized:
    """q uint8 [rows, columns]; scale f16 and zero u8 (asymmetric only) [rows, groups]: what edgeq.format.codec packs.

    Scales of four bits: their codes, u8, and super_scale f16 [rows, 1].  Of a table its entries, int8 [rows, 2**bits],
    of a trellis twice as many."""

    q: Tensor
    scale: Tensor
    zero: Tensor | None = None
    super_scale: Tensor | None = None
    table: Tensor | None = None

    @classmethod
    def joined(cls, parts: Sequence[Quantized]) -> Quantized:
        """The integers of more rows as one."""
        if len(parts) == 1:
            return parts[0]
        return cls(**{name: torch.cat([part._tensors[name] for part in parts]) for name in parts[0]._tensors})

    def rows(self, which: slice) -> Quantized:
        """Those of some rows."""
        return Quantized(**{name: tensor[which] for name, tensor in self._tensors.items()})

    @property
    def _tensors(self) -> dict[str, Tensor]:
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    @property
    def scales(self) -> Tensor:
        """Scale of every group, float32 [rows, groups]."""
        if self.super_scale is None:
            return self.scale.float()
        return scale_levels(self.scale)[self.scale.long()] * self.super_scale.float()

    @property
    def arrays(self) -> StoredArrays:
        """The same by the names of `Codec.parts`."""
        return {name: tensor.numpy() for name, tensor in self._tensors.items()}

    def slabs(self) -> Iterator[Quantized]:
        """The same in slabs of rows, so that packing needs little beside it."""
        for top in range(0, len(self.q), SLAB_ROWS):
            yield self.rows(slice(top, top + SLAB_ROWS))


@dataclass(frozen=True)
class Grid:
    """Scale (already rounded) and zero point of every group, float32 [rows, groups]; integers are 0 ... 2^bits - 1.

    row     float32 [rows, 1]: of scales of four bits what they are a share of
    levels  float32 [2^bits]: of a table its entries, the least first, whose indices the integers are
    ring    levels are entries of a trellis, float32 [2^(bits + 1)] in the order of indices; the first row is that of a block
    """

    scale: Tensor
    zero: Tensor
    bits: int
    row: Tensor | None = None
    levels: Tensor | None = None
    ring: bool = False

    @classmethod
    def joined(cls, grids: Sequence[Grid], dimension: int) -> Grid:
        """The grids of more rows (dimension 0) or of more groups (dimension 1) as one."""
        if len(grids) == 1:
            return grids[0]
        scale, zero = torch.cat([g.scale for g in grids], dimension), torch.cat([g.zero for g in grids], dimension)
        return replace(grids[0], scale=scale, zero=zero)

    def integers(self, groups: Tensor) -> Tensor:
        """Weights [rows, groups, any] -> stored integers as float32."""
        if self.ring:
            return self._of_rings(groups)
        if self.levels is not None:
            between = (self.levels[:-1] + self.levels[1:]) / 2
            return torch.bucketize(groups / self.scale[..., None], between).to(groups.dtype)
        # A zero half way between two integers: what is rounded is the distance from the one after it.
        zero = self.zero.ceil()[..., None]
        return (
            groups.div(self.scale[..., None])
            .sub_(zero - self.zero[..., None])
            .round_()
            .add_(zero)
            .clamp_(0, (1 << self.bits) - 1)
        )

    def weights(self, integers: Tensor) -> Tensor:
        """The inverse: what is read back, [rows, groups, any]."""
        if self.ring:
            q = integers.flatten(1).cpu().numpy().astype(np.uint8)
            integers = torch.from_numpy(ring_indices(q, self.bits)).to(integers.device).view(integers.shape)
        if self.levels is not None:
            return self.levels[integers.long()] * self.scale[..., None]
        return (integers - self.zero[..., None]) * self.scale[..., None]

    def stored(self, integers: Tensor, codec: Codec) -> Quantized:
        """`integers` [rows, columns] on this grid as the arrays of `codec`."""
        q = integers.to(torch.uint8)
        table = None if self.levels is None else self.levels.to(torch.int8).repeat(len(q), 1)
        if self.row is not None:
            return Quantized(q, scale_codes(self.scale, self.row), super_scale=self.row.half(), table=table)
        if table is not None:
            return Quantized(q, self.scale.half(), table=table)
        return Quantized(q, self.scale.half(), self.zero.to(torch.uint8) if codec.zero_kind == "integer" else None)

    def _of_rings(self, groups: Tensor) -> Tensor:
        weight, scale = (a.flatten(1).cpu().contiguous().numpy() for a in (groups, self.scale[..., None].expand_as(groups)))
        levels, q = trellis_levels(self.bits), np.empty(weight.shape, np.uint8)
        nearest_rings(weight.astype(np.float32), scale, levels, self.bits, q)
        return torch.from_numpy(q).to(groups.device, groups.dtype).view(groups.shape)


def quantize(weight: Tensor, codec: Codec, name: str, preset: Preset = MIN_MAX) -> Quantized:
    """Weight float32 [rows, columns] -> stored integers.  CheckpointError: a scale of tensor `name` overflows f16."""
    parts = split_groups(weight, codec)
    grids = _coded([grid(part, codec, preset, name) for part in parts], codec)
    integers = _joined([found.integers(part) for found, part in zip(grids, parts, strict=True)])
    return Grid.joined(grids, 1).stored(integers, codec)


def fake(weight: Tensor, codec: Codec, preset: Preset = MIN_MAX) -> Tensor:
    """Weight float32 [rows, columns] after a round trip through `codec`: bit for bit what edgeq.format.codec.dequantize
    gives."""
    parts = split_groups(weight, codec)
    grids = _coded([_grid(part, codec, preset) for part in parts], codec)
    return _joined([found.weights(found.integers(part)) for found, part in zip(grids, parts, strict=True)])


def restored(quantized: Quantized, codec: Codec) -> Tensor:
    """What is read back of stored integers, float32 [rows, columns]."""
    if codec.coupled:
        return torch.from_numpy(dequantized(codec, quantized.q.shape[1], quantized.arrays))
    scale = quantized.scales
    zero = torch.full_like(scale, codec.constant_zero) if quantized.zero is None else quantized.zero.float()
    parts = split_groups(quantized.q.float(), codec)
    ends = [0, *accumulate(part.shape[1] for part in parts)]
    levels = None if quantized.table is None else quantized.table[0].float()
    grids = [Grid(scale[:, a:b], zero[:, a:b], codec.bits, levels=levels) for a, b in pairwise(ends)]
    return _joined([found.weights(part) for found, part in zip(grids, parts, strict=True)])


def levels_of(codec: Codec) -> Tensor | None:
    """Entries of the table to which weights are rounded, float32 in the order of indices; None: to integers."""
    if codec.coupled:
        return torch.from_numpy(trellis_levels(codec.bits)[np.argsort(by_subset(codec.bits))])
    return torch.from_numpy(gaussian_levels(codec.bits)) if "table" in codec.parts(1, 1) else None


def scale_levels(beside: Tensor) -> Tensor:
    """What codes of four bits stand for, on the device where `beside` is."""
    return torch.from_numpy(SCALE_CODES).to(beside.device)


def scale_codes(scale: Tensor, row: Tensor) -> Tensor:
    """Codes uint8 of the scales of four bits that are nearest to `scale` [rows, groups], as shares of `row` [rows, 1]."""
    levels = scale_levels(scale)
    between = (levels[:-1] + levels[1:]) / 2
    return torch.bucketize(-scale / row, -between).to(torch.uint8)


def _coded(grids: list[Grid], codec: Codec) -> list[Grid]:
    """The grids of all groups of a row, of which the shorter last one is apart, with scales that `codec` can hold."""
    if "super_scale" not in codec.parts(1, 1):
        return grids
    row = torch.cat([found.scale for found in grids], 1).amax(1, keepdim=True)
    levels = scale_levels(row)
    return [replace(found, scale=levels[scale_codes(found.scale, row).long()] * row, row=row) for found in grids]


def uniform_spans(codec: Codec, columns: int) -> list[slice]:
    """The columns in spans whose groups have the same size: the whole groups, then the shorter last one where there is one."""
    size = codec.group_size or columns
    whole = columns // size * size
    return [span for span in (slice(0, whole), slice(whole, columns)) if span.start < span.stop]


def split_groups(weight: Tensor, codec: Codec) -> list[Tensor]:
    """[rows, columns] -> [rows, groups, group size], and [rows, 1, rest] where the last group is shorter."""
    spans = uniform_spans(codec, weight.shape[1])
    return [weight[:, span].unflatten(1, (codec.groups(span.stop - span.start), -1)) for span in spans]


def _joined(parts: list[Tensor]) -> Tensor:
    """The inverse of `split_groups`."""
    flat = [part.flatten(1) for part in parts]
    return flat[0] if len(flat) == 1 else torch.cat(flat, 1)


def grid(groups: Tensor, codec: Codec, preset: Preset, name: str) -> Grid:
    """The grid of every group of weights [rows, groups, group size].

    CheckpointError: a scale of tensor `name` overflows f16.
    """
    found = _grid(groups, codec, preset)
    if not torch.isfinite(found.scale).all():
        raise overflow(name, codec)
    return found


def overflow(name: str, codec: Codec) -> CheckpointError:
    """The error for weights of tensor `name` whose scale f16 cannot hold."""
    return CheckpointError(f"{name} has weights too large for a 16-bit scale at {codec.bits} bits; use --method none")


def _grid(groups: Tensor, codec: Codec, preset: Preset) -> Grid:
    if not preset.search:
        return _grid_of(groups, codec, preset, 1.0)
    rows = max(1, SEARCH_ELEMENTS // groups[0].numel())
    return Grid.joined([_searched(part, codec, preset) for part in torch.split(groups, rows)], 0)


def _grid_of(groups: Tensor, codec: Codec, preset: Preset, share: float) -> Grid:
    """The grids over `share` of each group's range."""
    if (levels := levels_of(codec)) is not None:
        span = groups.abs().amax(-1).mul(share).clamp(min=MIN_RANGE)
        scale = (span / levels.max()).half().float()
        return Grid(scale, torch.zeros_like(scale), codec.bits, levels=levels.to(groups.device), ring=codec.coupled)
    if codec.symmetric:
        span = groups.abs().amax(-1).mul(share).clamp(min=MIN_RANGE)
        steps = ((1 << codec.bits) - 1) / 2 if preset.full_range or codec.zero_kind == "half" else (1 << (codec.bits - 1)) - 1
        scale = (span / steps).half().float()
        return Grid(scale, torch.full_like(scale, codec.constant_zero), codec.bits)
    top = (1 << codec.bits) - 1
    low, high = groups.aminmax(dim=-1)
    if preset.zero_inside:
        low, high = low.clamp(max=0), high.clamp(min=0)
    low, high = low * share, high * share
    scale = ((high - low).clamp(min=MIN_RANGE) / top).half().float()
    return Grid(scale, (-torch.round(low / scale)).clamp(0, top), codec.bits)


def _searched(groups: Tensor, codec: Codec, preset: Preset) -> Grid:
    best = _grid_of(groups, codec, preset, 1.0)
    least = torch.full(groups.shape[:2], float("inf"), device=groups.device)
    for i in range(SEARCH_STEPS):
        found = _grid_of(groups, codec, preset, 1 - i / 100)
        error = found.weights(found.integers(groups)).sub_(groups).abs_().pow_(SEARCH_POWER).sum(-1)
        better = error < least
        least = torch.where(better, error, least)
        scale, zero = torch.where(better, found.scale, best.scale), torch.where(better, found.zero, best.zero)
        best = replace(best, scale=scale, zero=zero)
    return best
