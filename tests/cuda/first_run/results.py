"""Where a step writes what it found: JSON in the folder of the run, a line for each finding, as it comes."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


def write(name: str, found: dict[str, Any]) -> None:
    """Add a line to DIR/NAME.jsonl, and show it."""
    line = json.dumps(found)
    sys.stdout.write(f"{name}: {line}\n")
    sys.stdout.flush()
    folder = Path(os.environ.get("FIRST_RUN_OUT", "."))
    with open(folder / f"{name}.jsonl", "a", encoding="utf-8") as file:
        file.write(line + "\n")
