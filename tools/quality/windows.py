"""Text that models are compared on, in windows of tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from edgeq.errors import InputError
from edgeq.tools.quality import corpus
from edgeq.tools.quality.scorers import Windows


def read_documents(text: str) -> list[str]:
    """The text of a file, or held-out text of Python itself by the names code and docs.

    InputError: it cannot be read.
    """
    if text == "code":
        return corpus.evaluation_code()
    if text == "docs":
        return corpus.evaluation_docs()
    try:
        return [Path(text).read_text(encoding="utf-8")]
    except UnicodeDecodeError:
        raise InputError(f"{text}: not UTF-8 text; convert it to UTF-8") from None
    except OSError as error:
        raise InputError(f"{text}: cannot read it: {error.strerror}; pass a text file, code or docs") from None


def cut(documents: Sequence[str], encode: Callable[[str], list[int]], size: int, limit: int) -> Windows:
    """The first `limit` tokens of the documents one after another in windows [windows, size]; the rest is left out.

    InputError: they are not enough for two.
    """
    tokens = [token for document in documents for token in encode(document)][:limit]
    count = len(tokens) // size
    if count < 2:
        raise InputError(
            f"the text has {len(tokens)} tokens, too few for two windows of {size}: pass more text or a smaller --window"
        )
    return np.array(tokens[: count * size], np.int64).reshape(count, size)
