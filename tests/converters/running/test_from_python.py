"""`edgeq.convert`: keywords as the command line has options, and its example in the documentation."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import edgeq
from edgeq.converters.budget.budget import Budget
from edgeq.converters.from_python import convert
from edgeq.converters.planning.options import ConvertOptions
from edgeq.errors import EdgeqError, InputError

ROOT = Path(__file__).resolve().parents[3]
TINY = ROOT / "models" / "tiny-llama"


def test_every_option_of_a_conversion_is_a_keyword() -> None:
    known = {field.name for field in fields(ConvertOptions)} - {
        "activation_bits",
        "kv_bits",
        "vision_activation_bits",
        "open_method",
    }
    keywords = {name for name, value in inspect.signature(convert).parameters.items() if value.kind is value.KEYWORD_ONLY}
    assert keywords == known | {"on_progress", "on_layer", "warn"}
    assert edgeq.convert is convert


def test_it_makes_the_file_of_the_command_line(tmp_path: Path) -> None:
    from click.testing import CliRunner

    from edgeq.tools.cli.main import main

    done: list[tuple[float, float, str]] = []
    layers: list[Any] = []
    settings: dict[str, Any] = {"bits": "2/8", "group_size": "row", "symmetric": True, "head": 4}
    file = edgeq.convert(
        TINY, tmp_path / "a.edgeq", **settings, on_progress=lambda *step: done.append(step), on_layer=layers.append
    )
    options = ["--bits", "2/8", "--group-size", "row", "--sym", "--head", "4"]
    assert CliRunner().invoke(main, ["convert", str(TINY), "-o", str(tmp_path / "b.edgeq"), *options]).exit_code == 0
    assert file.path.read_bytes() == (tmp_path / "b.edgeq").read_bytes()
    assert [report.index for report in layers] == list(range(6)) and done[-1][0] == pytest.approx(done[-1][1], rel=1e-3)
    assert edgeq.convert(str(TINY), str(tmp_path / "a.edgeq"), **settings).identity == file.identity, "found, and verified"
    with pytest.raises(InputError, match="force"):
        edgeq.convert(TINY, tmp_path / "a.edgeq", bits=3)


def test_the_method_that_is_not_named_follows_from_what_is_given(tmp_path: Path) -> None:
    assert [ConvertOptions(calibration=text).method for text in (None, "built-in")] == ["rtn", "gptq"]
    assert ConvertOptions(calibration="built-in", allocation={}).method == "gptq"
    assert ConvertOptions(method="rtn", allocation={}).method == "rtn"
    # A budget needs no method: what is refused is the text.
    text = tmp_path / "text.txt"
    text.write_text("def f(x):\n    return x + 1\n" * 4)
    with pytest.raises(EdgeqError, match="text"):
        edgeq.convert(TINY, tmp_path / "x.edgeq", budget=Budget("bits", 3.0), calibration=text)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"bits": "4-8"}, r"`bits` is '4-8'; expected"),
        ({"bits": True}, "`bits` is True; expected"),
        ({"vision_bits": "4/8/8"}, r"`vision_bits` is '4/8/8'; expected"),
        ({"bits": 1}, "1 bits: not supported"),
        ({"group_size": 33}, "group size 33: not supported"),
        ({"alpha": 0.5}, "alpha"),
        ({"method": "magic"}, "magic"),
        ({"calibration": "nowhere.txt"}, "nowhere.txt"),
    ],
    ids=str,
)
def test_a_wrong_keyword_is_one_clear_error(settings: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(EdgeqError, match=words):
        edgeq.convert(TINY, tmp_path / "x.edgeq", **settings)
    assert not any(tmp_path.iterdir())


def test_without_the_extra_it_says_what_to_install(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None; import edgeq; from edgeq.errors import InputError\n"
        f"try: edgeq.convert({str(TINY)!r}, {str(tmp_path / 'x.edgeq')!r})\n"
        "except InputError as error: print(error)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout == 'edgeq.convert needs torch, which is not installed: pip install "edgeq[convert]"\n', result.stderr


def test_the_example_of_the_documentation_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(import edgeq\n.*?)```", page, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(example.replace('"models/tiny-llama"', repr(str(TINY))), {})
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("layer 1 of 6: 3.75 bits per weight") and lines[6] == "tiny.edgeq 2.9 MB"
