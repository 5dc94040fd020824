"""The options of `edgeq embed`, and the commands `edgeq rerank` and `edgeq act`, options only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from edgeq.tools.cli.entry import EdgeqCommand
from edgeq.tools.cli.help_sections import decorated
from edgeq.tools.cli.options import EXECUTION_OPTIONS, JSON, MODEL, THREADS, text

EMBED_OPTIONS = decorated(
    text("-p", "--text", "texts", metavar="TEXT", multiple=True, help="A text; can be given more than once."),
    text(
        "--file",
        metavar="FILE",
        type=click.Path(path_type=Path),
        help='A UTF-8 file of JSON lines: a string each, or an object with "text".',
    ),
    text("--prompt", metavar="NAME", help="The instruction of the file that comes before each text, such as query."),
    text("--dimensions", type=int, metavar="N", help="Keep the first N numbers of each vector.  [default: all]"),
    text(
        "-c",
        "--context",
        type=int,
        metavar="N",
        help="Positions of the cache: tokens of the longest text.  [default: 4096, or as many as the longest text has]",
    ),
    THREADS,
    EXECUTION_OPTIONS,
)


@click.command(
    "rerank",
    cls=EdgeqCommand,
    short_help="Rank documents for a query.",
    epilog="""
    edgeq rerank bge-reranker.edgeq -q "What is the capital of France?" "Paris is the capital." "Bananas are yellow."
    edgeq rerank bge-reranker.edgeq -q "What is the capital of France?" --file documents.jsonl -n 10
    """,
)
@MODEL
@click.argument("documents", metavar="DOC...", nargs=-1)
@text("-q", "--query", metavar="TEXT", required=True, help="What the documents are to answer.")
@text(
    "--instruction",
    metavar="TEXT",
    help="What a decoder such as Qwen3-Reranker ranks by.  [default: that of the file; others read none]",
)
@text(
    "--file",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help='Documents: a UTF-8 file of JSON lines, a string each, or an object with "text".',
)
@text("-n", "--top-n", type=int, metavar="N", help="Give the N best.  [default: all]")
@text(
    "-c",
    "--context",
    type=int,
    metavar="N",
    help="Tokens of the query and the longest document together.  [default: 4096, or as many as the longest has]",
)
@THREADS
@EXECUTION_OPTIONS
@JSON
def rerank(**options: Any) -> None:
    """Rank documents by how well each answers a query: each DOC, line of --file or of standard input.  For rerankers.

    A line for each, the best first: its score, its number, from 0 on, and its text as JSON.
    """
    from edgeq.tools.commands.embed import rerank as command

    command(**options)


@click.command(
    "act",
    cls=EdgeqCommand,
    short_help="Make a robot's next actions.",
    epilog="""
    edgeq act pi0.edgeq --image front.png --image wrist.png -p "pick up the cup" --state "[0.1, -0.4, 0.7]"
    """,
)
@MODEL
@text("--image", "images", metavar="FILE", type=click.Path(path_type=Path), multiple=True, help="What a camera sees; of all.")
@text("-p", "--prompt", "prompt", metavar="TEXT", required=True, help="What the robot is to do.")
@text("--state", metavar="JSON", required=True, help="Its state: a list of numbers.")
@text("--steps", type=int, metavar="N", help="From noise to actions.  [default: those of the file]")
@text("--seed", type=int, metavar="N", help="Of the noise.  [default: by chance]")
@text("-c", "--context", type=int, metavar="N", help="Positions of the cache: pictures, text, state and actions together.")
@THREADS
@EXECUTION_OPTIONS
@JSON
def act(**options: Any) -> None:
    """What a robot does next, by a policy (π0): a line of JSON, a list of numbers, for each action, in their order.

    Numbers are in the robot's own units, where the file has the statistics of the data of training; else in those of training.
    """
    from edgeq.tools.commands.embed import act as command

    command(**options)
