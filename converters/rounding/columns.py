"""GPTQ of one matrix (Frantar et al. 2022, arXiv 2210.17323): columns are rounded one after another, and the columns still to
come take over the error that the layer's inputs would see.

With the moments M = X^T X of the inputs and a change D of the weight, the layer's output changes by tr(D M D^T) = |D F|^2,
where M = F F^T and F is upper triangular: a Cholesky factorization of M with its columns in reverse.  Column i of D F depends
on the columns up to i of D alone, so column i is best rounded from w_i - sum_{j<i} D_j F_ji / F_ii.  That is GPTQ's update,
whose U, the upper factor of M^-1, is F^-1, but nothing has to be inverted: half the memory and a quarter of the work.

The grid of a group covers the share of its range, of 1 ... 0.6, with the least sum of F_jj^2 error_j^2: what rounding column j
costs once the columns after it have taken over what they can.  (Weighed by M_jj instead, or not at all, the loss is larger.)

GPTQ never comes back to a column.  On its grids every integer is therefore visited again, SWEEPS times, and set to what is best
given all the others: coordinate descent on tr(D M D^T), as in QuantEase (Behdin et al. 2023, arXiv 2309.01885, section 3).
The scale of a group moves to its best before the group's integers do, where its columns lie in one block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from edgeq.converters.rounding import column_kernel as kernel
from edgeq.converters.rounding.linears import Recipe
from edgeq.converters.rounding.quantizer import Grid, Quantized, grid, levels_of, overflow, quantize, restored
from edgeq.converters.rounding.ring import improve_rings, round_rings
from edgeq.converters.rounding.tables import trellis_levels, trellis_proxy
from edgeq.format.codec import ROWS, Codec

BLOCK = 128
DAMPINGS = (0.01, 0.1, 1.0)
"""Shares of the mean of M's diagonal that are added to it: the next one where the one before does not make M positive."""
SWEEPS = 2
SLAB_ELEMENTS = 1 << 23
"""Weights that are rounded at a time: their copies bound the memory."""


@dataclass(frozen=True)
class Factor:
    """The factor F of the moments, and the order in which columns are rounded.

    moments   float32 [columns, columns]: M with the damping that F needed, columns in the matrix's own order
    reverse   float32 [columns, columns]: lower Cholesky factor of the moments with the columns last to first; F_ij is
              reverse[-1 - i, -1 - j]
    order     i64 [columns], on the CPU: the stored column of each, in the order in which they are rounded
    dead      bool [columns], in that order: those without input, whose weights are free and become 0
    falling   the order is not the stored one
    """

    moments: Tensor
    reverse: Tensor
    order: Tensor
    dead: Tensor
    falling: bool

    def part(self, rows: slice, columns: slice) -> Tensor:
        """F[rows, columns]."""
        size = len(self.reverse)
        return self.reverse[size - rows.stop : size - rows.start, size - columns.stop : size - columns.start].flip(0, 1)


def factorize(moments: Tensor, recipe: Recipe, act_order: bool) -> Factor | None:
    """The factor of moments float32 [columns, columns], columns in the matrix's own order, on their device.

    The moments are damped here.

    None: they are 0, not positive or not finite.
    """
    diagonal = moments.diagonal().clone()
    if not diagonal.any():
        return None
    stored = torch.arange(len(moments)) if recipe.order is None else torch.from_numpy(recipe.order.astype("int64"))
    order = torch.arange(len(moments))
    if act_order:
        order = torch.argsort(diagonal.cpu()[stored], descending=True, stable=True)
    taken = stored[order].to(moments.device)
    dead = diagonal[taken] == 0
    last_to_first = taken.flip(0)
    filled = torch.where(diagonal == 0, 1.0, diagonal)[last_to_first]
    work = torch.empty_like(moments)
    for damping in DAMPINGS:
        for rows in torch.arange(len(moments)).split(BLOCK):
            work[rows[0] : rows[-1] + 1] = moments[last_to_first[rows[0] : rows[-1] + 1]][:, last_to_first]
        work.diagonal().copy_(filled + damping * filled.mean())
        failed = torch.empty((), dtype=torch.int32, device=work.device)
        torch.linalg.cholesky_ex(work, out=(work, failed))
        if not failed and torch.isfinite(work.diagonal()).all():
            moments.diagonal().add_(damping * filled.mean())
            return Factor(moments, work, order, dead, act_order)
    return None


def quantize_matrix(weight: Tensor, factor: Factor | None, recipe: Recipe, title: str) -> tuple[tuple[Quantized, ...], Tensor]:
    """Weight float32 [rows, columns] -> integers of every weight block, columns in stored order, and the weight they stand for,
    columns in the matrix's own order.  Without a factor every column is rounded to nearest, which is GPTQ with M = I.

    The grid of a group comes from its weights when its first column is reached; from the original ones where the group is wider
    than BLOCK, or where columns are not taken in stored order.  CheckpointError: a scale overflows f16.
    """
    rounded = torch.empty_like(weight)
    found: list[list[Quantized]] = [[] for _ in recipe.blocks(weight.shape[1])]
    height = max(1, SLAB_ELEMENTS // weight.shape[1])
    if recipe.codec.coupled:
        height = max(ROWS, height // ROWS * ROWS)
    for top in range(0, len(weight), height):
        slab = weight[top : top + height]
        if factor is None:
            quantized, rounded[top : top + height] = _nearest(slab, recipe, title)
        else:
            quantized, rounded[top : top + height] = _Slab(slab, factor, recipe, title).round()
        for parts, part in zip(found, quantized, strict=True):
            parts.append(part)
    return tuple(Quantized.joined(parts) for parts in found), rounded


def _stored_columns(recipe: Recipe, columns: int) -> Tensor:
    return torch.arange(columns) if recipe.order is None else torch.from_numpy(recipe.order.astype("int64"))


def _nearest(weight: Tensor, recipe: Recipe, title: str) -> tuple[list[Quantized], Tensor]:
    stored = _stored_columns(recipe, weight.shape[1]).to(weight.device)
    found, rounded = [], torch.empty_like(weight)
    for codec, block in recipe.blocks(weight.shape[1]):
        found.append(quantize(weight[:, stored[block]].cpu(), codec, title, recipe.preset))
        rounded[:, stored[block]] = restored(found[-1], codec).to(weight.device)
    return found, rounded


@dataclass(frozen=True)
class _Group:
    """Columns start ... stop, in stored order, of one group; `index` counts the groups of all weight blocks."""

    index: int
    codec: Codec
    start: int
    stop: int


class _Slab:
    """Some output channels of a matrix while they are rounded, columns in the order in which that is done."""

    def __init__(self, weight: Tensor, factor: Factor, recipe: Recipe, title: str) -> None:
        rows, columns = weight.shape
        assert recipe.high is None or not factor.falling
        self._factor, self._preset, self._title, self._blocks = factor, recipe.preset, title, recipe.blocks(columns)
        self._taken = _stored_columns(recipe, columns)[factor.order].to(weight.device)
        self._w = weight[:, self._taken]
        self._w[:, factor.dead] = 0
        self._groups: list[_Group] = []
        for codec, block in self._blocks:
            size = codec.group_size or block.stop - block.start
            for start in range(block.start, block.stop, size):
                self._groups.append(_Group(len(self._groups), codec, start, min(start + size, block.stop)))
        widths = [group.stop - group.start for group in self._groups]
        self._group_of = np.repeat(np.arange(len(self._groups)), widths)[factor.order.numpy()]
        self._scale = np.empty((rows, len(self._groups)), np.float32)
        self._zero = np.empty((rows, len(self._groups)), np.float32)
        self._coded = "super_scale" in self._blocks[0][0].parts(1, 1)
        assert self._preset.weighed or not self._coded
        self._of_row = np.zeros(rows, np.float32)
        self._costs = factor.reverse.diagonal().flip(0).square().cpu().numpy()

    def round(self) -> tuple[list[Quantized], Tensor]:
        """Integers of every weight block, and the weight they stand for, columns in the matrix's own order."""
        factor, rows, columns = self._factor, *self._w.shape
        integers = np.empty((rows, columns), np.uint8)
        rounded = torch.empty_like(self._w)
        changes = torch.zeros_like(self._w)
        places = torch.argsort(factor.order)
        if self._coded:
            # What scales are shares of has to be there before the first of them.
            self._set_grids(self._groups, places)
            self._of_row = self._scale.max(1)
        self._set_grids([group for group in self._groups if self._is_fixed(group)], places)
        for span in self._spans():
            now, inside = self._w[:, span], torch.linalg.inv(factor.part(span, span)).triu()
            if span.start:
                before = slice(0, span.start)
                now = now - (changes[:, before] @ factor.part(before, span)) @ inside
            # A copy: where one span has all columns, `now` is the original weight, which `changes` are counted from.
            here = np.array(now.cpu().numpy(), order="C")
            self._round_span(here, inside.cpu().contiguous().numpy(), span, integers[:, span])
            rounded[:, span] = torch.from_numpy(here).to(self._w.device)
            changes[:, span] = rounded[:, span] - self._w[:, span]
        if not np.isfinite(self._scale).all():
            raise overflow(self._title, self._blocks[0][0])
        for _ in range(SWEEPS):
            self._sweep(rounded, changes, integers)
        back_in_order = torch.empty_like(rounded)
        back_in_order[:, self._taken] = rounded
        in_order = torch.from_numpy(integers)[:, places]
        return [self._quantized(in_order[:, block], codec, block) for codec, block in self._blocks], back_in_order

    def _sweep(self, rounded: Tensor, changes: Tensor, integers: NDArray[np.uint8]) -> None:
        """Set every scale and integer to the best given all others; `rounded` and `changes` [rows, columns] follow."""
        for span in self._spans():
            gradient = changes @ self._factor.moments[:, self._taken[span]][self._taken]
            here = np.ascontiguousarray(rounded[:, span].cpu().numpy())
            self._improve_span(here, np.ascontiguousarray(gradient.cpu().numpy()), span, integers[:, span])
            rounded[:, span] = torch.from_numpy(here).to(rounded.device)
            changes[:, span] = rounded[:, span] - self._w[:, span]

    def _improve_span(
        self, w: NDArray[np.float32], gradient: NDArray[np.float32], span: slice, integers: NDArray[np.uint8]
    ) -> None:
        """Improve w [rows, columns] of `span`, which is what `integers` stand for, in place."""
        columns, fixed = self._taken[span], self._factor.dead[span].cpu().numpy()
        moments = self._factor.moments[columns][:, columns].cpu().numpy()
        begins, top, group_of = np.zeros(w.shape[1], np.int64), self._top(span), self._group_of[span]
        codec = self._groups[group_of[0]].codec
        levels = self._levels(codec)
        for group in self._begun(span):
            begins[group.start - span.start] = group.stop - group.start

        def share(rows: slice) -> None:
            if codec.coupled:
                found = self._scale[rows], self._of_row[rows], trellis_levels(codec.bits), codec.bits
                improve_rings(w[rows], gradient[rows], moments, fixed, begins, group_of, *found, integers[rows])
                return
            grids = self._scale[rows], self._zero[rows], self._of_row[rows], levels
            kernel.improve_block(w[rows], gradient[rows], moments, fixed, begins, group_of, *grids, top, integers[rows])

        _in_threads(share, len(w))

    def _top(self, span: slice) -> np.float32:
        """The largest integer of the columns of a span."""
        return np.float32((1 << self._groups[self._group_of[span.start]].codec.bits) - 1)

    def _is_fixed(self, group: _Group) -> bool:
        """The grid comes from the weights as they were."""
        return self._factor.falling or group.stop - group.start > BLOCK

    def _set_grids(self, groups: list[_Group], places: Tensor) -> None:
        """The grids of groups from the weights as they were; `places`: of columns, in stored order."""
        for group in groups:
            at = places[group.start : group.stop]
            self._set_grid(group, self._w[:, at.to(self._w.device)], self._costs[at.numpy()])

    def _begun(self, span: slice) -> list[_Group]:
        """Groups that lie in a span as a whole, and whose grid is not fixed."""
        return [group for group in self._groups if span.start <= group.start < span.stop and not self._is_fixed(group)]

    def _spans(self) -> Iterator[slice]:
        """Columns that are rounded before the next product: whole groups of one weight block, as a rule BLOCK columns."""
        for codec, block in self._blocks:
            # A grid that is not found in the compiled loop has to be there before it starts.
            single = not self._preset.weighed and codec.group_size and not self._factor.falling
            width = codec.group_size if single else BLOCK
            for start in range(block.start, block.stop, width):
                yield slice(start, min(start + width, block.stop))

    def _round_span(self, w: NDArray[np.float32], u: NDArray[np.float32], span: slice, integers: NDArray[np.uint8]) -> None:
        """Round w [rows, columns] of `span` in place."""
        begins = np.zeros(w.shape[1], np.int64)
        for group in self._begun(span):
            at = slice(group.start - span.start, group.stop - span.start)
            if self._preset.weighed:
                begins[at.start] = at.stop - at.start
            else:
                self._set_grid(group, torch.from_numpy(w[:, at]), None)
        codec = self._groups[self._group_of[span.start]].codec
        form, levels = kernel.form_of(codec), self._levels(codec)
        top, costs, group_of = self._top(span), self._costs[span], self._group_of[span]

        def share(rows: slice) -> None:
            if codec.coupled:
                found = self._scale[rows], self._of_row[rows], trellis_levels(codec.bits), levels, (top, form, kernel.SHARES)
                round_rings(w[rows], u, costs, begins, group_of, *found, codec.bits, integers[rows])
                return
            grids = self._scale[rows], self._zero[rows], self._of_row[rows], levels
            kernel.round_block(w[rows], u, costs, begins, group_of, *grids, top, form, kernel.SHARES, integers[rows])

        _in_threads(share, len(w))

    def _set_grid(self, group: _Group, weight: Tensor, costs: NDArray[np.float32] | None) -> None:
        """The grid of a group from its weights [rows, columns of the group]; `costs`: of its columns."""
        if self._preset.weighed and costs is not None:
            w, top = np.ascontiguousarray(weight.cpu().numpy()), np.float32((1 << group.codec.bits) - 1)
            form, levels = kernel.form_of(group.codec), self._levels(group.codec)
            scale, zero = self._scale[:, group.index], self._zero[:, group.index]

            def share(rows: slice) -> None:
                grids = scale[rows], zero[rows], self._of_row[rows], levels
                kernel.search_grids(w[rows], costs, top, form, kernel.SHARES, *grids)

            _in_threads(share, len(w))
            return
        found = grid(weight.cpu()[:, None], group.codec, self._preset, self._title)
        self._scale[:, group.index], self._zero[:, group.index] = found.scale[:, 0].numpy(), found.zero[:, 0].numpy()

    def _quantized(self, integers: Tensor, codec: Codec, block: slice) -> Quantized:
        groups = [group.index for group in self._groups if block.start <= group.start < block.stop]
        scale, zero = (torch.from_numpy(np.ascontiguousarray(a[:, groups])) for a in (self._scale, self._zero))
        row = torch.from_numpy(self._of_row)[:, None] if self._coded else None
        return Grid(scale, zero, codec.bits, row, levels_of(codec), codec.coupled).stored(integers, codec)

    def _levels(self, codec: Codec) -> NDArray[np.float32]:
        """Entries of the table that weights are rounded to, of a trellis what stands for them in a search of scales; none: to
        integers."""
        if codec.coupled:
            return trellis_proxy(codec.bits)
        levels = levels_of(codec)
        return np.empty(0, np.float32) if levels is None else levels.numpy()


def _in_threads(share: Callable[[slice], None], rows: int) -> None:
    """Call `share` with parts of the rows, whole blocks, as many at a time as torch has threads."""
    blocks = -(-rows // ROWS)
    threads = min(torch.get_num_threads(), blocks)
    if threads == 1:
        share(slice(0, rows))
        return
    size = -(-blocks // threads) * ROWS
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(share, (slice(start, start + size) for start in range(0, rows, size))))
