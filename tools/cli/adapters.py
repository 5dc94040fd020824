"""`--lora NAME=DIR`: adapters that clients and lines choose by name."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from edgeq.errors import InputError
from edgeq.format.adapter import Adapter
from edgeq.runtime import Model
from edgeq.tools.cli.terminal import compilation, note

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
MAX_ADAPTERS = 64


def named(given: Sequence[str]) -> dict[str, Path]:
    """Folders by name; without one it is the folder's.  InputError: a name that cannot be used, or two that are the same."""
    found: dict[str, Path] = {}
    for each in given:
        name, equals, folder = each.partition("=")
        path = Path(folder if equals else each)
        name = name if equals else path.resolve().name
        if not _NAME.fullmatch(name):
            raise InputError(f"--lora {each}: {name!r} is no name; give NAME=DIR, with letters, digits, dots, - and _ in NAME")
        if name in found:
            raise InputError(f"--lora {each}: there are two adapters named {name}; give them names: NAME=DIR")
        found[name] = path
    if len(found) > MAX_ADAPTERS:
        raise InputError(f"{len(found)} adapters; at most {MAX_ADAPTERS} can be served")
    return found


def digests(adapters: dict[str, Path]) -> list[tuple[str, str]]:
    """Name and digest of each."""
    return [(name, Adapter.read(path).digest) for name, path in adapters.items()]


def adapted(model: Model, adapters: dict[str, Path]) -> dict[str, Model]:
    """`model` with each adapter."""
    found = {}
    for name, path in adapters.items():
        with compilation() as report:
            found[name] = model.with_adapter(path, report)
        note(f"adapter  {name}: {path}")
    return found
