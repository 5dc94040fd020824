"""What can be had of a model, as tables: ten allocations with their sizes, their predicted divergence and their speed, and what
a few more bytes or a few less than those of the chosen one would give."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import Console
from rich.table import Table

from edgeq.system.devices import DEVICES, DeviceSpec
from edgeq.tools.quality.chart import QualityPoint as Mark

if TYPE_CHECKING:
    from edgeq.converters.probing.frontier import FrontierPoint

HERE = DeviceSpec("this-machine", "", 0, 0, 1.0)
"""A column of this machine, where every point has its seconds."""
SHOWN = ("raspberry-pi-4", "raspberry-pi-5", "x86-avx2", "x86-avx512-vnni")
"""Devices in the table where none was asked for."""


def devices_shown(asked: DeviceSpec | None) -> list[DeviceSpec]:
    """The device that was asked for; without one, a few from slow to fast."""
    return [asked] if asked else [DEVICES[name] for name in SHOWN]


def _taken(point: FrontierPoint, chosen: FrontierPoint) -> dict[str, Any]:
    """What an allocation takes and loses, as plain values."""
    return {
        "chosen": point is chosen,
        "bits_per_weight": point.bits,
        "file_bytes": point.size,
        "bytes_per_token": point.read,
        "kl_predicted": point.kl,
    }


def rows(points: Sequence[FrontierPoint], chosen: FrontierPoint, devices: Sequence[DeviceSpec]) -> list[dict[str, Any]]:
    """The points and the chosen allocation, by rising bytes per token, as plain values."""
    every = sorted([*points, chosen], key=lambda point: (point.read, point is chosen))
    return [
        _taken(point, chosen)
        | {
            "tokens_per_second": {device.name: 1 / (point.seconds or device.decode_seconds(point.read)) for device in devices},
        }
        for point in every
    ]


def beside(points: Sequence[FrontierPoint], chosen: FrontierPoint) -> list[dict[str, Any]]:
    """The points as plain values, with their bytes, their divergence and their speed in those of the chosen allocation.

    Speeds are as their seconds on this machine where those are known, else as the bytes that a token reads.
    """
    return [
        _taken(point, chosen)
        | {
            "relative_file_bytes": point.size / chosen.size,
            "relative_bytes_per_token": point.read / chosen.read,
            # Of a model of few weights nothing may be lost.
            "relative_kl": point.kl / chosen.kl if chosen.kl else None,
            "relative_speed": chosen.seconds / point.seconds if chosen.seconds and point.seconds else chosen.read / point.read,
        }
        for point in points
    ]


def marks(rows: Sequence[dict[str, Any]]) -> list[Mark]:
    """The rows as points of a chart; the chosen allocation is a series of its own."""
    return [
        Mark(
            "chosen" if row["chosen"] else "what can be had",
            f"chosen: {row['bits_per_weight']:.2f} bits per weight" if row["chosen"] else "",
            row["bytes_per_token"] / 1e6,
            # A logarithmic axis has no place for 0, which a model of few weights can have.
            max(row["kl_predicted"], 1e-9),
            f"{row['bits_per_weight']:.2f} bits per weight, KL {row['kl_predicted']:.2g}",
        )
        for row in rows
    ]


def show(rows: Sequence[dict[str, Any]], stream: TextIO | None = None) -> None:
    """Print the table; None: to standard error."""
    names = [*rows[0]["tokens_per_second"]]
    # Two lines, so that four devices fit 100 columns.
    speeds = [[f"{row['tokens_per_second'][name]:,.1f}" for name in names] for row in rows]
    _print(rows, [f"{name}\ntok/s" for name in names], speeds, stream)


def show_beside(rows: Sequence[dict[str, Any]], stream: TextIO | None = None) -> None:
    """Print what a few more bytes, or a few less, would give; None: to standard error."""
    names = ("times\nfile", "times\nMB/token", "times\nKL", "times\ntok/s")
    keys = ("relative_file_bytes", "relative_bytes_per_token", "relative_kl", "relative_speed")
    _print(rows, names, [["" if row[key] is None else f"{row[key]:.2f}" for key in keys] for row in rows], stream)


def _print(rows: Sequence[dict[str, Any]], names: Sequence[str], more: Sequence[Sequence[str]], stream: TextIO | None) -> None:
    """A table of allocations; `more`: of each row what stands in the columns `names` after its sizes."""
    # A narrow terminal would break names apart: lines that are too long go on in the next one instead.
    console = Console(
        file=stream or sys.stderr, highlight=False, soft_wrap=True, width=max(60 + 24 * len(names), Console().width)
    )
    table = Table(box=None, pad_edge=False)
    for name in ("", "bits per\nweight", "file\nMB", "MB per\ntoken", "predicted\nKL", *names):
        table.add_column(name, justify="right")
    for row, last in zip(rows, more, strict=True):
        table.add_row(
            ">" if row["chosen"] else "",
            f"{row['bits_per_weight']:.2f}",
            f"{row['file_bytes'] / 1e6:,.2f}",
            f"{row['bytes_per_token'] / 1e6:,.2f}",
            f"{row['kl_predicted']:.2g}",
            *last,
        )
    console.print(table)
