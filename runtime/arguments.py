"""Checks of arguments at the call: what was found, and what is expected.

An error shows the parameter as it is called in Python, between backticks; the command line shows its option in its place
(`edgeq.tools.cli.entry`).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

from edgeq.errors import InputError

MAX_FOUND_CHARACTERS = 80
"""Characters of a wrong value that an error shows."""


def wrong(name: str, value: object, expected: str) -> InputError:
    """The error of a parameter that cannot have this value."""
    return InputError(f"`{name}` is {_shown(value)}; expected {expected}")


def integer(name: str, value: Any, least: int, most: int, expected: str = "") -> int:
    """`value` as an integer from `least` to `most`.  A bool or a float is none."""
    number = None if isinstance(value, bool) else _index(value)
    if number is None or not least <= number <= most:
        raise wrong(name, value, expected or f"an integer from {least} to {most}")
    return number


def real(name: str, value: Any, least: float, most: float, expected: str = "") -> float:
    """`value` as a number from `least` to `most`."""
    number = math.nan if isinstance(value, (bool, str, bytes)) else _float(value)
    if not least <= number <= most:
        raise wrong(name, value, expected or f"a number from {least:g} to {most:g}")
    return number


def flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise wrong(name, value, "True or False")
    return value


def instance(name: str, value: Any, kind: type | tuple[type, ...], expected: str) -> None:
    if not isinstance(value, kind):
        raise wrong(name, value, expected)


def callback(name: str, value: Any) -> None:
    if value is not None and not callable(value):
        raise wrong(name, value, "a function, or None")


def token_ids(name: str, value: Any, vocab_size: int) -> list[int]:
    """`value`, a sequence or 1-dimensional array of token ids, as a list."""
    expected = f"a list of token ids from 0 to {vocab_size - 1}"
    if isinstance(value, (str, bytes, bytearray, memoryview, dict, set, frozenset)):
        raise wrong(name, value, expected)
    try:
        found = list(value)
    except TypeError:
        raise wrong(name, value, expected) from None
    ids = [None if isinstance(token, bool) else _index(token) for token in found]
    for token, number in zip(found, ids, strict=True):
        if number is None:
            raise InputError(f"`{name}` holds {_shown(token)}; expected {expected}")
        if not 0 <= number < vocab_size:
            raise InputError(f"token {number} is not in the vocabulary of {vocab_size} tokens")
    return [number for number in ids if number is not None]


def texts(name: str, value: Any, most: int, longest: int) -> tuple[str, ...]:
    """`value`, a list of at most `most` strings of 1 to `longest` characters, as a tuple."""
    fits = isinstance(value, Sequence) and not isinstance(value, (str, bytes)) and len(value) <= most
    if not fits or not all(isinstance(s, str) and 0 < len(s) <= longest for s in value):
        raise wrong(name, value, f"a list of at most {most} strings of 1 to {longest} characters")
    return tuple(value)


def _shown(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= MAX_FOUND_CHARACTERS else shown[:MAX_FOUND_CHARACTERS] + "..."


def _index(value: Any) -> int | None:
    try:
        return operator.index(value)
    except TypeError:
        return None


def _float(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan
