"""How a vision tower knows where a patch is: which rotations, tables of learned positions and class rows go together."""

from __future__ import annotations

import math
from typing import Protocol

from edgeq.errors import FormatError, UnsupportedError
from edgeq.network.image_config import ImageConfig
from edgeq.network.json_records import check_integer
from edgeq.network.rope import Rope

MAX_POSITIONS = 1 << 20


class PlacesPatches(Protocol):
    """What is looked at of a VisionConfig, which has checked it for itself."""

    @property
    def rope(self) -> Rope: ...

    @property
    def image(self) -> ImageConfig: ...

    @property
    def merge(self) -> int: ...

    @property
    def token_edge(self) -> int: ...

    @property
    def window_layers(self) -> tuple[int, ...]: ...

    @property
    def position_rows(self) -> int: ...

    @property
    def interpolated(self) -> bool: ...

    @property
    def antialiased(self) -> bool: ...

    @property
    def positions_by_axis(self) -> bool: ...

    @property
    def class_row(self) -> bool: ...

    @property
    def class_feature(self) -> bool: ...


def check_positions(config: PlacesPatches, patches: int) -> None:
    """FormatError: the table of positions does not fit; UnsupportedError: positions or a class row of another kind.

    patches   of a picture, where all have one size; 0: they have not
    """
    rows = config.position_rows
    check_integer("position_rows", rows, 0, MAX_POSITIONS)
    axial = config.rope.kind == "axial" and config.rope.axes == 2
    if not axial and (config.rope.kind != "learned" or not rows):
        raise UnsupportedError(
            f"a tower with a {config.rope.kind!r} rope is not supported; supported: axial, of two axes, or learned positions"
        )
    if config.class_row and (axial or config.window_layers):
        raise UnsupportedError("a tower with a class_row and windows or an axial rope is not supported")
    if config.class_feature and (not config.class_row or config.merge > 1):
        raise FormatError("config vision: class_feature without a class_row, or beside joined patches")
    if config.positions_by_axis:
        _check_axes(config, axial)
        return
    stretched = rows > 0 if axial else config.antialiased
    if config.interpolated != stretched or (config.antialiased and (axial or config.class_row)):
        raise UnsupportedError(
            f"a tower with a {config.rope.kind!r} rope, {rows} positions, class_row {config.class_row}, "
            f"interpolated {config.interpolated} and antialiased {config.antialiased} is not supported"
        )
    wanted = math.isqrt(rows) ** 2 if config.interpolated else patches + config.class_row
    if rows and rows != wanted:
        kind = "a square" if config.interpolated else f"{wanted}, one for each patch of a picture and a class row"
        raise FormatError(f"config vision: position_rows is {rows}; expected {kind}")


def _check_axes(config: PlacesPatches, axial: bool) -> None:
    """FormatError, UnsupportedError: a table with entries for columns and for rows lacks some of the longest picture, or does
    not go with the rest."""
    if not axial or config.interpolated or config.antialiased:
        raise UnsupportedError("positions_by_axis is supported with an axial rope, without interpolated and antialiased")
    longest = config.merge * config.image.largest_piece(config.token_edge)
    if config.position_rows % 2 or config.position_rows < 2 * longest:
        raise FormatError(
            f"config vision: position_rows is {config.position_rows}; expected an even number, at least {2 * longest}: one for "
            f"each of the {longest} columns of patches of the longest picture, and of the rows"
        )
