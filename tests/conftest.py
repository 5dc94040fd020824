"""Fixtures of all tests: checkpoints that are built once in a run, and what a test may ask to have for itself."""

from __future__ import annotations

import hashlib
import os
import re
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from edgeq.system import machine
from edgeq.targets.cpu.jit import compile
from tests.checkpoints.families import build_checkpoint

pytest_plugins = ["tests.workers"]

# A shell starts what it runs in the background with interrupts ignored; what a test starts and interrupts would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


WHOLE_MODELS = [Path(__file__).parent / room for room in ("runtime", "edgeq")]
"""Rooms of tests that run models, not single operations."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test of a whole model that runs on both targets is left to the exhaustive run on the reference one.

    That one computes in numpy, takes three times as long, and is what tests/targets holds every operation of the other against.
    """
    targets: dict[object, dict[str, list[pytest.Item]]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec") and set(WHOLE_MODELS) & set(item.path.parents):
            for target in {"reference", "cpu"} & set(re.split("[- ]", item.callspec.id)):
                targets.setdefault(item.function, {}).setdefault(target, []).append(item)
    for on in targets.values():
        for item in on.get("reference", []) if "cpu" in on else []:
            item.add_marker(pytest.mark.exhaustive)


Checkpoint = Callable[..., Path]


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache folder that no other test has; kernels, and what was found out about tokenizers, are those of all tests."""
    compile.cache_folder()
    shared = machine.cache_folder() / "tokenizers"
    shared.mkdir(parents=True, exist_ok=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    machine.cache_folder().mkdir(parents=True)
    (machine.cache_folder() / shared.name).symlink_to(shared)


@pytest.fixture
def works_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes to a child with limits is done in this process, as on a system that has no fork.

    A fork of a process with torch, Numba and thousands of tests takes 70 ms of processor time.  Not for what a stranger wrote.
    """
    monkeypatch.delattr(os, "fork", raising=False)


@pytest.fixture
def tiny_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """GGUF files get the tokenizer of the demo model, which tiny checkpoints have, in place of one made of their metadata."""
    from edgeq.converters.importers import gguf_source
    from tests.converters.importers.gguf_files import tiny_texts

    monkeypatch.setattr(gguf_source, "write_texts", tiny_texts)


Once = Callable[[str, str, Callable[[Path], object]], Path]


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Once:
    """`once(name, key, make)` -> what `make(path)` writes, a file or a folder: made by one of the processes that run tests.

    What has the same key must be the same; it is shared, so a test that changes it copies it first.
    """
    base = tmp_path_factory.getbasetemp()
    # Each process has a folder of its own in that of the run.
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "once"
    shared.mkdir(exist_ok=True)

    def get(name: str, key: str, make: Callable[[Path], object]) -> Path:
        place = shared / hashlib.blake2b(key.encode(), digest_size=8).hexdigest() / name
        if not place.exists():
            folder = tmp_path_factory.mktemp("made")
            make(folder / name)
            # Where another process was faster, what it made is there, and is the same.
            with suppress(OSError):
                folder.rename(place.parent)
        return place

    return get


@pytest.fixture(scope="session")
def checkpoint(once: Once) -> Checkpoint:
    """`checkpoint(family, dtype="bfloat16", max_shard_size="5GB", **config overrides)` -> folder, built once per run."""

    def get(family: str, *, dtype: str = "bfloat16", max_shard_size: str = "5GB", **overrides: Any) -> Path:
        key = repr((family, dtype, max_shard_size, sorted(overrides.items())))
        return once(family, key, lambda folder: build_checkpoint(folder, family, dtype, max_shard_size, overrides))

    return get
