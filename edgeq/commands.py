"""Commands whose errors are one line: the base of the command line and of the tools that are run as modules."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from edgeq.errors import EdgeqError

LONGEST_MESSAGE = 1000


class Failure(click.ClickException):
    """One line on stderr, exit code 1."""

    def show(self, file: Any = None) -> None:
        # Names in a message can come from a stranger's file: no line breaks, no terminal escapes, not a megabyte of them.
        line = "".join(c if c.isprintable() else " " for c in " ".join(self.message.split()))
        line = line if len(line) <= LONGEST_MESSAGE else line[:LONGEST_MESSAGE] + " ..."
        click.echo(f"error: {line}", err=True)


@contextmanager
def one_line() -> Iterator[None]:
    """Errors meant for the user, memory that is not there and an interrupt, as click ends with them."""
    try:
        yield
    except EdgeqError as error:
        raise Failure(str(error)) from None
    except MemoryError:
        raise Failure("out of memory; close other programs, or choose a shorter context or fewer bits") from None
    except KeyboardInterrupt:
        click.echo(err=True)
        # The process ends; looking for garbage once more would take it a tenth of a second.
        gc.freeze()
        raise click.exceptions.Exit(130) from None


class Command(click.Command):
    def invoke(self, ctx: click.Context) -> Any:
        with one_line():
            return super().invoke(ctx)


class Commands(click.Group):
    def invoke(self, ctx: click.Context) -> Any:
        with one_line():
            return super().invoke(ctx)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order in which a newcomer needs them."""
        return list(self.commands)
