"""What tests of commands share."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable

from click.testing import Result

from edgeq import targets

Run = Callable[..., Result]
Shell = Callable[..., subprocess.CompletedProcess[str]]
PROMPT = "def read_file(path):"
TARGETS = [name for name in targets.TARGETS if targets.load(name).refusal() is None]
REFERENCE = ("--target", "reference")


def objects(result: Result) -> dict:  # type: ignore[type-arg]
    """The JSON that is all of standard output."""
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)  # type: ignore[no-any-return]
