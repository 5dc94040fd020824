"""Commands whose errors are one line: the base of the command line and of the laboratory's modules."""

from __future__ import annotations

import errno
import gc
import json
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import click

from edgeq.errors import EdgeqError
from edgeq.tools.cli.help_sections import Examples, SectionedCommand
from edgeq.tools.cli.params import resolve_files

MAX_MESSAGE_CHARACTERS = 1000
EXTRAS = {
    "convert": {"torch", "transformers", "safetensors"},
    "hub": {"huggingface_hub", "tqdm"},
    "server": {"starlette", "uvicorn", "h11", "msgspec", "prometheus_client", "anyio"},
    "gguf": {"gguf"},
    "ray": {"ray"},
}
"""Optional packages by the extra that installs them."""
OPTIONS = {
    "prompt": "-p",
    "max_tokens": "-n",
    "context": "-c",
    "images": "--image",
    "adapter": "--lora",
    "threads": "-t",
    "temperature": "--temp",
    "requantization": "--requantize",
    "when": "--requantize",
    "alpha": "--requantize-alpha",
    "damping": "--requantize-damping",
    "min_tokens": "--requantize-min-tokens",
    # The one method that keeps masters.
    "master": "--method ttq --master",
} | {
    name: f"--{name.replace('_', '-')}"
    for name in (
        *("top_k", "top_p", "min_p", "repeat_penalty", "presence_penalty", "frequency_penalty", "dry_multiplier"),
        *("seed", "stop"),
        *("chat_template", "threads_prefill", "mode", "kv", "target", "isa", "draft", "gamma", "image_tokens"),
    )
}
"""Parameter of the Python interface: the option that a user of the command line knows it by."""
SWITCHES = {("graphs", "False"): "--no-graph"}
"""Parameter and value: the option without a value."""
# Since click 8.2 a group without arguments prints its help by this error.
_HELP: Any = getattr(click.exceptions, "NoArgsIsHelpError", ())


class Failure(click.ClickException):
    """One line on stderr, exit code 1; as_json: on stdout too, as the one JSON object that the program at its end can read."""

    as_json = False

    def show(self, file: Any = None) -> None:
        # Names in a message can come from a stranger's file: no line breaks, no terminal escapes, not a megabyte of them.
        line = "".join(c if c.isprintable() else " " for c in " ".join(self.message.split()))
        line = line if len(line) <= MAX_MESSAGE_CHARACTERS else line[:MAX_MESSAGE_CHARACTERS] + " ..."
        click.echo(f"error: {line}", err=True)
        if self.as_json:
            with suppress(OSError):
                click.echo(json.dumps({"error": line, "exit_code": self.exit_code}))


class UsageFailure(Failure):
    """A command line that cannot be understood, in the same form; exit code 2, as is usual."""

    exit_code = 2


def usage_failure(error: click.UsageError) -> UsageFailure:
    """click's message, which names the option, and the command whose help has more."""
    message = error.format_message().rstrip(".")
    more = f" (see {error.ctx.command_path} --help)" if error.ctx else ""
    return UsageFailure(f"{message[:1].lower()}{message[1:]}{more}")


def in_options(message: str) -> str:
    """A message of the library with options in place of its parameters: "pass `context=64`" becomes "pass -c 64"."""

    def option(match: re.Match[str]) -> str:
        name, value = match.groups()
        if (name, value) in SWITCHES:
            return SWITCHES[name, value]
        return f"{OPTIONS[name]}{f' {value}' if value else ''}" if name in OPTIONS else match[0]

    return re.sub(r"`(\w+)(?:=([^`]*))?`", option, message)


@contextmanager
def repeated_interrupts() -> Iterator[None]:
    """Send an interrupt again if Python dropped it.

    Python cannot raise an interrupt inside a destructor or a callback, of which compilers have many: it prints the exception
    and forgets it.  Other exceptions that destructors raise once work was interrupted are not shown.
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
        # The hook stays: the process ends, and its last destructors run after this.
        interrupted = True
        raise
    finally:
        if not interrupted:
            sys.unraisablehook = default


@contextmanager
def one_line() -> Iterator[None]:
    """Turn every error that is meant for the user, a missing optional package, full memory and an interrupt into one line."""
    try:
        with repeated_interrupts():
            yield
    except EdgeqError as error:
        raise Failure(in_options(str(error))) from None
    except _HELP:
        raise
    except click.UsageError as error:
        raise usage_failure(error) from None
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        extra = next((extra for extra, packages in EXTRAS.items() if package in packages), None)
        if extra is None:
            raise
        raise Failure(f'this needs {package}, which is not installed: pip install "edgeq[{extra}]"') from None
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
        # The process ends; a last garbage collection would take a tenth of a second.
        gc.freeze()
        raise click.exceptions.Exit(130) from None


WORDS = "edgeq.words"
"""Where a context keeps the words of its command line."""


@contextmanager
def in_json(words: list[str]) -> Iterator[None]:
    """Failures of a command line that asks for JSON are told as JSON."""
    try:
        yield
    except Failure as failure:
        failure.as_json = any(word in ("--json", "--jsonl") for word in words)
        raise


class EdgeqCommand(SectionedCommand):
    """A command of edgeq: files of models are fetched and converted once its whole command line was found right."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        rest = super().parse_args(ctx, args)
        if not ctx.resilient_parsing:
            resolve_files(ctx)
        return rest


class Command(EdgeqCommand):
    """A command that is run by itself, as a module of the laboratory is."""

    def make_context(self, *arguments: Any, **settings: Any) -> click.Context:
        with one_line():
            return super().make_context(*arguments, **settings)

    def invoke(self, ctx: click.Context) -> Any:
        with one_line():
            return super().invoke(ctx)


class Commands(Examples, click.Group):
    """A group of commands.  Their options are parsed within `invoke`."""

    command_class = EdgeqCommand

    def make_context(self, info_name: str | None, args: list[str], *rest: Any, **settings: Any) -> click.Context:
        # click takes the words away as it reads them, and an error may come before it has read all.
        words = list(args)
        with in_json(words), one_line():
            ctx = super().make_context(info_name, args, *rest, **settings)
        ctx.meta[WORDS] = words
        return ctx

    def invoke(self, ctx: click.Context) -> Any:
        from edgeq.system.machine import check_system

        with in_json(ctx.meta[WORDS]), one_line():
            check_system()
            return super().invoke(ctx)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order in which a newcomer needs them."""
        return list(self.commands)
