"""The built-in calibration text: modules of Python's standard library and topics of its language reference.

Every machine with Python has it.  The demo model was neither trained nor is evaluated on this text.  It depends on the Python
version, so its digest goes into the provenance of a file.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

MODULES = ("configparser.py", "fractions.py", "sched.py", "textwrap.py", "zipfile.py")
NAME = "python standard library and language reference, calibration split"


def documents() -> tuple[str, ...]:
    """The modules that this Python has, and every eighth topic of the language reference."""
    from pydoc_data.topics import topics

    library = Path(sysconfig.get_paths()["stdlib"])
    code = [(library / name).read_text(encoding="utf-8") for name in MODULES if (library / name).exists()]
    return (*code, *(topics[name] for i, name in enumerate(sorted(topics)) if i % 8 == 4))
