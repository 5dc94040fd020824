"""A short share of the fuzzers of this folder; `make fuzz` runs them longer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

COUNTS = {"bytes": 2000, "metadata": 500, "template": 40, "tokenizer": 60, "config": 4000, "index": 3000, "header": 4000}


@pytest.mark.parametrize("kind", COUNTS)
def test_nothing_but_a_result_or_one_clear_error(kind: str) -> None:
    """At most 5 seconds of each kind, always of the same trials."""
    command = [sys.executable, str(Path(__file__).parent / "run.py"), kind, "--seed", "1", "--seconds", "5"]
    done = subprocess.run([*command, "--count", str(COUNTS[kind])], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and " tried: " in done.stdout, done.stdout + done.stderr
