"""What the demo model was trained on: the standard library and the language reference without what other splits hold."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from edgeq.tools.corpus import EVALUATION, topics

SKIPPED = ("site-packages", "/test", "/tests", "idlelib", "lib2to3", "encodings", "pydoc_data", "__pycache__", "config-")


def training_texts() -> list[str]:
    """Every module that is neither evaluated nor calibrated with, and three quarters of the language reference, three times."""
    return [*(path.read_text(encoding="utf-8", errors="ignore") for path in _training_modules()), *_training_docs() * 3]


def _training_docs() -> list[str]:
    return [text for i, text in enumerate(topics()) if i % 4]


def _training_modules() -> Iterator[Path]:
    from edgeq.converters.calibration.builtin_text import MODULES

    library = sysconfig.get_paths()["stdlib"]
    for folder, folders, files in sorted(os.walk(library)):
        folders.sort()
        if any(part in folder for part in SKIPPED):
            continue
        for name in sorted(files):
            held_out = folder == library and name in (*EVALUATION, *MODULES)
            if name.endswith(".py") and not held_out:
                yield Path(folder, name)
