"""Checkpoint folders from strangers: no file blocks, fills the memory or leads out of the folder; no traceback."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeq.converters.checkpoint.download import HubAccess
from edgeq.converters.checkpoint.tokenizer import MAX_TEMPLATE
from edgeq.converters.convert import ConvertOptions, preflight
from edgeq.converters.families import recognise
from edgeq.converters.importers import open_source
from edgeq.errors import CheckpointError, UnsupportedError
from edgeq.format.safetensors import MAX_VALUES, read_file, read_header, read_json
from tests.converters.importers import published

RTN = ConvertOptions(group_size=32)


@pytest.fixture
def llama(checkpoint: Callable[..., Path], tmp_path: Path) -> Path:
    """A Llama checkpoint of one's own."""
    folder = tmp_path / "llama"
    shutil.copytree(checkpoint("llama_gqa"), folder)
    return folder


@pytest.mark.parametrize(
    "name", ("config.json", "tokenizer.json", "model.safetensors", "chat_template.jinja", "tokenizer.model")
)
@pytest.mark.parametrize("kind", ("pipe", "device"))
def test_a_pipe_or_a_device_is_refused_at_once(llama: Path, name: str, kind: str) -> None:
    path = llama / name
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(CheckpointError, match=f"{name}: not a regular file"):
        preflight(str(llama), RTN)
    for read in (read_json, read_header, lambda path: read_file(path, 10)):
        with pytest.raises(CheckpointError, match="not a regular file"):
            read(path)


def test_a_file_is_read_up_to_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 100)
    assert read_file(path, 100) == b"x" * 100
    with pytest.raises(CheckpointError, match="more than 99 bytes"):
        read_file(path, 99)


def test_a_tokenizer_of_sparse_gigabytes_is_refused(llama: Path) -> None:
    os.truncate(llama / "tokenizer.json", 1 << 40)
    with pytest.raises(CheckpointError, match="tokenizer.json: more than 67108864 bytes"):
        preflight(str(llama), RTN)


def test_a_template_that_links_out_of_the_folder_is_refused(llama: Path, tmp_path: Path) -> None:
    secret, template = tmp_path / "id_rsa", llama / "chat_template.jinja"
    secret.write_text("secret")
    template.symlink_to(secret)
    with pytest.raises(CheckpointError, match="a link out of the checkpoint's folder"):
        preflight(str(llama), RTN)
    template.unlink()
    (llama / "other.jinja").write_text("{{ a }}\r\n")
    template.symlink_to("other.jinja")
    assert preflight(str(llama), RTN).text.blobs["chat_template"] == b"{{ a }}\n"


def test_the_links_of_the_hubs_cache_are_followed(llama: Path, tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "1234", tmp_path / "models--a--b" / "blobs"
    snapshot.parent.mkdir(parents=True)
    blobs.mkdir()
    shutil.move(llama, snapshot)
    (blobs / "abcd").write_text("{{ b }}")
    (snapshot / "chat_template.jinja").symlink_to("../../blobs/abcd")
    assert preflight(str(snapshot), RTN).text.blobs["chat_template"] == b"{{ b }}"


@pytest.mark.parametrize("template", ("\ud800", 7, {"a": 1}, "x" * (MAX_TEMPLATE + 1)))
def test_a_template_that_is_no_text_is_refused(llama: Path, template: Any) -> None:
    path = llama / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": template}))
    with pytest.raises(CheckpointError, match=f"not text of at most {MAX_TEMPLATE} characters"):
        preflight(str(llama), RTN)


def test_a_template_at_its_limit_is_taken(llama: Path) -> None:
    (llama / "chat_template.jinja").write_text("🙂" * MAX_TEMPLATE, encoding="utf-8")
    assert len(preflight(str(llama), RTN).text.blobs["chat_template"]) == 4 * MAX_TEMPLATE
    (llama / "chat_template.jinja").write_text("é" * (MAX_TEMPLATE + 1), encoding="utf-8")
    with pytest.raises(CheckpointError, match="not text of at most"):
        preflight(str(llama), RTN)


def test_a_tokenizer_that_would_end_the_process_is_refused(llama: Path) -> None:
    """64 bytes that ask for 8 GiB."""
    data = json.loads((llama / "tokenizer.json").read_text())
    data["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": "/" * 85 + "w=="}
    (llama / "tokenizer.json").write_text(json.dumps(data))
    with pytest.raises(UnsupportedError, match="tokenizers library cannot load it .*more than .* of memory"):
        preflight(str(llama), RTN)


@pytest.mark.parametrize("kind", ("object", "header"))
def test_a_json_text_of_too_many_values_is_refused_before_it_is_read(tmp_path: Path, kind: str) -> None:
    """100 MiB of empty lists became 2.6 GB of memory."""
    path = tmp_path / "x.json"
    for values, refused in ((MAX_VALUES, False), (MAX_VALUES + 1, True)):
        # One bracket of the object, one of the list, one fewer comma than numbers.
        text = b'{"a":[' + b"0," * (values - 2) + b"0]}"
        path.write_bytes(text if kind == "object" else struct.pack("<Q", len(text)) + text)
        read = read_json if kind == "object" else read_header
        if not refused and kind == "object":
            assert len(read(path)["a"]) == values - 1
            continue
        with pytest.raises(CheckpointError, match="more than 2097152 values" if refused else "'a' lacks dtype"):
            read(path)


@pytest.mark.parametrize("number", ("1e400", "-1e400", "NaN", "Infinity"))
def test_a_number_that_json_does_not_have_is_refused(tmp_path: Path, number: str) -> None:
    path = tmp_path / "generation_config.json"
    path.write_text(f'{{"temperature": {number}, "top_p": 1e308}}')
    with pytest.raises(CheckpointError, match=f"not JSON: the number {number}"):
        read_json(path)


@pytest.mark.parametrize("first", ("x", None, [1], 1.5, True))
@pytest.mark.parametrize("family", ("qwen2", "qwen3"))
def test_a_number_of_layers_that_is_none_is_refused(checkpoint: Callable[..., Path], family: str, first: Any) -> None:
    config = json.loads((checkpoint(family) / "config.json").read_text())
    config |= {"sliding_window": 16, "layer_types": None, "use_sliding_window": True, "max_window_layers": first}
    with pytest.raises(CheckpointError, match="max_window_layers is .*; expected an integer"):
        recognise(config)


@pytest.mark.parametrize("types", (7, "sliding_attention", {"sliding_attention": 1}))
def test_layer_types_that_are_no_list_are_refused(checkpoint: Callable[..., Path], types: Any) -> None:
    config = json.loads((checkpoint("smollm3") / "config.json").read_text()) | {"layer_types": types}
    with pytest.raises(CheckpointError, match="layer_types is not a list"):
        recognise({**config, "use_sliding_window": False})


@pytest.mark.parametrize("kind", ("awq", "compressed-tensors"))
def test_groups_and_blocks_of_a_stranger_cannot_fill_the_memory(llama: Path, kind: str) -> None:
    """Each would repeat a scale two thousand million times."""
    weights = {"num_bits": 4, "strategy": "block", "block_structure": [(1 << 31) - 1, (1 << 31) - 1]}
    groups = {"g": {"targets": ["Linear"], "weights": weights}}
    lay, _ = published.awq() if kind == "awq" else published.compressed("int-quantized", "block")
    huge = {"group_size": (1 << 31) - 1, "bits": 4, "quant_method": kind, "format": "gemm", "config_groups": groups}
    config = {"quantization_config": huge | ({"format": "int-quantized"} if kind != "awq" else {})}

    def draw(name: str, shape: tuple[int, int], seed: int) -> published.Record:
        return published.record((published.BLOCK_ROWS if kind != "awq" else shape[0], shape[1]), seed, group_size=-1)

    folder = published.publish(llama, llama.parent / "published", lay, config, draw).folder
    for name, tensor in open_source(str(folder), HubAccess()).tensors().items():
        if tensor.codec is not None:
            assert tensor.codec.group_size == 0 and np.isfinite(tensor.read(0, tensor.shape[1], name)).all()
