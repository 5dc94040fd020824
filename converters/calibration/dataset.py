"""Calibration text: a file, or what every machine with Python has.

The built-in source is held-out modules of the standard library and every eighth topic of the language reference, which the demo
model was neither trained nor is evaluated on.  It depends on the Python version, so its digest goes into the provenance.
"""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from edgeq.converters.tokenizer import Text
from edgeq.errors import InputError

MODULES = ("configparser.py", "fractions.py", "sched.py", "textwrap.py", "zipfile.py")
ROW_TOKENS = 512
MAX_ROWS = 64
BUILT_IN = "python standard library and language reference, calibration split"


@dataclass(frozen=True)
class Calibration:
    """Token rows int64 [rows, tokens], where they come from and the digest of the whole text."""

    source: str
    sha256: str
    rows: torch.Tensor


def calibration(path: Path | None, text: Text, length: int, most: int = MAX_ROWS) -> Calibration:
    """Rows of `length` tokens from a UTF-8 file or the built-in text: its documents one after another, cut, the rest dropped.

    Of more rows than `most`, evenly spaced ones.  InputError: it cannot be read, or is not enough for one row.
    """
    source = BUILT_IN if path is None else path.name
    try:
        documents = _built_in() if path is None else (path.read_text(encoding="utf-8"),)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot read it as UTF-8 calibration text: {error}") from None
    tokenizer = Tokenizer.from_str(text.blobs["tokenizer.json"].decode())
    tokenizer.no_truncation()
    tokenizer.no_padding()
    bos = text.generation["bos_token_id"]
    start = [bos] if isinstance(bos, int) else []
    encoded = (tokenizer.encode(document, add_special_tokens=False).ids for document in documents)
    tokens = [token for ids in encoded for token in (*start, *ids)]
    rows = torch.tensor(tokens[: len(tokens) // length * length], dtype=torch.int64).view(-1, length)
    if not len(rows):
        raise InputError(f"calibration text {source}: {len(tokens)} tokens; at least {length} are needed")
    count = min(most, len(rows))
    digest = hashlib.sha256("\0".join(documents).encode()).hexdigest()
    return Calibration(source, digest, rows[[i * len(rows) // count for i in range(count)]])


def _built_in() -> tuple[str, ...]:
    from pydoc_data.topics import topics

    library = Path(sysconfig.get_paths()["stdlib"])
    code = [(library / name).read_text(encoding="utf-8") for name in MODULES if (library / name).exists()]
    return (*code, *(topics[name] for i, name in enumerate(sorted(topics)) if i % 8 == 4))
