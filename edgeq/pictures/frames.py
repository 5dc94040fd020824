"""The patches of a picture in the order in which a vision tower runs them, and what each of them sees."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgeq.network.config import VisionConfig

Grid = tuple[int, int, int]
"""Frames, rows and columns of a picture, in patches."""
FRAME, WINDOW = 0, 1
"""Kinds of visible ranges: the patches of the frame, those of the window."""


def patch_places(grid: Grid, merge: int) -> NDArray[np.int32]:
    """Row and column, int32 [2, patches], of the patches of one frame: those that are joined follow one another."""
    _, rows, columns = grid
    row, column = np.indices((rows, columns), np.int32)
    blocks = [
        part.reshape(rows // merge, merge, columns // merge, merge).transpose(0, 2, 1, 3).reshape(-1) for part in (row, column)
    ]
    return np.stack(blocks)


def table_positions(table: NDArray[np.float32], grid: Grid, config: VisionConfig) -> NDArray[np.float32]:
    """Positions float32 [patches, hidden_size] of a frame, in the order of `patch_places`, where config.placed_by_grid.

    table   float32 [rows, hidden_size]: a square, row by row, which is interpolated; or entries of columns, then as many of
            rows
    """
    if config.positions_by_axis:
        row, column = patch_places(grid, config.merge)
        return np.asarray(table[column] + table[len(table) // 2 + row], np.float32)
    side = math.isqrt(len(table))
    return interpolated(table.reshape(side, side, -1), grid, config)


def interpolated(table: NDArray[np.float32], grid: Grid, config: VisionConfig) -> NDArray[np.float32]:
    """Positions float32 [patches, hidden_size] of a frame, in the order of `patch_places`.

    table   float32 [side, side, hidden_size], stretched so that its corners lie on those of the frame, linear in between; with
            `antialiased` so that its edges do, each patch the mean of what is within its width, weighted by a triangle
    """
    _, rows, columns = grid
    if config.antialiased:
        down, across = (_triangles(table.shape[axis], size) for axis, size in enumerate((rows, columns)))
        table = np.einsum("ri,cj,ijh->rch", down, across, table, optimize=True)
        row, column = patch_places(grid, config.merge)
        return np.asarray(table[row, column], np.float32)
    for axis, size in enumerate((rows, columns)):
        side = table.shape[axis]
        at = np.arange(size) * ((side - 1) / max(size - 1, 1))
        low = np.floor(at).astype(np.int64)
        share = (at - low).astype(np.float32).reshape((size, 1, 1) if axis == 0 else (1, size, 1))
        high = np.minimum(low + 1, side - 1)
        table = table.take(low, axis) * (1 - share) + table.take(high, axis) * share
    row, column = patch_places(grid, config.merge)
    return np.asarray(table[row, column], np.float32)


def _triangles(side: int, size: int) -> NDArray[np.float32]:
    """Shares [size, side] of `side` values in the mean of each of `size`, as torch's bilinear filter with antialiasing."""
    scale = side / size
    reach, centre = max(scale, 1.0), scale * (np.arange(size)[:, None] + 0.5)
    shares = np.maximum(1 - np.abs(np.arange(side) + 0.5 - centre) / reach, 0)
    return np.asarray(shares / shares.sum(1, keepdims=True), np.float32)


@dataclass(frozen=True)
class Frame:
    """The patches of a frame in the order of a run: window by window, so that what a patch sees is one range of slots.

    order     of the patches as a picture has them, in which those that are joined follow one another: int32 [patches]
    places    int32 [2, patches], row and column of each
    spans     int32 [2, 2, patches], by kind: the first patch that each sees, and the one after the last
    """

    order: NDArray[np.int32]
    places: NDArray[np.int32]
    spans: NDArray[np.int32]

    @classmethod
    def of(cls, grid: Grid, config: VisionConfig) -> Frame:
        places, together = patch_places(grid, config.merge), config.merge**2
        count = places.shape[1]
        row, column = places[:, ::together] // config.merge // (config.window_size or count)
        window = row * count + column
        tokens = np.argsort(window, kind="stable")
        order = (tokens[:, None] * together + np.arange(together)).reshape(-1).astype(np.int32)
        _, first, members = np.unique(window[tokens], return_index=True, return_counts=True)
        begins = np.repeat(first, members * together) * together
        ends = begins + np.repeat(members * together, members * together)
        spans = np.stack([np.broadcast_to([[0], [count]], (2, count)), np.stack([begins, ends])]).astype(np.int32)
        return cls(order, places[:, order], spans)
