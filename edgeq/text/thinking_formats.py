"""How models mark the thinking before an answer, as data: which marks a model has is found among its control tokens."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple


class ThinkingFormat(NamedTuple):
    """Control tokens that begin and end what a model thinks before it answers."""

    begin: str
    end: str


FORMATS = (
    # Qwen3, QwQ, DeepSeek-R1 and what was distilled from it, SmolLM3, GLM-4.5.
    ThinkingFormat("<think>", "</think>"),
    # Magistral.
    ThinkingFormat("[THINK]", "[/THINK]"),
)


def thinking_format(tokens: Collection[str]) -> ThinkingFormat | None:
    """The format of a model with these control tokens; None: it has no marks that are known here."""
    return next((found for found in FORMATS if found.begin in tokens and found.end in tokens), None)
