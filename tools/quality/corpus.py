"""Text that every machine with Python has, held out for evaluation: modules of its standard library (code) and every eighth
topic of its language reference (docs).

Neither the demo model was trained on these, nor does calibration read them.  The text depends on the Python version, so results
carry its digest, and only results with the same digest can be compared.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Sequence
from pathlib import Path

EVALUATION = ("argparse.py", "heapq.py", "shelve.py", "statistics.py", "tarfile.py")


def evaluation_code() -> list[str]:
    """The held-out modules."""
    return modules(EVALUATION)


def evaluation_docs() -> list[str]:
    """The held-out topics of the language reference."""
    return [text for i, text in enumerate(topics()) if i % 8 == 0]


def digest(documents: Sequence[str]) -> str:
    """SHA-256 of the documents and the borders between them."""
    return hashlib.sha256("\0".join(documents).encode()).hexdigest()


def modules(names: Sequence[str]) -> list[str]:
    """Source of modules of the standard library, by file name."""
    library = Path(sysconfig.get_paths()["stdlib"])
    return [(library / name).read_text(encoding="utf-8") for name in names]


def topics() -> list[str]:
    """The language reference, in the order of its topics' names."""
    from pydoc_data.topics import topics

    return [topics[name] for name in sorted(topics)]
