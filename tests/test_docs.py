"""The documentation site builds without a warning, and holds every page and what a program imports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from edgeq import runtime

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings_handlers.python")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stdout + result.stderr
    return folder


def test_every_page_is_linked_from_the_readme() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [page.name for page in (ROOT / "docs").glob("*.md") if f"docs/{page.name}" not in readme] == []


@pytest.mark.exhaustive
def test_every_page_is_in_the_site(site: Path) -> None:
    for page in (ROOT / "docs").glob("*.md"):
        assert (site / page.with_suffix(".html").name).exists(), page
    for page in ("overview", "CONTRIBUTING", "reporting", "CHANGELOG"):
        assert (site / f"{page}.html").exists()


@pytest.mark.exhaustive
def test_the_interface_is_described(site: Path) -> None:
    text = (site / "api.html").read_text(encoding="utf-8")
    missing = [name for name in runtime.__all__ if f'id="edgeq.runtime.{name}"' not in text]
    assert missing == ["Piece"]  # what Generation.pieces gives: in its signature
    assert "float32 [" in text and "edgeq.errors.FormatError" in text


@pytest.mark.exhaustive
def test_columns_of_docstrings_stay_columns(site: Path) -> None:
    text = (site / "api.html").read_text(encoding="utf-8")
    assert text.count("language-text") > 5 or text.count("<pre") > 5
