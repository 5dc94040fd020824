"""What makes a run of the tests cheap for its processes: what one has compiled, loaded or compared is not made again.

Fixtures of a whole run, all of them automatic (conftest.py names this file as a plugin).  None changes what a test sees.
"""

from __future__ import annotations

import fcntl
import gc
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import edgeq.converters  # noqa: F401  (before torch: it says how torch's threads wait)
from edgeq.converters.checkpoint import tokenizer
from edgeq.targets.cpu.jit import compile, parallel
from edgeq.targets.cpu.jit.deferred import ObjectFile
from edgeq.targets.cpu.lowering import dispatch
from edgeq.targets.target import OnProgress
from edgeq.text import foreign_tokenizer
from edgeq.text.foreign_tokenizer import SafeTokenizer

# Nearly all that is made while tests are collected stays: looking through it again and again finds nothing.
gc.disable()
GC_THRESHOLDS = 20_000, 10, 10
"""Python's own let the collector look after 700 new objects; a conversion makes millions."""


def pytest_collection_finish() -> None:
    """Take what stays until the end, thousands of tests and torch, out of what the garbage collector looks through."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def compiles_alone() -> Iterator[None]:
    """Kernels are compiled in this process: every core has one that runs tests, and another begins without what Numba knows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallel, "workers_for", lambda jobs: 1)
        yield


@pytest.fixture(scope="session", autouse=True)
def workers_share_what_they_compile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Where workers need a kernel at the same time, as all do at first, one compiles it and the others load it; every second
    worker begins at the end of what a model needs."""
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker is None:
        yield
        return
    locks = tmp_path_factory.getbasetemp().parent / "kernels"
    locks.mkdir(exist_ok=True)
    make, missing = compile._compiled, dispatch.compile_missing

    def compiled(factory: Callable[..., Any], *literals: int) -> ObjectFile:
        path = compile.cache_folder() / compile.file_name(factory, *literals)
        with open(locks / f"{path.parent.name}-{path.name}", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if kept := compile._read(path):
                return kept
            made = make(factory, *literals)
            # Before the others look.
            with suppress(OSError):
                compile._write(path, made)
            return made

    def from_the_end(jobs: Iterable[parallel.Job], on_progress: OnProgress) -> None:
        missing(reversed(list(jobs)), on_progress)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compile, "_compiled", compiled)
        if int(worker.removeprefix("gw")) % 2:
            patch.setattr(dispatch, "compile_missing", from_the_end)
        yield


@pytest.fixture(scope="session", autouse=True)
def nothing_waits_for_the_disk() -> Iterator[None]:
    """What a test writes need not outlive a loss of power; thousands of files would each take a hundredth of a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


LONG_TEXT = 100_000
"""Characters of what is a text to calibrate with, or to score."""


@pytest.fixture(scope="session", autouse=True)
def long_texts_are_encoded_once() -> Iterator[None]:
    """Hundreds of conversions have the tokenizer of the demo model and read the built-in calibration text: it is loaded once
    from the same bytes, and gives the same tokens of a text, which takes it a quarter of a second."""
    load, encode_each = foreign_tokenizer.load, SafeTokenizer.encode_each
    known: dict[tuple[object, ...], list[list[int]]] = {}
    kept: dict[bytes, SafeTokenizer] = {}

    def loaded(data: bytes) -> SafeTokenizer:
        digest = hashlib.blake2b(data).digest()
        if digest not in kept:
            kept[digest] = load(data)
            object.__setattr__(kept[digest], "loaded_from", digest)
        return kept[digest]

    def encoded(self: SafeTokenizer, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        of = getattr(self, "loaded_from", None)
        if of is None or sum(map(len, texts)) < LONG_TEXT:
            return encode_each(self, texts, add_special_tokens=add_special_tokens)
        key = (of, add_special_tokens, *texts)
        if key not in known:
            known[key] = encode_each(self, texts, add_special_tokens=add_special_tokens)
        return [list(tokens) for tokens in known[key]]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(foreign_tokenizer, "load", loaded)
        patch.setattr(SafeTokenizer, "encode_each", encoded)
        yield


@pytest.fixture(scope="session", autouse=True)
def tokenizers_are_compared_once() -> Iterator[None]:
    """What transformers makes of a folder's texts does not depend on its weights: it is asked once for files with the same
    bytes, and again where a test puts something in its place."""
    compare, known = tokenizer._compare, dict[tuple[object, ...], Any]()

    def compared(folder: Path, *asked: Any) -> Any:
        from transformers import AutoTokenizer

        seen = hashlib.blake2b()
        for path in sorted(folder.iterdir()):
            if path.suffix in (".json", ".jinja", ".txt", ".model") and not path.name.endswith(".index.json"):
                seen.update(f"{path.name}\0{path.stat().st_size}\0".encode() + path.read_bytes())
        own, *rest = asked
        reader = AutoTokenizer.from_pretrained
        key = (seen.digest(), getattr(reader, "__func__", reader), own, repr(rest))
        if key not in known:
            known[key] = compare(folder, *asked)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer, "_compare", compared)
        yield
