"""Commands whose errors are one line: the base of the command line and of the tools that are run as modules."""

from __future__ import annotations

import errno
import gc
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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
def interrupts_heard() -> Iterator[None]:
    """Ask for an interrupt again that Python has dropped.

    One that falls into a destructor or a callback, of which compilers have many, cannot be raised there: Python prints and
    forgets it.  What destructors say of work that an interrupt has broken off is nobody's concern.
    """
    default, interrupted = sys.unraisablehook, False

    def hook(dropped: Any) -> None:
        nonlocal interrupted
        if issubclass(dropped.exc_type, KeyboardInterrupt):
            interrupted = True
            again = threading.Timer(0.01, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
            again.daemon = True
            again.start()
        elif not interrupted:
            default(dropped)

    sys.unraisablehook = hook
    try:
        yield
    except KeyboardInterrupt:
        # The hook stays: the process ends, and its last destructors run behind this.
        interrupted = True
        raise
    finally:
        if not interrupted:
            sys.unraisablehook = default


@contextmanager
def one_line() -> Iterator[None]:
    """Errors meant for the user, memory that is not there and an interrupt, as click ends with them."""
    try:
        with interrupts_heard():
            yield
    except EdgeqError as error:
        raise Failure(str(error)) from None
    except OSError as error:
        # click itself ends a command whose reader has gone.
        if error.errno == errno.EPIPE or isinstance(error, ConnectionError):
            raise
        if error.errno == errno.ENOSPC and error.filename is None and sys.stdout is not None:
            # What is left in the buffer would fail once more when the process ends.
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        named = f"{error.filename}: " if error.filename is not None else ""
        raise Failure(f"{named}{error.strerror or error}") from None
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
