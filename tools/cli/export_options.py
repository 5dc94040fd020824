"""The command `edgeq export`."""

from __future__ import annotations

from pathlib import Path

import click

from edgeq.tools.cli.entry import EdgeqCommand
from edgeq.tools.cli.params import EdgeqFile, OneOf


@click.command(
    "export",
    cls=EdgeqCommand,
    short_help="Write a model file in a format of other programs.",
    epilog="""
    edgeq export llama.edgeq --to compressed-tensors -o llama-w4a16
    edgeq export llama.edgeq --to gguf -o llama.gguf
    """,
)
@click.argument("model", metavar="FILE", type=EdgeqFile())
@click.option(
    "--to",
    metavar="FORMAT",
    required=True,
    type=OneOf("compressed-tensors", "gguf"),
    help="compressed-tensors (vLLM) or gguf (llama.cpp).",
)
@click.option("-o", "--output", metavar="OUT", required=True, type=click.Path(path_type=Path), help="What to write.")
@click.option("--force", is_flag=True, help="Replace OUT.")
def export(model: Path, to: str, output: Path, force: bool) -> None:
    """Write FILE, an .edgeq file, in a format that other programs run: its integers stay as they are.

    What the format does not hold is refused by name before anything is written.
    """
    from edgeq.converters.exporters.export import export as command
    from edgeq.tools.cli.terminal import note, progress

    with progress() as report:
        notes = command(model, to, output, force, lambda done, total: report(done, total, "export"))
    for line in notes:
        note(line)
    note(f"{output}: written")
