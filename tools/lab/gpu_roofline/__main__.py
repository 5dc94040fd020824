"""The page: `python -m edgeq.tools.lab.gpu_roofline > docs/cuda-speed.md`."""

from __future__ import annotations

import click

from edgeq.tools.cli.entry import Command
from edgeq.tools.lab.gpu_roofline.page import MODELS, page, shape


@click.command(cls=Command)
def main() -> None:
    """Print docs/cuda-speed.md."""
    click.echo("\n".join(page({name: shape(name) for name in MODELS})))


if __name__ == "__main__":
    main()
