"""Records that a file holds as JSON: every key is known, every number in range, before anything is made of them."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from edgeq.errors import FormatError, UnsupportedError


def check_positive(name: str, value: object) -> None:
    """FormatError unless `value` is a number from 1e-30 to 1e12: powers of smaller ones overflow where they are used."""
    if type(value) not in (int, float) or not 1e-30 <= value <= 1e12:  # type: ignore[operator]
        raise FormatError(f"config {name} is {value!r}; expected a positive number")


def check_integer(name: str, value: object, least: int, most: int) -> None:
    """FormatError unless `value` is an integer in that range; true is none."""
    if type(value) is not int or not least <= value <= most:
        raise FormatError(f"config {name} is {value!r}; expected an integer from {least} to {most}")


def check_layers(name: str, indices: tuple[int, ...], layers: int) -> None:
    """FormatError unless `indices` are ascending numbers of layers."""
    if any(type(i) is not int or not 0 <= i < layers for i in indices) or list(indices) != sorted(set(indices)):
        raise FormatError(f"config {name} must be ascending integers from 0 to {layers - 1}")


def check_flag(name: str, value: object) -> None:
    if type(value) is not bool:
        raise FormatError(f"config {name} is {value!r}; expected true or false")


def known(kind: Any, data: Any, where: str, apart: frozenset[str] = frozenset()) -> dict[str, Any]:
    """`data`, if all its keys are fields of the dataclass `kind` and all fields without a default are present.

    apart   fields that are read elsewhere
    """
    if not isinstance(data, dict):
        raise FormatError(f"{where} is not a JSON object")
    names = {f.name for f in fields(kind)} - apart
    unknown = sorted(set(data) - names)
    if unknown:
        raise UnsupportedError(f"{where} has unknown keys {', '.join(unknown)}; this file needs a newer edgeq")
    needed = {f.name for f in fields(kind) if f.default is f.default_factory} - apart
    missing = sorted(needed - set(data))
    if missing:
        raise FormatError(f"{where} lacks {', '.join(missing)}")
    return data


def list_of(data: dict[str, Any], key: str, most: int, where: str) -> tuple[Any, ...]:
    """`data[key]`, taken out, as a tuple of at most `most` entries; empty where it is absent."""
    entries = data.pop(key, ())
    if not isinstance(entries, (list, tuple)) or len(entries) > most:
        raise FormatError(f"{where} {key} is not a list of at most {most} entries")
    return tuple(entries)
