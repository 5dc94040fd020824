"""Who is next: texts that had to make room, then clients one after another, each with its texts in order."""

from __future__ import annotations

from collections import deque

from edgeq.runtime.batching.job import RunningText, Ticket


class TextQueue:
    """Texts without a seat."""

    def __init__(self) -> None:
        self._preempted: list[RunningText] = []
        self._clients: dict[str, deque[RunningText]] = {}  # in the order of their turns
        self._count = 0

    def append(self, ticket: Ticket) -> None:
        """Enter the texts of a ticket, which are numbered as they come."""
        texts = self._clients.setdefault(ticket.job.client, deque())
        for text in ticket.texts():
            self._count += 1
            text.number = self._count
            texts.append(text)

    def put_back(self, text: RunningText) -> None:
        """Enter a text that had to make room before all that have not begun."""
        self._preempted.append(text)
        self._preempted.sort(key=lambda text: text.number)

    def first(self) -> RunningText | None:
        """The next; None: there is none, or each waits for the text that reads the prompt of both."""
        if self._preempted:
            return self._preempted[0]
        heads = (texts[0] for texts in self._clients.values())
        return next((text for text in heads if not text.ticket.reading), None)

    def pop(self, text: RunningText) -> None:
        """Take out what `first` gave."""
        if self._preempted:
            self._preempted.remove(text)
            return
        client = text.ticket.job.client
        texts = self._clients.pop(client)
        texts.remove(text)
        if texts:
            # Its next turn comes after those of all others.
            self._clients[client] = texts

    def drop(self, ticket: Ticket) -> int:
        """Take out the texts of a ticket; how many there were."""
        kept = [text for text in self._preempted if text.ticket is not ticket]
        dropped, self._preempted = len(self._preempted) - len(kept), kept
        texts = self._clients.get(ticket.job.client, deque())
        left = deque(text for text in texts if text.ticket is not ticket)
        dropped += len(texts) - len(left)
        if left:
            self._clients[ticket.job.client] = left
        else:
            self._clients.pop(ticket.job.client, None)
        return dropped
