"""What is kept for later is kept for the code that made it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from edgeq.converters.planning import code_digest as digests
from edgeq.converters.planning.code_digest import CONVERTERS, code_digest, quantizing_code
from edgeq.tools.quality.scorers import SCORING


def test_a_new_room_is_seen(tmp_path: Path) -> None:
    (tmp_path / "old.py").write_text("1")
    before = code_digest((tmp_path,))
    room = tmp_path / "room" / "within"
    room.mkdir(parents=True)
    (room / "new.py").write_text("2")
    assert code_digest((tmp_path,)) != before


def test_every_source_of_the_converters_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = tmp_path / "converters"
    shutil.copytree(CONVERTERS, copy, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(digests, "CONVERTERS", copy)
    assert quantizing_code.__wrapped__() == quantizing_code()
    sources = sorted(copy.rglob("*.py"))
    assert len(sources) > 100
    for path in sources:
        whole = path.read_bytes()
        path.write_bytes(whole + b"# changed")
        assert quantizing_code.__wrapped__() != quantizing_code(), path
        path.write_bytes(whole)


def test_the_rooms_that_scores_depend_on_exist() -> None:
    assert all((room / "__init__.py").is_file() for room in SCORING)
