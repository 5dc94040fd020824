"""Style, types, and the generated schema code are what the sources say."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import edgeq
from edgeq.folders import OTHER_FOLDERS

ROOT = Path(__file__).parent.parent
BIN = Path(sys.executable).parent


def run(command: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, env=environment)


@pytest.mark.parametrize("command", ["check", "format --diff"])
def test_ruff_finds_nothing(command: str) -> None:
    result = run([sys.executable, "-m", "ruff", *command.split(), "."], ROOT)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.exhaustive
def test_mypy_strict_finds_nothing() -> None:
    """mypy does not see the four folders inside edgeq; a throw-away tree of links shows them to it as installed."""
    tree = ROOT / "build" / "typed"
    shutil.rmtree(tree, ignore_errors=True)
    (tree / "edgeq").mkdir(parents=True)
    for folder in OTHER_FOLDERS:
        (tree / "edgeq" / folder).symlink_to(ROOT / folder)
    for path in (*(ROOT / "edgeq").rglob("*.py*"), ROOT / "edgeq" / "py.typed"):
        if not path.name.startswith("model_generated") and path.suffix != ".pyc":
            link = tree / path.relative_to(ROOT)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(path)
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), "-p", "edgeq"]
    result = run([*command, "--cache-dir", str(ROOT / ".mypy_cache")], tree)
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_schema_generates_exactly_the_committed_code(tmp_path: Path) -> None:
    shutil.copy(ROOT / "edgeq" / "format" / "schema" / "model.fbs", tmp_path)
    command = ["flatc", "--python", "--gen-object-api", "--gen-onefile", "--python-typing", "model.fbs"]
    result = run(command, tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    for name in ("model_generated.py", "model_generated.pyi"):
        assert (tmp_path / name).read_bytes() == (ROOT / "edgeq" / "format" / "schema" / name).read_bytes(), (
            f"run: make schema ({name})"
        )


def test_there_is_one_version() -> None:
    """The package, its metadata (from the same line), the citation and the newest entry of the changelog."""
    assert '__version__ = "' + edgeq.__version__ in (ROOT / "edgeq" / "version.py").read_text(encoding="utf-8")
    assert 'version = { attr = "edgeq.version.__version__" }' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f"\nversion: {edgeq.__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    newest = re.search(r"^## \[([^]]+)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert newest and newest[1] == edgeq.__version__
