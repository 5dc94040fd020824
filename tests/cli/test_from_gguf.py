"""Commands that are given a GGUF file: it is converted once, into the cache."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result
from gguf import GGMLQuantizationType as Type
from PIL import Image
from tokenizers import Tokenizer

from edgeq.format.container import ModelFile
from tests.checkpoints.vision import TRAINED
from tests.cli.refusal import refused
from tests.converters.importers.gguf_files import in_type, write_gguf
from tests.converters.importers.mmproj_files import write_pair

Run = Callable[..., Result]
ONCE = "converting it once, into"


@pytest.fixture
def gguf(checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_tokenizer: None) -> Path:
    """A small model, and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_gguf(checkpoint("llama_gqa"), tmp_path / "m.gguf", in_type(Type.Q4_0))
    return tmp_path / "m.gguf"


def kept(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache").rglob("*.edgeq"))


def test_a_gguf_file_is_converted_once(edgeq: Run, gguf: Path, tmp_path: Path) -> None:
    first, again = (edgeq("inspect", gguf, "--json") for _ in range(2))
    assert first.exit_code == again.exit_code == 0, first.stderr
    assert ONCE in first.stderr and ONCE not in again.stderr and first.stdout == again.stdout
    assert json.loads(first.stdout)["provenance"]["method"] == "as-stored"
    [path] = kept(tmp_path)
    # Not the same file: converted again, and what it was is gone.
    os.utime(gguf, ns=(1, 1))
    assert ONCE in edgeq("inspect", gguf).stderr
    [other] = kept(tmp_path)
    assert other != path and other.name == path.name == "m.edgeq"
    # The same conversion by hand.
    assert edgeq("convert", gguf, "-o", tmp_path / "m.edgeq").exit_code == 0
    assert (tmp_path / "m.edgeq").read_bytes() == other.read_bytes()


@pytest.mark.parametrize("wrong", [("The capital",), ("-n", "abc")])
def test_nothing_is_converted_for_a_wrong_command_line(edgeq: Run, gguf: Path, tmp_path: Path, wrong: tuple[str, ...]) -> None:
    found = edgeq("run", gguf, *wrong)
    assert found.exit_code == 2 and ONCE not in found.stderr and not kept(tmp_path), found.stderr


def test_a_gguf_file_runs(edgeq: Run, gguf: Path) -> None:
    found = edgeq("run", gguf, "-p", "def f(", "-n", 4, "--target", "reference", "--temp", 0)
    assert found.exit_code == 0 and ONCE in found.stderr and found.stdout, found.stderr


def test_a_tokenizer_is_taken_from_the_folder_of_the_checkpoint(
    edgeq: Run, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    folder, out = checkpoint("llama_gqa"), tmp_path / "m.edgeq"
    own = (folder / "tokenizer.json").read_bytes()
    ids = Tokenizer.from_buffer(own).get_vocab()
    keys = {"model": "gpt2", "pre": "of-tomorrow", "tokens": sorted(ids, key=lambda token: ids[token])}
    described = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    write_gguf(folder, tmp_path / "m.gguf", in_type(Type.Q4_0), lambda keys: keys.update(described))
    command = ("convert", tmp_path / "m.gguf", "-o", out)
    refused(edgeq(*command), "m.gguf: tokenizer.ggml.pre is 'of-tomorrow'", "edgeq convert --tokenizer DIR")
    assert edgeq(*command, "--tokenizer", folder).exit_code == 0
    assert json.loads(ModelFile.open(out).blob("tokenizer.json")) == json.loads(own)
    refused(edgeq("convert", folder, "-o", out, "--force", "--tokenizer", folder), "--tokenizer goes with a GGUF file")


def test_a_cache_that_cannot_be_written_is_one_clear_error(edgeq: Run, gguf: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder would be")
    refused(edgeq("inspect", gguf), "m.gguf: cannot be converted into", "Not a directory", "edgeq convert", "m.edgeq")


def test_what_cannot_be_converted_is_refused_as_by_convert(edgeq: Run, gguf: Path) -> None:
    gguf.write_bytes(gguf.read_bytes()[:-100])
    refused(edgeq("inspect", gguf), "m.gguf: truncated", "download it again")


def test_a_model_sees_with_the_tower_that_is_given(edgeq: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model, mmproj, picture = tmp_path / "m.gguf", tmp_path / "mmproj.gguf", tmp_path / "p.png"
    write_pair(TRAINED, model, mmproj)
    Image.new("RGB", (56, 56), "white").save(picture)
    asked = ("run", model, "--image", picture, "-p", "What?", "-n", 2, "--target", "reference", "--temp", 0)
    found = edgeq(*asked, "--mmproj", mmproj)
    assert found.exit_code == 0 and ONCE in found.stderr and found.stdout, found.stderr
    # Without it the language model alone is converted, and both are kept.
    blind = edgeq(*asked)
    assert blind.exit_code == 1 and "this model (qwen2) reads text alone" in blind.stderr.splitlines()[-1], blind.stderr
    again = edgeq(*asked, "--mmproj", mmproj)
    assert ONCE not in again.stderr and again.stdout == found.stdout and len(kept(tmp_path)) == 2
    refused(edgeq(*asked, "--mmproj", tmp_path / "none"), "none: no such file")
    refused(edgeq("run", kept(tmp_path)[0], "--mmproj", mmproj, "-p", "x"), "--mmproj goes with a GGUF file")
    shown = edgeq("convert", model, "--mmproj", model, "--dry-run")
    refused(shown, "general.architecture is 'qwen2vl', expected 'clip'")
