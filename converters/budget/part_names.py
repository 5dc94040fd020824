"""The names of the parts of a model that get a codec each; without torch, for what runs where nothing is converted."""

from __future__ import annotations

import re

_EXPERT = re.compile(r"\.experts\.\d+\.")
HEAD, TABLE = "head", "embedding"


def part_of(name: str) -> str:
    """The part that linear layer `name` belongs to."""
    return _EXPERT.sub(".experts.", name)
