"""Text that every machine with Python has: its standard library (code) and its language reference (English).

Three splits that do not overlap: what the demo model was trained with, what quantization is calibrated with, what is evaluated.
The text depends on the Python version; results carry its digest and compare only with the same one.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

from edgeq.converters.calibration.builtin_text import MODULES as CALIBRATION

EVALUATION = ("argparse.py", "heapq.py", "shelve.py", "statistics.py", "tarfile.py")
SKIPPED = ("site-packages", "/test", "/tests", "idlelib", "lib2to3", "encodings", "pydoc_data", "__pycache__", "config-")


def evaluation_code() -> list[str]:
    """Held-out modules."""
    return _modules(EVALUATION)


def calibration_code() -> list[str]:
    """The modules that calibration reads."""
    return _modules(CALIBRATION)


def evaluation_docs() -> list[str]:
    """Every eighth topic of the language reference."""
    return [text for i, text in enumerate(_topics()) if i % 8 == 0]


def training_texts() -> list[str]:
    """Every other module, and three quarters of the language reference, which count three times."""
    return [*(path.read_text(encoding="utf-8", errors="ignore") for path in _training_modules()), *_training_docs() * 3]


def digest(documents: Sequence[str]) -> str:
    return hashlib.sha256("\0".join(documents).encode()).hexdigest()


def _modules(names: Sequence[str]) -> list[str]:
    library = Path(sysconfig.get_paths()["stdlib"])
    return [(library / name).read_text(encoding="utf-8") for name in names]


def _topics() -> list[str]:
    from pydoc_data.topics import topics

    return [topics[name] for name in sorted(topics)]


def _training_docs() -> list[str]:
    return [text for i, text in enumerate(_topics()) if i % 4]


def _training_modules() -> Iterator[Path]:
    library = sysconfig.get_paths()["stdlib"]
    for folder, folders, files in sorted(os.walk(library)):
        folders.sort()
        if any(part in folder for part in SKIPPED):
            continue
        for name in sorted(files):
            held_out = folder == library and name in EVALUATION + CALIBRATION
            if name.endswith(".py") and not held_out:
                yield Path(folder, name)
