"""The paths, modules, names in files, make targets and links that the pages name exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = (
    "CONTRIBUTING.md",
    "README.md",
    "SECURITY.md",
    *(f"docs/{name}.md" for name in ("arm", "index", "peers", "profile", "qspec", "quality")),
    *(
        f"docs/{name}.md"
        for name in ("adapters", "families", "python", "reproduce", "security", "machines", "serving", "vision")
    ),
)
READMES = tuple(
    path.relative_to(ROOT).as_posix()
    for folder in ("edgeq", "targets", "runtime", "converters", "tools")
    for path in sorted((ROOT / folder).rglob("README.md"))
)
FOLDERS = ("edgeq", "targets", "runtime", "converters", "tools", "tests", "docs", "examples", "models")
TEXTS = {page: (ROOT / page).read_text(encoding="utf-8") for page in (*PAGES, *READMES)}
NAME = r"`[A-Za-z_][\w.]*`"
IN_FILE = re.compile(rf"({NAME}(?:(?:, | and |, and | or ){NAME})*),?\s+(?:of|in)\s+`([\w./-]+\.py)`")


@pytest.mark.parametrize("page", TEXTS)
def test_every_path_exists(page: str) -> None:
    paths = re.findall(rf"`((?:{'|'.join(FOLDERS)})/[\w/.-]*)`", TEXTS[page])
    missing = [path for path in paths if not (ROOT / path).exists() and not (ROOT / page).parent.joinpath(path).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES)
def test_every_make_target_exists(page: str) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    found = {name for line in re.findall(r"^make (.*?)(?:#|$)", TEXTS[page], re.MULTILINE) for name in line.split()}
    assert not [name for name in found if not re.search(rf"^{name}:", makefile, re.MULTILINE)]


@pytest.mark.parametrize("page", TEXTS)
def test_every_module_that_is_run_exists(page: str) -> None:
    """Experiments that are finished are named with the command that finds them."""
    for module in re.findall(r"python -m edgeq\.([\w.]+)(?!.*# removed since: git log -- )", TEXTS[page]):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module


@pytest.mark.parametrize("page", TEXTS)
def test_the_links_lead_somewhere(page: str) -> None:
    for link in re.findall(r"\]\((?!https?:|#)([^)#]+)[^)]*\)", TEXTS[page]):
        assert (ROOT / page).parent.joinpath(link).exists(), link


def defined(path: Path) -> set[str]:
    """Names that a module defines or imports, and those of the classes in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            found.add(node.name)
        elif isinstance(node, ast.alias):
            found.add(node.asname or node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found


def named(page: str) -> list[tuple[str, str]]:
    """(name, path) of what a page says to be in a file: `` `NAME` of `path` ``, `` `A` and `B` in `path` ``."""
    return [
        (name, path)
        for names, path in IN_FILE.findall(re.sub(r"\s+", " ", TEXTS[page]))
        for name in re.findall(r"[\w.]+", names.replace(" and ", " ").replace(" or ", " "))
        if not name.endswith(".py")
    ]


@pytest.mark.parametrize("page", TEXTS)
def test_every_name_is_in_the_file_that_is_said_to_have_it(page: str) -> None:
    missing = []
    for name, path in named(page):
        places = [place for place in (ROOT / path, (ROOT / page).parent / path) if place.exists()]
        if not places or not set(name.split(".")) <= defined(places[0]):
            missing.append(f"{name} of {path}")
    assert not missing


def test_names_in_files_are_found_on_the_pages() -> None:
    assert ("METHODS", "converters/methods/__init__.py") in named("CONTRIBUTING.md")
    assert {("Target", "targets/target.py"), ("Program", "targets/target.py")} <= set(named("CONTRIBUTING.md"))
