"""The command line as a user meets it, and one converted demo model."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from edgeq.tools.cli.main import main

TINY_LLAMA = Path(__file__).parent.parent.parent / "models" / "tiny-llama"

Run = Callable[..., Result]


@pytest.fixture(scope="session")
def edgeq() -> Run:
    """`edgeq("run", path, input="...")`: the command in this process; stdout and stderr apart."""

    def run(*arguments: object, input: str | None = None) -> Result:
        return CliRunner().invoke(main, [str(a) for a in arguments], input=input)

    return run


@pytest.fixture(scope="session")
def shell() -> Callable[..., subprocess.CompletedProcess[str]]:
    """The command in a process of its own: exit code and both streams as a shell sees them."""

    def run(*arguments: object, input: str | None = None) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", "from edgeq.tools.cli.main import main; main()", *(str(a) for a in arguments)]
        return subprocess.run(command, capture_output=True, text=True, input=input, timeout=600)

    return run


@pytest.fixture(scope="session")
def tiny_llama() -> Path:
    """The trained demo checkpoint."""
    return TINY_LLAMA


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory, edgeq: Run) -> Path:
    """The demo model, rtn, 4 bits."""
    path = tmp_path_factory.mktemp("demo") / "tiny.edgeq"
    result = edgeq("convert", TINY_LLAMA, "-o", path, "--method", "rtn", "--bits", 4, "--group-size", 128)
    assert result.exit_code == 0, result.stderr
    return path


@pytest.fixture
def template(tmp_path: Path) -> Path:
    """A chat template."""
    path = tmp_path / "template.jinja"
    path.write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:")
    return path


@pytest.fixture
def copy(tiny_llama: Path, tmp_path: Path) -> Path:
    """A checkpoint to break."""
    folder = tmp_path / "checkpoint"
    shutil.copytree(tiny_llama, folder)
    return folder
