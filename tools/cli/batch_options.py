"""The options of `edgeq batch`."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar, cast

import click

from edgeq.tools.cli.help_sections import decorated, section
from edgeq.tools.cli.options import EXECUTION_OPTIONS, IMAGE_TOKENS, THREADS
from edgeq.tools.cli.params import Bytes
from edgeq.tools.cli.serve_options import ADAPTERS, CHAT_TEMPLATE, CONTEXT, LOADING

F = TypeVar("F", bound=Callable[..., Any])

PATH = click.Path(path_type=Path)
capacity = section("Capacity")
cluster = section("Several machines")


def grouped(command: F) -> F:
    """Arguments of Model.load become `options`."""

    @wraps(command)
    def apply(**options: Any) -> Any:
        loading = {name: options.pop(name) for name in LOADING}
        return command(options=loading, **options)

    return cast(F, apply)


BATCH_OPTIONS = decorated(
    click.argument("source", metavar="IN.jsonl", type=click.Path(exists=True, dir_okay=False, path_type=Path)),
    click.option("-o", "--output", metavar="OUT.jsonl", type=PATH, required=True, help="Records, in the order of the lines."),
    click.option("--force", is_flag=True, help="Replace OUT.jsonl if it is that of another batch, and what one left."),
    click.option("--alias", "names", metavar="NAME", multiple=True,
                 help="Name of the model in the lines, beside that of FILE without .edgeq."),
    capacity("--seats", type=click.IntRange(1, 32), metavar="N", default=8, show_default=True, help="Texts at once."),
    CONTEXT,
    capacity("--cache-memory", type=Bytes(), metavar="SIZE",
             help="Memory for keys and values.  [default: two contexts for each seat, if they fit]"),
    capacity("--max-body", "body", type=Bytes(), metavar="SIZE", help="Longest line.  [default: 4MiB, 16MiB with pictures]"),
    cluster("--ray", metavar="ADDRESS",
            help="Answer over the Ray cluster at this address, whose machines have FILE at the same path; local: one here."),
    cluster("--workers", type=click.IntRange(1, 1024), metavar="N", default=1, show_default=True,
            help="Processes of the cluster that load FILE."),
    ADAPTERS,
    CHAT_TEMPLATE,
    THREADS,
    EXECUTION_OPTIONS,
    IMAGE_TOKENS,
    grouped,
)  # fmt: skip
