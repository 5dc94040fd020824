"""What every committed file must be: also the hook `hygiene` of pre-commit."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
MAX_FILE_BYTES = 1 << 20
LARGE = {"models/tiny-llama/model.safetensors", "models/tiny-qwen2vl/model.safetensors"}
"""Files that may be larger than MAX_FILE_BYTES bytes."""
AS_WRITTEN = ("edgeq/format/schema/model_generated.py", "edgeq/format/schema/model_generated.pyi", "models/")
"""Beginnings of names of files that other programs wrote."""

BINARY = (".safetensors", ".png")


@pytest.fixture(scope="module")
def files() -> list[Path]:
    """Committed and staged files of the checkout."""
    result = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if result.returncode:
        pytest.skip("not a git checkout")
    return [path for name in result.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def texts(files: list[Path]) -> dict[str, str]:
    return {str(p.relative_to(ROOT)): p.read_bytes().decode("utf-8") for p in files if p.suffix not in BINARY}


def test_text_is_utf8_with_unix_line_ends_and_no_blanks_at_them(files: list[Path]) -> None:
    wrong = [name for name, text in texts(files).items() if "\r" in text or re.search(r"[ \t]$", text, re.MULTILINE)]
    assert not wrong


def test_text_ends_with_one_line_end(files: list[Path]) -> None:
    ours = {name: text for name, text in texts(files).items() if text and not name.startswith(AS_WRITTEN)}
    assert not [name for name, text in ours.items() if not text.endswith("\n") or text.endswith("\n\n")]


def test_no_conflict_is_left(files: list[Path]) -> None:
    assert not [name for name, text in texts(files).items() if re.search(r"^(<{7} |>{7} |={7}$)", text, re.MULTILINE)]


def test_no_large_file_comes_in_by_accident(files: list[Path]) -> None:
    sizes = {str(path.relative_to(ROOT)): path.stat().st_size for path in files}
    assert not {name for name, size in sizes.items() if size > MAX_FILE_BYTES} - LARGE


def test_tests_of_the_cuda_target_lie_in_its_folder(files: list[Path]) -> None:
    """`make test-cuda` looks for them nowhere else."""
    tests = {name: text for name, text in texts(files).items() if name.startswith("tests/") and name.endswith(".py")}
    marked = {name for name, text in tests.items() if re.search(r"\bmark\.cuda\b", text)}
    assert marked and not [name for name in marked if not name.startswith("tests/cuda/")]


def test_no_two_test_files_have_one_name(files: list[Path]) -> None:
    """pytest imports them by their names, and a run of all of them would end before it began."""
    names = [path.name for path in files if path.name.startswith("test_")]
    assert not {name for name in names if names.count(name) > 1}


def test_settings_can_be_read(files: list[Path]) -> None:
    yaml = pytest.importorskip("yaml")
    for path in files:
        text = path.read_text(encoding="utf-8") if path.suffix in (".toml", ".yml", ".yaml", ".cff") else ""
        if path.suffix == ".toml":
            tomllib.loads(text)
        elif text and path.name != "mkdocs.yml":  # its tags name Python objects
            yaml.safe_load(text)
