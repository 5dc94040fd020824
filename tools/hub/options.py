"""The commands `edgeq pull`, `edgeq list` and `edgeq rm`, options only."""

from __future__ import annotations

from typing import Any

import click

from edgeq.tools.cli.entry import EdgeqCommand
from edgeq.tools.cli.options import JSON

NAMES = "hf:ORG/REPO[:QUANT]"


@click.command(
    "pull",
    cls=EdgeqCommand,
    short_help="Fetch a model from the Hugging Face hub.",
    epilog="""
    edgeq pull hf:Qwen/Qwen3-0.6B-GGUF:Q8_0
    edgeq pull hf:bartowski/SmolLM2-135M-Instruct-GGUF
    """,
)
@click.argument("name", metavar=NAMES)
@click.option("--revision", metavar="REV", help="A branch, tag or commit.  [default: main]")
@JSON
def pull(name: str, revision: str | None, as_json: bool) -> None:
    """Fetch a model into the cache that all programs of the hub share, go on where an earlier run stopped, check its digest.

    An .edgeq file of the repository comes first, then a GGUF file of type QUANT (default: Q4_K_M, or what is nearest to it),
    then weights in safetensors, for edgeq convert.
    """
    from edgeq.converters.checkpoint.download import HubAccess
    from edgeq.tools.hub.commands import pull as command

    command(name, HubAccess(revision=revision), as_json)


@click.command("list", cls=EdgeqCommand, short_help="Show the models on this machine.")
@JSON
def show(as_json: bool) -> None:
    """Show what was fetched from the hub, and what was converted from GGUF files: names, sizes, digests."""
    from edgeq.tools.hub.commands import show as command

    command(as_json)


@click.command(
    "rm",
    cls=EdgeqCommand,
    short_help="Remove models from this machine.",
    epilog="""
    edgeq rm hf:Qwen/Qwen3-0.6B-GGUF:Q8_0
    edgeq rm model.gguf
    """,
)
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
def remove(**options: Any) -> None:
    """Remove models by the names that edgeq list shows: from the hub's cache, or what was converted from a GGUF file.

    The GGUF file itself stays, unless it came from the hub.
    """
    from edgeq.tools.hub.commands import remove as command

    command(**options)
