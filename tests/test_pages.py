"""The paths, modules, make targets and links that the pages name exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = (
    "CONTRIBUTING.md",
    "README.md",
    "SECURITY.md",
    *(f"docs/{name}.md" for name in ("arm", "index", "peers", "profile", "qspec", "quality")),
    *(f"docs/{name}.md" for name in ("adapters", "python", "reproduce", "security", "machines", "serving", "vision")),
)
FOLDERS = ("edgeq", "targets", "runtime", "converters", "tools", "tests", "docs", "examples", "models")
TEXTS = {page: (ROOT / page).read_text(encoding="utf-8") for page in PAGES}


@pytest.mark.parametrize("page", TEXTS)
def test_every_path_exists(page: str) -> None:
    paths = re.findall(rf"`((?:{'|'.join(FOLDERS)})/[\w/.-]*)`", TEXTS[page])
    missing = [path for path in paths if not (ROOT / path).exists()]
    assert not missing


@pytest.mark.parametrize("page", TEXTS)
def test_every_make_target_exists(page: str) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    found = {name for line in re.findall(r"^make (.*?)(?:#|$)", TEXTS[page], re.MULTILINE) for name in line.split()}
    assert not [name for name in found if not re.search(rf"^{name}:", makefile, re.MULTILINE)]


@pytest.mark.parametrize("page", TEXTS)
def test_every_module_that_is_run_exists(page: str) -> None:
    for module in re.findall(r"python -m edgeq\.([\w.]+)", TEXTS[page]):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module


@pytest.mark.parametrize("page", TEXTS)
def test_the_links_lead_somewhere(page: str) -> None:
    for link in re.findall(r"\]\((?!https?:|#)([^)#]+)[^)]*\)", TEXTS[page]):
        assert (ROOT / page).parent.joinpath(link).exists(), link
