"""The commands of `edgeq cache`, options only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from edgeq.tools.cli.entry import Commands
from edgeq.tools.cli.options import JSON


@click.group("cache", short_help="Show or remove the prompts that serve keeps.", cls=Commands)
def cache() -> None:
    """Show or remove the prompts that `edgeq serve --prompt-cache DIR` keeps for after a restart."""


FOLDER = click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))


@cache.command(short_help="Show what is kept of each model.")
@FOLDER
@JSON
def ls(**options: Any) -> None:
    """Show how many positions of which models DIR has, how large they are and when they were last used."""
    from edgeq.tools.commands.cache import ls as command

    command(**options)


@cache.command(short_help="Remove what is kept.")
@FOLDER
@click.option("--model", metavar="ID", help="Of this model alone, by its identity or the beginning of it; `cache ls` shows it.")
def rm(**options: Any) -> None:
    """Remove all prompts from DIR.  A server that uses the folder goes on without them."""
    from edgeq.tools.commands.cache import rm as command

    command(**options)
