"""Predictions kept in the cache folder, so that a source is scored once for a text.

    0     magic, 8 bytes
    8     BLAKE2b-256 of the key and of all that follows
    40    log_sum f64, nll f64, logits f32, ids u32, each as `Predictions` has it, one after another, little endian

The key says what they are of: the source, the tokens, how much of each prediction is kept.  It is part of the name of the file
and of its digest.  The sizes follow from what is asked for: a file of any other size is no such file, and nothing is allocated
from what a file says.  One that does not fit is made again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import numpy as np

from edgeq.system.least_recently_used import remove_least_recently_used
from edgeq.system.machine import cache_folder
from edgeq.tools.quality.predictions import SAMPLED, TOP, Predictions

MAGIC = b"edgeql\r\n"
DIGEST = 32
MAX_BYTES = 4 << 30
"""Size of one file, and of all of them together: those that were used last stay."""
ENDING = ".predictions"


def kept_or_made(
    key: dict[str, Any], tokens: int, vocab_size: int, make: Callable[[], Predictions], on_wait: Callable[[], None]
) -> Predictions:
    """The predictions kept for `key`, or those that `make` makes, which are kept then.

    tokens     number of predictions
    on_wait    called where another process is making them: its are taken
    Where the cache folder cannot be written, nothing is kept.
    """
    key = key | {"top": min(TOP, vocab_size), "sampled": SAMPLED}
    path = cache_folder() / "predictions" / f"{hashlib.sha256(_encoded(key)).hexdigest()[:32]}{ENDING}"
    kept = read(path, key, tokens, vocab_size)
    if kept is not None:
        return kept
    with _alone(path, on_wait) as file:
        kept = read(path, key, tokens, vocab_size)
        if kept is not None:
            return kept
        made = make()
        if file is not None:
            with suppress(OSError):
                _write(file, key, made)
                os.replace(file.name, path)
                remove_least_recently_used(path.parent.glob(f"*{ENDING}"), MAX_BYTES)
        return made


def read(path: Path, key: dict[str, Any], tokens: int, vocab_size: int) -> Predictions | None:
    """What `path` has for `key`; None: there is no such file, or it is damaged."""
    width = key["top"] + key["sampled"]
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {
        "log_sum": ("<f8", (tokens,)),
        "nll": ("<f8", (tokens,)),
        "logits": ("<f4", (tokens, width)),
        "ids": ("<u4", (tokens, width)),
    }
    sizes = [np.dtype(dtype).itemsize * math.prod(shape) for dtype, shape in shapes.values()]
    size = len(MAGIC) + DIGEST + sum(sizes)
    try:
        with open(path, "rb") as file:
            if size > MAX_BYTES or os.fstat(file.fileno()).st_size != size:
                return None
            data = file.read(size)
        os.utime(path)
    except OSError:
        return None
    start = len(MAGIC) + DIGEST
    if data[: len(MAGIC)] != MAGIC or data[len(MAGIC) : start] != _digest(key, memoryview(data)[start:]):
        return None
    arrays = {}
    for (name, (dtype, shape)), nbytes in zip(shapes.items(), sizes, strict=True):
        arrays[name] = np.frombuffer(data, dtype, math.prod(shape), start).reshape(shape)
        start += nbytes
    found = Predictions(**arrays)
    # A digest is no proof of who wrote it; an entry outside the vocabulary would be read as one.
    sound = all(bool(np.isfinite(array).all()) for array in (found.log_sum, found.nll, found.logits))
    return found if sound and bool((found.ids < vocab_size).all()) else None


def _write(file: IO[bytes], key: dict[str, Any], made: Predictions) -> None:
    data = b"".join(
        np.ascontiguousarray(array, dtype).tobytes()
        for array, dtype in ((made.log_sum, "<f8"), (made.nll, "<f8"), (made.logits, "<f4"), (made.ids, "<u4"))
    )
    if len(data) > MAX_BYTES:
        raise OSError("too large to be kept")
    file.truncate(0)
    file.seek(0)
    file.write(MAGIC + _digest(key, data))
    file.write(data)
    file.flush()
    os.fsync(file.fileno())


def _encoded(key: dict[str, Any]) -> bytes:
    return json.dumps(key, sort_keys=True).encode()


def _digest(key: dict[str, Any], data: bytes | memoryview) -> bytes:
    found = hashlib.blake2b(_encoded(key), digest_size=DIGEST)
    found.update(data)
    return found.digest()


@contextmanager
def _alone(path: Path, on_wait: Callable[[], None]) -> Iterator[IO[bytes] | None]:
    """The file to write before it gets its name, locked, once no other process makes the same; None: it cannot be written."""
    new = path.with_suffix(".new")
    with ExitStack() as stack:
        file: IO[bytes] | None = None
        with suppress(OSError):
            new.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(open(new, "ab"))
        if file is None:
            yield None
            return
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            # A file system without locks: two processes may do the same work, and the file of the last one stays.
            pass
        # While this process waited, the file may have got its name; then what it would write to is what is read next.
        named = new.exists() and os.path.samestat(os.fstat(file.fileno()), new.stat())
        yield file if named else None
