"""Hostile files of sessions and of prompts that are kept on disk: what is read is what was written, or it is refused."""

from __future__ import annotations

import random
from pathlib import Path
from threading import Lock
from typing import Any, cast

import numpy as np
import xxhash
from mutation import changed_bytes, refused
from numpy.typing import NDArray

from edgeq.errors import EdgeqError
from edgeq.pictures.prompt import PicturePlace
from edgeq.runtime.batching import page_file
from edgeq.runtime.batching.prefix_tree import Node, PrefixTree, key_of
from edgeq.runtime.batching.prompt_store import MIN_PAGES, PromptStore
from edgeq.runtime.session import session_file
from edgeq.runtime.session.session_file import DIGEST_BYTES, Origin
from edgeq.targets.rows import PAGE, Page, PagePart
from edgeq.targets.target import Program, ProgramFacts

PAGE_BYTES, VOCABULARY, CONTEXT = 96, 500, 512
ORIGIN = Origin("0123456789abcdef" * 2, ("target", "mode", "f16", "rope"))
TOKENS = [(i * i) % VOCABULARY for i in range(MIN_PAGES * PAGE)]
PLACES = (PicturePlace(10, (1, 4, 5), b"p" * 16, 20), PicturePlace(100, (2, 4, 5), b"q" * 16, 40))


class Numbers(Page):
    def __init__(self, data: bytes) -> None:
        assert len(data) == PAGE_BYTES
        super().__init__(PagePart(), PagePart())
        self.data = data


PAGES = [Numbers(bytes([i]) * PAGE_BYTES) for i in range(MIN_PAGES)]


class Pages:
    """What a store needs of a program."""

    window, snapshot_pages = 0, 0

    def facts(self) -> ProgramFacts:
        return ProgramFacts()

    def new_page(self) -> Page:
        return Numbers(bytes(PAGE_BYTES))

    def save_page(self, page: Page) -> bytes:
        assert isinstance(page, Numbers)
        return page.data

    def page_memory(self, windowed: bool = True) -> NDArray[np.uint8]:
        return np.zeros(PAGE_BYTES, np.uint8)

    def load_page(self, data: NDArray[np.uint8]) -> Page:
        return Numbers(data.tobytes())


class Caches:
    """Changed files of either kind, half of those of sessions with a right digest."""

    def __init__(self, folder: Path) -> None:
        self._path, self._of = folder / "session", Pages()
        saved = session_file.Saved(TOKENS, PLACES, PAGES, None)
        session_file.write(self._path, ORIGIN, saved, cast(Program, self._of), Lock())
        self._session = self._path.read_bytes()
        self._store = PromptStore(folder / "kept", 1 << 20, ORIGIN, cast(Program, self._of), Lock())
        tree, nodes = PrefixTree(), list[Node]()
        tree.extend("", nodes, TOKENS, PLACES, PAGES)
        root = tree.digest("", ())
        before = [root, *(node.digest for node in nodes)]
        self._led = [(before[i], key_of(TOKENS, PLACES, i * PAGE)) for i in range(len(nodes))]
        self._store.put(root, nodes)
        self._store.flush()
        self._files = [self._store._path(before, key) for before, key in self._led]
        self._pages = [path.read_bytes() for path in self._files]

    def trial(self, rng: random.Random) -> str:
        return self._of_session(rng) if rng.random() < 0.5 else self._of_page(rng)

    def _changed(self, rng: random.Random, data: bytes) -> bytes:
        if rng.random() < 0.1:
            return data[: rng.randrange(len(data))]
        # What comes before the pages as often as they.
        end = rng.choice((128, 128, len(data)))
        return changed_bytes(rng, data[:end]) + data[end:]

    def _of_session(self, rng: random.Random) -> str:
        data = self._changed(rng, self._session)
        if rng.random() < 0.5:
            body = data[:-DIGEST_BYTES]
            data = body + xxhash.xxh3_128_digest(body)
        self._path.write_bytes(data)
        try:
            tokens, places, pages, _ = session_file.read(
                self._path, ORIGIN, cast(Program, self._of), Lock(), VOCABULARY, CONTEXT
            )
        except EdgeqError as error:
            return refused(error)
        assert len(tokens) <= CONTEXT and len(pages) == -(-len(tokens) // PAGE) and all(0 <= t < VOCABULARY for t in tokens)
        assert all(place.end <= len(tokens) for place in places)
        return "session read"

    def _of_page(self, rng: random.Random) -> str:
        index = rng.randrange(len(PAGES))
        path, sound = self._files[index], self._pages[index]
        data = self._changed(rng, sound) if rng.random() < 0.9 else rng.choice(self._pages)
        signed = rng.random() < 0.5
        if signed:
            body = data[: -page_file.DIGEST_BYTES]
            data = body + xxhash.xxh3_128_digest(body)
        path.write_bytes(data)
        path.chmod(0o600)
        before, key = self._led[index]
        found: Any = next(self._store.pages(before, [key], index), None)
        if found is None:
            assert data != sound and not path.exists()
            return "page missed"
        # Whoever can sign one can choose its numbers, and nothing else.
        assert found[1].data == PAGES[index].data or signed
        return "page read"
