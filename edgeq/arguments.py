"""What may stand behind an option of the command line, and the line that a user gets when something else does."""

from __future__ import annotations

from typing import Any

import click

from edgeq.errors import InputError


class Threads(click.ParamType):  # type: ignore[type-arg]
    """`auto` (0: the target chooses) or a number of threads."""

    name = "auto|N"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if value == "auto":
            return 0
        if str(value).isdecimal() and 1 <= int(value) <= 1024:
            return int(value)
        raise InputError(f"threads {value!r}: expected auto or a number from 1 to 1024")


class Gamma(click.ParamType):  # type: ignore[type-arg]
    """`auto` (None: what pays) or a number of tokens."""

    name = "auto|N"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | None:
        if value == "auto":
            return None
        if str(value).isdecimal():
            return int(value)
        raise InputError(f"gamma {value!r}: expected auto or a number from 1 to 7")


class GroupSize(click.ParamType):  # type: ignore[type-arg]
    """A number of channels, or `row` (0: one group per row)."""

    name = "N|row"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if value == "row":
            return 0
        if str(value).isdecimal() and int(value):
            return int(value)
        raise InputError(f"group size {value!r}: expected 16, 32, 64, 128 or row")


class Bits(click.ParamType):  # type: ignore[type-arg]
    """W, W/A or W/A/KV: bits of weights, of activations and of the cache."""

    name = "W[/A[/KV]]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dict[str, int]:
        parts = str(value).split("/")
        if len(parts) <= 3 and all(part.isdecimal() and int(part) <= 64 for part in parts):
            return dict(zip(("bits", "activation_bits", "kv_bits"), map(int, parts), strict=False))
        raise InputError(f"bits {value!r}: expected those of weights, activations and cache, such as 4, 4/8 or 4/4/4")


class Numbers(click.ParamType):  # type: ignore[type-arg]
    """A comma-separated list of numbers of at least `least`."""

    name = "N,N"

    def __init__(self, least: int) -> None:
        self.least = least

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        parts = str(value).split(",")
        if all(part.isdecimal() and self.least <= int(part) <= 1 << 24 for part in parts):
            return tuple(int(part) for part in parts)
        name = param.opts[-1] if param else "list"
        raise InputError(f"{name} {value!r}: expected numbers from {self.least}, such as 128,512")
