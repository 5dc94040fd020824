"""Lines typed in a chat are there in the next one."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from edgeq.tools.cli import history


def test_typed_lines_are_kept_for_the_next_chat_unless_asked_not_to(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    readline = pytest.importorskip("readline")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    readline.clear_history()
    with history.line_editing(False):
        readline.add_history("secret")
    assert not (tmp_path / "state").exists()
    readline.clear_history()
    for line in ("first", "second"):
        with history.line_editing(True):
            readline.add_history(line)
        readline.clear_history()
    file = tmp_path / "state" / "edgeq" / "chat_history"
    assert [line for line in file.read_text().splitlines() if line in ("first", "second", "secret")] == ["first", "second"]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    # Where nothing can be kept a chat works as without.
    monkeypatch.setenv("XDG_STATE_HOME", str(file))
    with history.line_editing(True):
        readline.add_history("third")
    readline.clear_history()
