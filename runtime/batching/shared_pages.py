"""Cache pages of the texts of a scheduler: how many may be made, and those that texts which begin alike share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from time import perf_counter
from weakref import WeakSet

from edgeq.pictures.prompt import Prompt
from edgeq.runtime.batching.job import ReadPrompt, RunningText, Ticket
from edgeq.runtime.batching.prefix_tree import Node, PrefixTree, key_of
from edgeq.runtime.batching.prompt_store import PromptStore
from edgeq.runtime.model import Model
from edgeq.runtime.session.cache import windowed_pages
from edgeq.runtime.session.session import Session
from edgeq.targets.rows import PAGE, Page, PagePart
from edgeq.targets.states import snapshot_bytes, state_bytes


class SharedPages:
    """tree    finds the pages of texts by what led to them; None: nothing is shared
    store   keeps them on disk too; None: they are lost with the process
    """

    def __init__(self, model: Model, limit: int | None, shares: bool, store: PromptStore | None) -> None:
        """limit   pages of all texts and of the tree; None: any number
        shares  keep a tree

        Pages whose layers with a window are dropped count as what is left of them.  The states of a text count twice, as a run
        of its prompt keeps what was before.
        """
        options, states = model.program.options, model.graph.states
        self.tree = PrefixTree(model.program.window, model.program.snapshot_pages) if shares else None
        self.store = store if shares else None
        self._part_bytes = model.graph.part_bytes(options.kv)
        self._page_bytes = sum(self._part_bytes)
        self._most_windowed = windowed_pages(model.program.window, options.max_rows)
        self._limit = None if limit is None else limit * self._page_bytes
        self._full, self._windowed = WeakSet[PagePart](), WeakSet[PagePart]()
        self._state_bytes, self._snapshot_bytes = 2 * state_bytes(states), snapshot_bytes(states)
        self._sessions, self._snapshots = WeakSet[Session](), WeakSet[PagePart]()
        self._parked: list[Ticket] = []

    @property
    def _held_bytes(self) -> int:
        """Bytes of the pages that are held, and of states."""
        full, windowed = self._part_bytes
        held = len(self._full) * full + len(self._windowed) * windowed
        if self._state_bytes:
            held += len(self._snapshots) * self._snapshot_bytes + sum(s.is_open for s in self._sessions) * self._state_bytes
        return held

    @property
    def counts(self) -> tuple[int, int, int]:
        """Pages that may still be made (-1: any number), that are held, and that only the tree holds."""
        idle = self.tree.idle if self.tree else 0
        free = -1 if self._limit is None else (self._limit - self._held_bytes) // self._page_bytes
        return free, -(-self._held_bytes // self._page_bytes), idle

    def count(self, pages: Iterable[Page]) -> None:
        """Enter pages that were made."""
        for page in pages:
            self._full.add(page.full)
            if page.windowed is not None:
                self._windowed.add(page.windowed)
            if page.snapshot is not None:
                self._snapshots.add(page.snapshot)

    def count_session(self, session: Session) -> None:
        """Enter a session that was begun: its states take memory until it is closed."""
        if self._state_bytes:
            self._sessions.add(session)

    def is_full(self) -> None:
        """No more can be made than there are: the machine has less memory than was thought."""
        self._limit = self._held_bytes

    def make_room(self, whole: int, later: int = 0, *, texts: int = 0, snapshots: int = 0) -> bool:
        """Whether there is room for so many whole pages, after dropping what no text holds.

        later      pages of which those that are behind have dropped their layers with a window when the last are made
        texts      that begin, with states of their own;  snapshots: of pages that are there or not
        """
        full, windowed = self._part_bytes
        needed = (whole + later) * full + (whole + min(later, self._most_windowed)) * windowed
        needed += texts * self._state_bytes + snapshots * self._snapshot_bytes
        for hard in (False, True):
            if hard:
                for ticket in list(self._parked):
                    self.unpark(ticket)
                if self.store:
                    self.store.give_up()
            if self.tree and self._short(needed) > 0:
                self.tree.drop_windows()
                if (short := self._short(needed)) > 0:
                    self.tree.evict(-(-short // self._page_bytes))
            # Pages that wait to be written are held when the tree has dropped them: what was dropped is not yet free.
            if self._short(needed) <= 0:
                return True
        return False

    def _short(self, needed: int) -> int:
        """Bytes that have to be given back before `needed` can be made; 0 or less: none."""
        return 0 if self._limit is None else needed - (self._limit - self._held_bytes)

    def find(self, owner: str, prompt: Prompt) -> list[Node]:
        """The pages in the tree that `prompt` begins with, held."""
        return self.tree.find(owner, prompt) if self.tree else []

    def fetch(self, text: RunningText, end: float) -> bool:
        """Take the next pages of a prompt from the disk into the tree and the path of the text, until the clock (perf_counter)
        says `end`, though one at least.  Gives whether all have been taken that are there.
        """
        if not self.tree or not self.store:
            return True
        unread, owner, path = text.unread, text.ticket.job.tree, text.path
        # The last token has to run, to give logits.
        starts = range(len(path) * PAGE, (len(unread.tokens) - 1) // PAGE * PAGE, PAGE)
        keys = (key_of(unread.tokens, unread.places, start) for start in starts)
        stored = self.store.pages(self.tree.digest(owner, path), keys, len(path))
        while self.make_room(1, snapshots=1) and (found := next(stored, None)):
            key, page = found
            self.count([page])
            self.tree.add(owner, path, key, page)
            if perf_counter() > end:
                return False
        return True

    def complete(self, text: RunningText) -> None:
        """Let go of the pages at the end of a path from which no text can go on: its tokens are read."""
        if self.tree:
            end = self.tree.complete(text.path)
            self.tree.release(text.path[end:])
            del text.path[end:]

    def end_prompt(self, text: RunningText) -> None:
        """The prompt of a text has been read."""
        if text.path:
            text.path[-1].ends = True

    def keep(self, text: RunningText) -> None:
        """Write the pages that a text has filled, soon."""
        if self.store and self.tree:
            self.store.put(self.tree.digest(text.ticket.job.tree, ()), text.path)

    def again(self, path: Sequence[Node]) -> list[Node]:
        """The same path, held once more."""
        if self.tree:
            self.tree.hold(path)
        return list(path)

    def let_go(self, path: Sequence[Node]) -> None:
        if self.tree:
            self.tree.release(path)

    def enter(self, text: RunningText) -> None:
        """Let others find the pages that a text has filled."""
        session = text.running.session
        if self.tree and len(session.tokens) // PAGE > len(text.path):
            session.share(self.tree.extend(text.ticket.job.tree, text.path, session.tokens, session.places, session.pages))

    def park(self, ticket: Ticket, parked: ReadPrompt) -> None:
        """Keep a prompt that was read, for texts of its ticket that have no seat yet."""
        self._parked.append(ticket)
        ticket.parked = parked

    def unpark(self, ticket: Ticket) -> None:
        parked, ticket.parked = ticket.parked, None
        if parked:
            self._parked.remove(ticket)
            self.let_go(parked.path)
