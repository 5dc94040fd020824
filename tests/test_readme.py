"""The README's Python runs, and its commands and options exist."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

from click.testing import CliRunner

from edgeq.tools.cli.main import main

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_the_python_example_runs(tmp_path: Path) -> None:
    convert = ["convert", str(ROOT / "models" / "tiny-llama"), "-o", str(tmp_path / "tiny-llama.edgeq")]
    assert CliRunner().invoke(main, convert).exit_code == 0
    (example,) = blocks("python")
    result = subprocess.run([sys.executable, "-c", example], cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
    assert re.search(r"(length|stop) [0-9]+ tok/s", result.stdout)


def test_every_command_line_is_understood() -> None:
    lines = [line for block in blocks("sh") for line in block.splitlines() if line.startswith("edgeq ")]
    assert len(lines) >= 7
    for line in lines:
        _, name, *arguments = shlex.split(line)
        command = main.commands[name]
        # Parsing alone: raises on an option that does not exist.
        command.make_context(name, arguments)


def test_the_links_lead_somewhere() -> None:
    for link in re.findall(r"\]\((?!https?:)([^)]+)\)", README):
        path, _, heading = link.partition("#")
        assert (ROOT / path).exists(), link
        if heading:
            titles = re.findall(r"^#+ (.+)", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE)
            assert heading in [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles], link
