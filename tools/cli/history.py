"""The lines typed in chats, kept so that the arrow keys find them in the next one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

MAX_LINES = 1000


def history_file() -> Path:
    """A user's own file, apart from the cache: what is there cannot be made again."""
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "edgeq" / "chat_history"


@contextmanager
def line_editing(keep: bool) -> Iterator[None]:
    """Line editing in `input`, where Python has it; keep: with the lines of earlier chats, which only their user can read."""
    try:
        # With this module input() has line editing.
        import readline
    except ImportError:
        yield
        return
    if not keep:
        yield
        return
    with suppress(OSError, RuntimeError):
        readline.read_history_file(history_file())
    try:
        yield
    finally:
        # Best effort: a home that cannot be written, or none, must not end a conversation with an error.
        with suppress(OSError, RuntimeError):
            path = history_file()
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
            readline.set_history_length(MAX_LINES)
            readline.write_history_file(path)
