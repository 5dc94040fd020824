"""Reads the calibration text, a file or the built-in one, and cuts it into rows of tokens.

The built-in text is of modules of Python's standard library and topics of its language reference, which every machine with
Python has.  The demo model was neither trained nor is evaluated on it.  It depends on the Python version, so its digest goes
into the provenance of a file.
"""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from edgeq.converters.checkpoint.tokenizer import TextAssets
from edgeq.errors import InputError
from edgeq.text import foreign_tokenizer

MODULES = ("configparser.py", "fractions.py", "sched.py", "textwrap.py", "zipfile.py")
BUILT_IN = "python standard library and language reference, calibration split"
ROW_TOKENS = 512
MAX_ROWS = 64
MAX_BYTES = 16 << 20
"""The largest text: a hundred times what is used of it by default, and the tokens of all of it are in memory at once."""


@dataclass(frozen=True)
class Calibration:
    """Token rows int64 [rows, tokens], where they come from and the digest of the whole text."""

    source: str
    sha256: str
    rows: torch.Tensor

    @property
    def tokens(self) -> int:
        return self.rows.numel()

    @property
    def longest(self) -> int:
        """Tokens of a row."""
        return self.rows.shape[1]

    def few(self, count: int) -> Calibration:
        """At most `count` rows, evenly spaced."""
        return replace(self, rows=self.rows[:: -(-len(self.rows) // count)])


def calibration(path: Path | None, text: TextAssets, length: int, most: int = MAX_ROWS) -> Calibration:
    """Rows of `length` tokens from a UTF-8 file or the built-in text: its documents one after another, cut, the rest dropped.

    Of more rows than `most`, evenly spaced ones.  InputError: it cannot be read, is too long, or is not enough for one row.
    """
    source = BUILT_IN if path is None else path.name
    try:
        documents = built_in_documents() if path is None else (_read(path),)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot read it as UTF-8 calibration text: {error}") from None
    encoder = foreign_tokenizer.load(text.blobs["tokenizer.json"])
    bos = text.generation["bos_token_id"]
    start = [bos] if isinstance(bos, int) else []
    encoded = encoder.encode_each(documents, add_special_tokens=False)
    tokens = [token for ids in encoded for token in (*start, *ids)]
    rows = torch.tensor(tokens[: len(tokens) // length * length], dtype=torch.int64).view(-1, length)
    if not len(rows):
        raise InputError(f"calibration text {source}: {len(tokens)} tokens; at least {length} are needed")
    count = min(most, len(rows))
    digest = hashlib.sha256("\0".join(documents).encode()).hexdigest()
    return Calibration(source, digest, rows[[i * len(rows) // count for i in range(count)]])


def built_in_documents() -> tuple[str, ...]:
    """The modules that this Python has, and every eighth topic of the language reference."""
    from pydoc_data.topics import topics

    library = Path(sysconfig.get_paths()["stdlib"])
    code = [(library / name).read_text(encoding="utf-8") for name in MODULES if (library / name).exists()]
    return (*code, *(topics[name] for i, name in enumerate(sorted(topics)) if i % 8 == 4))


def _read(path: Path) -> str:
    with open(path, "rb") as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise InputError(
            f"calibration text {path}: longer than {MAX_BYTES >> 20} MiB, of which a few hundred KB would be used; give a part "
            f"of it, such as its beginning: head -c {MAX_BYTES >> 20}M {path.name} > part.txt"
        )
    return data.decode("utf-8")
