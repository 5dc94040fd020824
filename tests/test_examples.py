"""Every file of examples/ runs as its docstring says, on one conversion of the bundled model."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}assistant:"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With masters, which only one of the examples needs."""
    from edgeq.converters.convert import convert
    from edgeq.converters.planning.options import ConvertOptions

    path = tmp_path_factory.mktemp("examples") / "tiny-llama.edgeq"
    options = ConvertOptions(method="ttq", bits=4, rank=0, group_size=32)
    convert(str(ROOT / "models" / "tiny-llama"), path, options, lambda *_: None)
    return path


def run(name: str, *arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    result = subprocess.run(command, input=text, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
    return result


def test_generate(model: Path) -> None:
    result = run("generate.py", str(model), "def read_file(path):")
    assert result.stdout.strip() and re.search(r"\[(length|stop); first token after .* tok/s\]", result.stderr)


def test_chat(model: Path, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE)
    assert len(run("chat.py", str(model), str(template), text="import os\nimport sys\n").stdout.splitlines()) >= 2


def test_batch(model: Path) -> None:
    prompts = ["import ", "def main(", "class A:", "for i in ", "return "]
    lines = re.findall(
        r"^(\d): (.*) -> .* \((?:length|stop)\)$", run("batch.py", str(model), text="\n".join(prompts)).stdout, re.M
    )
    assert sorted(lines) == [(str(i), repr(prompt)) for i, prompt in enumerate(prompts)]


def test_samples(model: Path) -> None:
    lines = run("samples.py", str(model), "def read_file(path):", "3").stdout.splitlines()
    found = [re.fullmatch(r"([0-2]): (-?[0-9.]+) '.*'|([0-2]): (-?[0-9.]+) \".*\"", line) for line in lines]
    assert len(found) == 3 and all(found)
    means = [float(match[2] or match[4]) for match in found if match]
    assert means == sorted(means, reverse=True)


def test_requantize(model: Path) -> None:
    result = run("requantize.py", str(model), "def read_file(path):\n    return open(path).read()\n")
    assert re.findall(r"^--- (\w+): ", result.stdout, re.MULTILINE) == ["never", "prompt"]
    read = [int(n) for n in re.findall(r"\[(\d+) tokens read", result.stderr)]
    assert read[0] == 0 < read[1]


def test_every_example_is_short_run_and_linked() -> None:
    tests = Path(__file__).read_text(encoding="utf-8")
    for path in EXAMPLES.glob("*.py"):
        assert f'run("{path.name}"' in tests and f"examples/{path.name}" in (ROOT / "README.md").read_text(encoding="utf-8")
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 32, path
