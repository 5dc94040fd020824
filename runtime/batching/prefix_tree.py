"""Cache pages of texts that have been read, found again by the exact tokens and pictures that led to them.

A tree of whole pages: the path from the root to a node spells a beginning of a text, 64 tokens a step, and each node has the
page with the keys and values of its step.  Keys are compared, not only hashed, and every owner has a tree of its own, so that
neither a collision nor the time to the first token tells one user what another has sent (CVE-2025-46570).

A node has a digest of all that led to it too, made of that of its parent and its own key: by it a page that is kept outside the
tree says in 32 bytes which text comes before.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

import numpy as np

from edgeq.pictures.prompt import PicturePlace, Prompt
from edgeq.runtime.session.cache import complete
from edgeq.targets.rows import PAGE, Page

Key = tuple[bytes, tuple[tuple[int, int, bytes, tuple[int, int, int]], ...]]
"""The tokens of a page, and of each picture in it: where it begins in the page, how many of its tokens came before, digest and
grid."""


@dataclass(eq=False)
class Node:
    """A page of the tree.

    digest  SHA-256 of its owner and of the keys on the path to it
    users   texts that hold it, and with it all nodes above it
    used    when it was last let go, in steps of the tree's clock
    ends    a prompt ended with it: texts go on from there again
    """

    page: Page | None
    parent: Node | None
    digest: bytes
    key: Key | None = None
    children: dict[Key, Node] = field(default_factory=dict)
    users: int = 0
    used: int = 0
    ends: bool = False


class PrefixTree:
    """pages   in the tree;  idle: those of them that no text holds."""

    def __init__(self, window: int = 0, snapshot_pages: int = 0) -> None:
        """window   as Graph.window;  snapshot_pages: as of Program"""
        self._window, self._snapshot_pages = window, snapshot_pages
        self.pages, self.idle = 0, 0
        self._roots: dict[str, Node] = {}
        self._clock = 0

    def find(self, owner: str, prompt: Prompt) -> list[Node]:
        """The longest path of whole pages that `prompt` begins with, held for the caller.

        The last token of the prompt is not in it: its row has to run to give logits.  Nor are pages at its end before which
        layers with a window are dropped, or after which layers with a state have no snapshot.
        """
        node, path = self._root(owner), list[Node]()
        for start in range(0, (len(prompt.tokens) - 1) // PAGE * PAGE, PAGE):
            found = node.children.get(key_of(prompt.tokens, prompt.places, start))
            if found is None:
                break
            path.append(found)
            node = found
        del path[self.complete(path) :]
        self.hold(path)
        return path

    def complete(self, path: Sequence[Node]) -> int:
        """Nodes of `path`, at most, before which nothing is dropped that the next row sees."""
        pages = [node.page for node in path if node.page]
        return complete(pages, PAGE * len(path), self._window, self._snapshot_pages > 0) // PAGE

    def extend(
        self, owner: str, path: list[Node], tokens: Sequence[int], places: Sequence[PicturePlace], pages: Sequence[Page]
    ) -> list[Page]:
        """Enter the whole pages that `tokens` fill after those of `path`, which grows by them and stays held.

        Gives the pages of the whole path: where the tree had one already it is that, which holds the same numbers.
        """
        for index in range(len(path), len(tokens) // PAGE):
            self.add(owner, path, key_of(tokens, places, index * PAGE), pages[index])
        return [node.page for node in path if node.page]

    def add(self, owner: str, path: list[Node], key: Key, page: Page) -> None:
        """Enter one page after those of `path`, which grows by it, or by the one that the tree has already."""
        parent = path[-1] if path else self._root(owner)
        found = parent.children.get(key)
        if found is None:
            found = parent.children[key] = Node(page, parent, digest_of(parent.digest, key), key)
            self.pages += 1
            self.idle += 1
            if self._snapshot_pages > 1:
                self._thin(path)
        elif found.page and (found.page.windowed is None or found.page.snapshot is None is not page.snapshot):
            # What was dropped was wanted.
            found.page = Page(found.page.full, found.page.windowed or page.windowed, found.page.snapshot or page.snapshot)
        self.hold([found])
        path.append(found)

    def _thin(self, path: Sequence[Node]) -> None:
        """Drop the snapshot of the last page of a path that goes on, but where texts may go on in other ways too."""
        last = path[-1] if path else None
        if (
            last
            and last.page
            and len(path) % self._snapshot_pages
            and not last.ends
            and last.users < 2
            and len(last.children) < 2
        ):
            last.page = last.page.with_snapshot(None)

    def digest(self, owner: str, path: Sequence[Node]) -> bytes:
        """Digest of the last page of `path`, or of what is before the first one of `owner`."""
        return (path[-1] if path else self._root(owner)).digest

    def hold(self, path: Sequence[Node]) -> None:
        for node in path:
            self.idle -= node.users == 0
            node.users += 1

    def release(self, path: Sequence[Node]) -> None:
        self._clock += 1
        for node in path:
            node.users -= 1
            node.used = self._clock
            self.idle += node.users == 0

    def evict(self, count: int) -> int:
        """Drop `count` pages that no text holds, the longest unused first, ends of texts before their beginnings.

        Gives how many there were to drop.
        """
        # Once through the tree, whose pages may be many, and not once for every page of one long text.
        ends = [(node.used, i, node) for i, node in enumerate(self._nodes()) if not node.children and not node.users]
        heapify(ends)
        dropped = 0
        while dropped < count and ends:
            _, i, node = heappop(ends)
            assert node.parent is not None and node.key is not None
            parent = node.parent
            del parent.children[node.key]
            dropped += 1
            self.pages -= 1
            self.idle -= 1
            if parent.parent is not None and not parent.children and not parent.users:
                heappush(ends, (parent.used, i, parent))
        return dropped

    def drop_windows(self) -> None:
        """Drop layers with a window but where texts may go on: before ends, ends of prompts, and where texts part."""
        if not self._window:
            return
        seen, before = -(-(self._window - 1) // PAGE), dict[int, int]()
        for node in reversed(self._nodes()):
            follows = [before[id(child)] + 1 for child in node.children.values()]
            before[id(node)] = 0 if len(follows) != 1 or node.ends else follows[0]
            if before[id(node)] >= seen and node.page and node.page.windowed is not None:
                node.page = node.page.without_windows()

    def _root(self, owner: str) -> Node:
        return self._roots.setdefault(owner, Node(None, None, hashlib.sha256(owner.encode()).digest()))

    def _nodes(self) -> list[Node]:
        found, waiting = list[Node](), [child for root in self._roots.values() for child in root.children.values()]
        while waiting:
            node = waiting.pop()
            found.append(node)
            waiting.extend(node.children.values())
        return found


def key_of(tokens: Sequence[int], places: Sequence[PicturePlace], start: int) -> Key:
    """What the page from `start` on depends on beside the pages before it."""
    within = tuple(
        (max(0, place.start - start), max(0, start - place.start), place.digest, place.grid)
        for place in places
        if place.start < start + PAGE and place.end > start
    )
    return np.asarray(tokens[start : start + PAGE], np.int32).tobytes(), within


def digest_of(before: bytes, key: Key) -> bytes:
    """The digest of a page by that of the page before it."""
    ids, within = key
    # Only the last part varies in length: no two keys are written alike.
    return hashlib.sha256(before + ids + repr(within).encode()).digest()
