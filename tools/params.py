"""What may stand behind an option of the command line, and the line that a user gets when something else does."""

from __future__ import annotations

from typing import Any

import click

from edgeq.errors import InputError


def number(text: str, most: int = 1 << 24) -> int | None:
    """The number that `text` writes in digits; None if it is none, or above `most`."""
    # Python refuses to read thousands of digits.
    return int(text) if text.isdecimal() and len(text) < 10 and int(text) <= most else None


class Threads(click.ParamType):  # type: ignore[type-arg]
    """`auto` (0: the target chooses) or a number of threads."""

    name = "auto|N"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if value == "auto":
            return 0
        if threads := number(str(value), 1024):
            return threads
        raise InputError(f"threads {value!r}: expected auto or a number from 1 to 1024")


class Gamma(click.ParamType):  # type: ignore[type-arg]
    """`auto` (None: what pays) or a number of tokens."""

    name = "auto|N"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | None:
        if value == "auto":
            return None
        if (gamma := number(str(value))) is not None:
            return gamma
        raise InputError(f"gamma {value!r}: expected auto or a number from 1 to 7")


class GroupSize(click.ParamType):  # type: ignore[type-arg]
    """A number of channels, or `row` (0: one group per row)."""

    name = "N|row"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if value == "row":
            return 0
        if size := number(str(value)):
            return size
        raise InputError(f"group size {value!r}: expected 16, 32, 64, 128 or row")


class Bits(click.ParamType):  # type: ignore[type-arg]
    """W, W/A or W/A/KV: bits of weights, of activations and of the cache."""

    name = "W[/A[/KV]]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dict[str, int]:
        parts = str(value).split("/")
        if len(parts) <= 3 and all(number(part, 64) is not None for part in parts):
            return dict(zip(("bits", "activation_bits", "kv_bits"), map(int, parts), strict=False))
        raise InputError(f"bits {value!r}: expected those of weights, activations and cache, such as 4, 4/8 or 4/4/4")


class Numbers(click.ParamType):  # type: ignore[type-arg]
    """A comma-separated list of numbers of at least `least`."""

    name = "N,N"

    def __init__(self, least: int) -> None:
        self.least = least

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        parts = str(value).split(",")
        found = [number(part) for part in parts]
        if all(n is not None and n >= self.least for n in found):
            return tuple(n for n in found if n is not None)
        name = param.opts[-1] if param else "list"
        raise InputError(f"{name} {value!r}: expected numbers from {self.least}, such as 128,512")
