"""Which parameters of a test `make test` tries; the exhaustive run tries the others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def by_turns(values: Iterable[object], turn: int, turns: int = 2) -> list[Any]:
    """All values as parameters; the one of each `turns` whose turn it is stays in `make test`.

    Tests of one subject take turns: each value is tried by one of them.
    """
    return [pytest.param(value, marks=() if i % turns == turn else pytest.mark.exhaustive) for i, value in enumerate(values)]
