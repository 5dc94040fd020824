"""How mkdocs builds the site: pages from outside docs/, the package as it is installed, docstrings with aligned lines."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File, Files

from edgeq.folders import OTHER_FOLDERS

ROOT = Path(__file__).parent.parent
PAGES = {
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "SECURITY.md": "reporting.md",
    "README.md": "overview.md",
}
"""Page of the repository's root -> its name on the site.  README would be the first page, and where the case of a name does not
count SECURITY would be docs/security."""
SOURCE = ROOT / "build" / "site-source" / "edgeq"
"""Where mkdocstrings reads the package: a copy as it is installed, since the folders of a checkout lie beside edgeq/."""


def on_startup(**_: Any) -> None:
    """Before mkdocstrings looks which of its paths exist."""
    shutil.rmtree(SOURCE, ignore_errors=True)
    shutil.copytree(ROOT / "edgeq", SOURCE, ignore=shutil.ignore_patterns("__pycache__"))
    for folder in OTHER_FOLDERS:
        shutil.copytree(ROOT / folder, SOURCE / folder, ignore=shutil.ignore_patterns("__pycache__"))


def on_files(files: Files, config: Any) -> None:
    """Pages of the repository's root; their links into docs/ lead to the same site, those to other files nowhere."""
    for name, page in PAGES.items():
        text = (ROOT / name).read_text(encoding="utf-8").replace("](docs/", "](")
        text = re.sub(r"\[([^]]+)\]\((?!https?:|#)(?![\w/]+\.md)[^)]+\)", r"\1", text)
        files.append(File.generated(config, page, content=text))


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links to pages of the root; shapes such as [blocks][groups], which are no references, escaped except in code."""
    for name, page in PAGES.items():
        for link in (f"](../{name}", f"]({name}"):
            markdown = markdown.replace(link, f"]({page}")
    pieces = markdown.split("`")
    pieces[::2] = [piece.replace("][", "]\\[") for piece in pieces[::2]]
    return "`".join(pieces)


class Aligned(griffe.Extension):
    """Paragraphs of docstrings in which names and what they are stand in columns keep their columns."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            paragraphs = re.split(r"\n\s*\n", obj.docstring.value)
            obj.docstring.value = "\n\n".join(map(_kept, paragraphs))


def _kept(paragraph: str) -> str:
    """A block of code if any of its lines has columns."""
    in_columns = re.search(r"^ {0,3}[\w*`,. ]*\w {2,}\S|^\s{4}", paragraph, re.MULTILINE)
    return "```text\n" + paragraph.strip("\n") + "\n```" if in_columns else paragraph
