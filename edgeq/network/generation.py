"""What a file may recommend for generation: the ranges of sampling, and token ids."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgeq.errors import FormatError

SAMPLING: dict[str, tuple[float, float, str]] = {
    "temperature": (1e-6, 100, "0 (greedy) or 1e-6 to 100"),
    "top_k": (0, 1 << 31, "0 (all) or a positive integer"),
    "top_p": (5e-324, 1, "a number above 0 and at most 1"),
    "min_p": (0, 1, "a number from 0 to 1"),
    "repetition_penalty": (0.1, 10, "0.1 to 10 (1: none)"),
}
"""Key of generation_config.json -> smallest and largest value, and how to say so.  A temperature can also be 0."""


def check_generation(generation: Mapping[str, Any]) -> None:
    """FormatError: a recommendation that no run could follow, by key."""
    for key, (least, most, expected) in SAMPLING.items():
        value = generation.get(key)
        if value is None or (key == "temperature" and value == 0):
            continue
        # Not a number fails both comparisons.
        if not least <= value <= most or (key == "top_k" and type(value) is not int):
            raise FormatError(f"{key} is {value}; expected {expected}")
    ids = [generation["bos_token_id"], *generation["eos_token_ids"]]
    if any(i is not None and not 0 <= i < 1 << 31 for i in ids):
        raise FormatError(f"bos_token_id or eos_token_id has {min(i for i in ids if i is not None)}; expected token ids")
