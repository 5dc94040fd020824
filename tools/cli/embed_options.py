"""The options of `edgeq embed`."""

from __future__ import annotations

from pathlib import Path

import click

from edgeq.tools.cli.help_sections import decorated
from edgeq.tools.cli.options import EXECUTION_OPTIONS, THREADS, text

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
