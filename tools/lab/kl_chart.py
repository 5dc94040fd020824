"""A chart of measurements that are kept: `python -m edgeq.tools.lab.kl_chart docs/kl.json docs/kl.svg`.

The JSON has the points of each panel, as `edgeq.tools.lab.quality --points` writes them: {title: [{"series": "edgeq budget",
"label": "2.28", "megabytes": 1.5, "kl": 0.0422}, ...]}.  Panels of several models, measured on different days, are one chart.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from edgeq.errors import InputError
from edgeq.tools.cli.entry import Command
from edgeq.tools.quality.chart import QualityPoint, chart

Panels = dict[str, list[QualityPoint]]
UNIT = "nats per token"


def read(path: Path) -> Panels:
    """The panels of a file.  InputError: it has none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return {title: [QualityPoint(**point) for point in points] for title, points in found.items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise InputError(f"{path}: not the points of charts: {error}") from None


def write(path: Path, panels: Panels) -> None:
    """The inverse of `read`, a line for each point."""
    titles = [
        f"{json.dumps(title)}: [\n" + ",\n".join(f" {json.dumps(_fields(point))}" for point in points) + "\n]"
        for title, points in panels.items()
    ]
    path.write_text("{\n" + ",\n".join(titles) + "\n}\n", encoding="utf-8")


def _fields(point: QualityPoint) -> dict[str, object]:
    return {name: value for name, value in asdict(point).items() if name != "about" or value}


@click.command(cls=Command)
@click.argument("points", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.argument("svg", type=click.Path(path_type=Path))
def main(points: Path, svg: Path) -> None:
    """Draw the chart of POINTS, a JSON file, into SVG."""
    svg.write_text(chart(read(points), UNIT), encoding="utf-8")


if __name__ == "__main__":
    main()
