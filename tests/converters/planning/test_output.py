"""What a conversion finds at its output: nothing is lost, nothing is made twice, and two processes do not meet."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgeq.converters.convert import ConvertOptions, carry_out, convert, preflight
from edgeq.converters.planning.output import check_output
from edgeq.errors import InputError
from edgeq.format.partial import Partial

Checkpoint = Callable[..., Path]


def silent(*_: object) -> None:
    pass


@pytest.fixture
def source(checkpoint: Checkpoint, tmp_path: Path) -> Path:
    """A checkpoint of one's own."""
    return Path(shutil.copytree(checkpoint("llama_gqa"), tmp_path / "model"))


@pytest.mark.parametrize(
    "name",
    ["model.safetensors", "config.json", "new.json", "model-00001-of-00002.safetensors", "chat_template.jinja"],
)
def test_a_file_of_the_checkpoint_is_never_the_output(source: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {path.name: path.read_bytes() for path in source.iterdir()}
    with pytest.raises(InputError, match="a file of the checkpoint .*choose another name"):
        convert(str(source), source / name, ConvertOptions(force=True, restart=True), silent)
    monkeypatch.chdir(source)
    with pytest.raises(InputError, match="a file of the checkpoint"):
        check_output("../model", Path(name))
    assert {path.name: path.read_bytes() for path in source.iterdir()} == before


@pytest.mark.parametrize("options", [ConvertOptions(), ConvertOptions(force=True)])
def test_what_is_no_model_file_is_never_replaced(source: Path, tmp_path: Path, options: ConvertOptions) -> None:
    letter, link = tmp_path / "letter.txt", tmp_path / "link"
    letter.write_text("dear")
    link.symlink_to(letter)
    for path in (letter, link, tmp_path):
        with pytest.raises(InputError, match="not replaced|symbolic link|a folder"):
            convert(str(source), path, options, silent)
    assert letter.read_text() == "dear" and sorted(p.name for p in tmp_path.iterdir()) == ["letter.txt", "link", "model"]


@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_the_same_conversion_finds_its_file_again(source: Path, tmp_path: Path, method: str) -> None:
    text = tmp_path / "text.txt"
    text.write_text("import os\nprint(os.name)\n" * 300)
    # With a text the head's bits are measured and recorded, which must not look like another option.
    options = ConvertOptions(method=method, group_size=32, calibration=text)
    made = convert(str(source), tmp_path / "o.edgeq", options, silent)
    before = made.path.stat()
    labels: set[Any] = set()
    again = carry_out(preflight(str(source), options), made.path, lambda *call: labels.add(call[2]))
    assert again.already_there and again.file.identity == made.identity and labels == {"verify"}
    assert os.path.samestat(before, made.path.stat()) and not list(tmp_path.glob("*partial*"))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"bits": 3}, "bits 4, now it is 3"),
        ({"method": "ttq"}, "method 'rtn', now it is 'ttq'"),
        ({"head": 6}, "head None, now it is 6"),
    ],
)
def test_another_conversion_asks_before_it_replaces(source: Path, tmp_path: Path, changes: Any, says: str) -> None:
    output = tmp_path / "o.edgeq"
    before = convert(str(source), output, ConvertOptions(group_size=32), silent).path.read_bytes()
    options = {"group_size": 32, **changes}
    with pytest.raises(InputError, match=f"is there, made with {says}; pass --force"):
        convert(str(source), output, ConvertOptions(**options), silent)
    assert output.read_bytes() == before and not list(tmp_path.glob("*partial*"))
    convert(str(source), output, ConvertOptions(**options, force=True), silent)
    assert output.read_bytes() != before


@pytest.mark.parametrize("old_times", [False, True])
def test_a_file_of_weights_that_have_changed_is_not_taken_for_the_same(source: Path, tmp_path: Path, old_times: bool) -> None:
    convert(str(source), tmp_path / "o.edgeq", ConvertOptions(), silent)
    weights = source / "model.safetensors"
    shutil.copy(weights, source / "other")
    if old_times:
        os.utime(source / "other", (1, 1))
    os.replace(source / "other", weights)
    with pytest.raises(InputError, match="model.safetensors has changed since it was made; pass --force"):
        convert(str(source), tmp_path / "o.edgeq", ConvertOptions(), silent)


def test_a_damaged_model_file_asks_too(source: Path, tmp_path: Path) -> None:
    output = convert(str(source), tmp_path / "o.edgeq", ConvertOptions(), silent).path
    os.truncate(output, 20000)
    with pytest.raises(InputError, match="truncated or damaged.*--force"):
        convert(str(source), output, ConvertOptions(), silent)


def test_an_output_in_the_folder_of_the_checkpoint_is_resumed(source: Path) -> None:
    class Crash(Exception):
        pass

    def crash(done: float, total: float, label: str) -> None:
        if label == "layer 2 of 2":
            raise Crash

    with pytest.raises(Crash):
        convert(str(source), source / "o.edgeq", ConvertOptions(), crash)
    convert(str(source), source / "o.edgeq", ConvertOptions(), silent)
    assert not list(source.glob("*partial*"))


def test_the_second_of_two_conversions_is_told_of_the_first(source: Path, tmp_path: Path) -> None:
    first = Partial(tmp_path / "o.edgeq")
    with pytest.raises(InputError, match="another conversion is writing this file; wait for its end or choose another name"):
        convert(str(source), tmp_path / "o.edgeq", ConvertOptions(restart=True, force=True), silent)
    first.close()
    convert(str(source), tmp_path / "o.edgeq", ConvertOptions(), silent)


def test_options_and_output_are_refused_before_torch_is_imported(source: Path, tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("dear")
    code = (
        "import json, sys\nfrom edgeq.tools.cli.main import main\nfor each in json.load(sys.stdin):\n"
        "    try:\n        main(['convert', *each])\n    except SystemExit as end:\n        print(end.code)\n"
        "    assert not {'torch', 'transformers'} & set(sys.modules)\n"
    )
    wrong = (
        ["-o", "o.edgeq", "--bits", "9"],
        ["-o", "o.edgeq", "--rank", "8"],
        ["-o", "o.edgeq", "--method", "ttq", "--bits", "8"],
        ["-o", "o.edgeq", "--calibration-rows", "8"],
        ["-o", "letter.txt"],
        ["-o", str(source / "config.json")],
        ["-o", "nowhere/o.edgeq"],
    )
    given = json.dumps([[str(source), *arguments] for arguments in wrong])
    found = subprocess.run([sys.executable, "-c", code], input=given, capture_output=True, text=True, cwd=tmp_path)
    assert found.returncode == 0 and found.stdout.split() == ["1"] * len(wrong), found.stderr
    lines = found.stderr.splitlines()
    assert len(lines) == len(wrong) and all(line.startswith("error: ") for line in lines), found.stderr
