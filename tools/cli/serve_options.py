"""The options of `edgeq serve`."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar, cast

import click

from edgeq.tools.cli.help_sections import decorated, section
from edgeq.tools.cli.options import DRAFT_OPTIONS, EXECUTION_OPTIONS, IMAGE_TOKENS, THREADS, prompt
from edgeq.tools.cli.params import Bytes

F = TypeVar("F", bound=Callable[..., Any])

SETTINGS: tuple[str, ...] = (
    "host",
    "port",
    "seats",
    "queue",
    "most_texts",
    "strict",
    "step_seconds",
    "allowed_hosts",
    "origins",
)
SETTINGS += ("queue_seconds", "request_seconds", "grace_seconds", "share_prefixes", "page")
SETTINGS += ("prompt_cache", "prompt_cache_bytes", "draft", "gamma")
LOADING = ("threads", "threads_prefill", "mode", "kv", "target", "isa", "context", "image_tokens", "graphs")

PATH = click.Path(path_type=Path)
address = section("Address and access")
capacity = section("Capacity")


CONTEXT = capacity(
    "-c",
    "--context",
    type=int,
    metavar="N",
    help="Positions of a text: prompt and answer together.  "
    "[default: as many as the model takes and memory holds, at most 4096]",
)
ADAPTERS = prompt(
    "--lora",
    "adapters",
    metavar="[NAME=]DIR",
    multiple=True,
    help="A LoRA adapter as PEFT saves it, for those who ask for the model NAME:ADAPTER; can be given more than once.",
)
CHAT_TEMPLATE = prompt("--chat-template", metavar="FILE", type=PATH, help="A jinja2 template instead of the file's.")


def grouped(command: F) -> F:
    """Fields of Settings become `settings`, those of Model.load `options`."""

    @wraps(command)
    def apply(**options: Any) -> Any:
        settings = {name: options.pop(name) for name in SETTINGS}
        loading = {name: options.pop(name) for name in LOADING}
        return command(settings=settings, options=loading, **options)

    return cast(F, apply)


def seconds(name: str, field: str, default: float, help: str) -> Callable[[F], F]:
    kind = click.FloatRange(0, 86400, min_open=True)
    return capacity(name, field, type=kind, metavar="S", default=default, show_default=True, help=help)


SERVE_OPTIONS = decorated(
    address("--host", metavar="ADDRESS", default="127.0.0.1", show_default=True, help="Address to listen at."),
    address("--port", type=click.IntRange(0, 65535), metavar="N", default=8080, show_default=True, help="Port; 0: a free one."),
    address("--alias", "names", metavar="NAME", multiple=True, help="Name of the model for clients.  [default: that of FILE]"),
    address("--api-key-file", type=PATH, metavar="FILE", help="A line NAME:KEY for each client, mode 0600."),
    address("--no-auth", is_flag=True, help="Ask for no key, whoever can reach the address."),
    address("--allow-host", "allowed_hosts", metavar="NAME", multiple=True, help="Name by which clients reach this machine."),
    address("--cors-origin", "origins", metavar="ORIGIN", multiple=True, help="Web pages of this origin may ask."),
    capacity("--seats", type=click.IntRange(1, 32), metavar="N", default=4, show_default=True, help="Texts at once."),
    capacity("--queue", type=click.IntRange(0, 4096), metavar="N", default=32, show_default=True, help="Texts that may wait."),
    capacity("--max-n", "most_texts", type=click.IntRange(1, 128), metavar="N", default=8, show_default=True,
             help="Texts that one request may ask for."),
    CONTEXT,
    capacity("--cache-memory", type=Bytes(), metavar="SIZE",
             help="Memory for keys and values of all texts, and of those that have ended.  [default: two contexts for each "
             "seat, if they fit]"),
    capacity("--share-prefixes/--no-share-prefixes", default=True, show_default=True,
             help="Keep what was read for prompts that begin alike; each key has its own."),
    capacity("--prompt-cache", type=PATH, metavar="DIR",
             help="Keep what was read in files there too, for after a restart.  They hold what clients sent."),
    capacity("--prompt-cache-max", "prompt_cache_bytes", type=Bytes(), metavar="SIZE", default="2GiB", show_default=True,
             help="Size of those files; the longest unused are removed."),
    capacity("--max-body", "body", type=Bytes(), metavar="SIZE", help="Largest request.  [default: 4MiB, 16MiB with pictures]"),
    seconds("--step-seconds", "step_seconds", 0.2, "Most seconds of a run that reads prompts while texts are decoded."),
    seconds("--queue-timeout", "queue_seconds", 300, "Seconds that a request may wait for a seat."),
    seconds("--request-timeout", "request_seconds", 3600, "Seconds that a request may take."),
    seconds("--grace", "grace_seconds", 30, "Seconds that answers have to end when the server does."),
    address("--page/--no-page", default=True, show_default=True, help="A page to try the model at /."),
    click.option("--strict", is_flag=True, help="Refuse fields that are not known."),
    click.option("--quiet", is_flag=True, help="No line for each request."),
    ADAPTERS,
    CHAT_TEMPLATE,
    THREADS,
    DRAFT_OPTIONS,
    EXECUTION_OPTIONS,
    IMAGE_TOKENS,
    grouped,
)  # fmt: skip
