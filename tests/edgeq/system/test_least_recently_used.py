"""Which files go when there are too many bytes."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from edgeq.system.least_recently_used import remove_least_recently_used


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Files of 10 bytes, the first one used last."""
    found = []
    for age in range(4):
        path = tmp_path / f"{age}"
        path.write_bytes(b"x" * 10)
        os.utime(path, ns=(0, (10 - age) * 10**9))
        found.append(path)
    return found


@pytest.mark.parametrize(("most", "left"), [(40, 4), (39, 3), (30, 3), (29, 2), (9, 0)])
def test_the_longest_unused_go_until_the_others_fit(files: list[Path], most: int, left: int) -> None:
    assert remove_least_recently_used(files, most) == 10 * left
    assert [path.exists() for path in files] == [True] * left + [False] * (4 - left)


def test_a_nanosecond_is_a_difference(files: list[Path]) -> None:
    for i, path in enumerate(files):
        os.utime(path, ns=(0, 1_700_000_000_000_000_000 + i))
    assert remove_least_recently_used(files, 20) == 20
    assert [path.exists() for path in files] == [False, False, True, True]


def test_what_is_gone_or_cannot_be_removed_is_passed_over(files: list[Path], tmp_path: Path) -> None:
    files[3].unlink()
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "within").touch()
    os.utime(folder, ns=(0, 0))
    size = folder.lstat().st_size
    assert remove_least_recently_used([*files, folder], size + 10) == size + 10
    assert folder.exists() and [path.exists() for path in files] == [True, False, False, False]


def test_a_use_before_the_clock_was_set_back_is_an_old_one(files: list[Path]) -> None:
    tomorrow = time.time_ns() + 86_400 * 10**9
    os.utime(files[0], ns=(0, tomorrow))
    assert remove_least_recently_used(files, 30) == 30
    assert [path.exists() for path in files] == [False, True, True, True]
