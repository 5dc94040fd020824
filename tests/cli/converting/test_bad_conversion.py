"""What a checkpoint and the options of `edgeq convert` can have wrong: one line, nothing under the name of the file.

Exit code 2: the command line cannot be understood; 1: everything else.
"""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result

from tests.cli.refusal import refused

Run = Callable[..., Result]
Convert = Callable[..., Result]


@pytest.fixture
def convert(edgeq: Run, tmp_path: Path) -> Callable[..., Result]:
    """Convert into a name that must not exist afterwards."""

    def run(source: object, *options: object) -> Result:
        out = tmp_path / "out.edgeq"
        result = edgeq("convert", source, "-o", out, *options)
        assert not out.exists()
        return result

    return run


def change(folder: Path, file: str, **values: object) -> None:
    path = folder / file
    data = json.loads(path.read_text())
    path.write_text(json.dumps({**data, **values}))


def test_a_folder_without_config(convert: Convert, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    refused(convert(tmp_path / "empty"), "config.json")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"architectures": ["MambaForCausalLM"], "model_type": "mamba"}, ["MambaForCausalLM", "Llama"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu"]),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}}, ["dynamic"]),
        ({"vocab_size": 4096}, ["embed_tokens", "4096"]),
    ],
    ids=["architecture", "activation", "rope", "vocabulary"],
)
def test_a_configuration_that_is_not_supported_is_named(
    convert: Convert, copy: Path, values: dict[str, object], words: list[str]
) -> None:
    change(copy, "config.json", **values)
    refused(convert(copy), *words)


def test_a_checkpoint_without_tokenizer_names_its_class(convert: Convert, copy: Path) -> None:
    (copy / "tokenizer.json").unlink()
    change(copy, "tokenizer_config.json", tokenizer_class="MysteryTokenizer")
    refused(convert(copy), "tokenizer.json", "MysteryTokenizer")


def test_a_missing_shard(convert: Convert, copy: Path) -> None:
    (copy / "model.safetensors").rename(copy / "model-00001-of-00002.safetensors")
    index = {"metadata": {}, "weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors"}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(convert(copy), "model-00002-of-00002.safetensors")


def test_no_weights_at_all_and_pickled_weights(convert: Convert, copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    refused(convert(copy), "safetensors")
    (copy / "pytorch_model.bin").write_bytes(b"x")
    refused(convert(copy), ".bin")


@pytest.mark.parametrize("kept", [0, 4, 100, 5000, 1_000_000, 10_498_463])
def test_a_truncated_shard(convert: Convert, copy: Path, kept: int) -> None:
    shard = copy / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:kept])
    refused(convert(copy), "model.safetensors")


def test_a_nan_in_a_weight_names_the_tensor(convert: Convert, copy: Path) -> None:
    shard = copy / "model.safetensors"
    data = bytearray(shard.read_bytes())
    (length,) = struct.unpack("<Q", data[:8])
    name = "model.layers.4.mlp.up_proj.weight"
    start = 8 + length + json.loads(data[8 : 8 + length])[name]["data_offsets"][0]
    data[start + 2000 : start + 2002] = np.array([0x7FC0], np.uint16).tobytes()
    shard.write_bytes(data)
    refused(convert(copy), name, begun=True)


# What the options can have wrong.


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--group-size", "many"], ["'many'", "row", "--group-size"]),
        (["--method", "magic"], ["'magic'", "none, rtn, awq", "--method"]),
        (["--bits", "4/8/4/2"], ["'4/8/4/2'", "4/4/4", "--bits"]),
        (["--bits", "four"], ["'four'", "such as 4", "--bits"]),
        (["--method", "none", "--dtype", "f8"], ["'f8'", "bf16", "--dtype"]),
        (["--for", "toaster"], ["'toaster'", "raspberry-pi-5", "--for"]),
        (["--size", "600"], ["'600'", "600MB", "--size"]),
        (["--read", "0MB"], ["'0MB'", "512MiB", "--read"]),
        (["--kl", "-1"], ["'-1'", "above 0", "--kl"]),
        (["--bits", "3.5.1"], ["'3.5.1'", "--bits"]),
    ],
    ids=lambda x: " ".join(map(str, x)) if isinstance(x, list) else None,
)
def test_options_that_cannot_be_understood(convert: Convert, tiny_llama: Path, options: list[object], words: list[str]) -> None:
    refused(convert(tiny_llama, *options), *words, code=2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--bits", 1], ["1 bits", "2 to 8"]),
        (["--bits", 9], ["9 bits", "2 to 8"]),
        (["--group-size", 48], ["group size 48", "16, 32, 64, 128"]),
        (["--bits", "4/5"], ["5 bits of activations", "4, 6, 8, 16"]),
        (["--method", "resq", "--bits", "3/8/2"], ["cache of 2 bits", "3, 4, 8, 16"]),
        (["--method", "ttq", "--bits", 6], ["6 bits", "ttq", "2 to 5"]),
        (["--rank", 16], ["--rank", "ttq", "rtn"]),
        (["--method", "ttq", "--alpha", 0.5], ["--alpha", "smoothquant"]),
        (["--high-fraction", 0.1], ["--high-fraction", "resq"]),
        (["--calibration-rows", 4], ["rtn", "--calibration"]),
        (["--head", 5], ["5 bits", "4, 6, 8, 16"]),
        (["--method", "awq", "--calibration", "/nonexistent/text"], ["/nonexistent/text"]),
        (["--method", "none", "--calibration", "/nonexistent/text"], ["none"]),
        (["--size", "3MB", "--kl", 0.1], ["--size and --kl", "give one of them"]),
        (["--bits", "3.5", "--speed", 10], ["--bits with a decimal point and --speed"]),
        (["--plan", "/nonexistent/plan", "--read", "2MB"], ["--read and --plan"]),
        (["--read", "2MB", "--group-size", 64], ["--group-size", "one codec for all parts"]),
        (["--read", "2MB", "--method", "awq"], ["budget", "--method gptq"]),
        (["--speed", 10, "--for", "h200"], ["--speed", "h200", "CPUs only", "--read"]),
        (["--plan", "/nonexistent/plan"], ["/nonexistent/plan", "cannot read"]),
        (["--plan", "README.md"], ["README.md", "not a plan", "--save-plan"]),
        (["--plot", "a.svg"], ["--plot", "budget"]),
        (["--read", "2MB", "--plot", "nowhere/a.svg"], ["nowhere: no such folder", "make it first"]),
        (["--read", "2MB", "--save-plan", "nowhere/plan.json"], ["nowhere: no such folder", "make it first"]),
        (["--read", "2MB", "--save-plan", "tests"], ["tests: cannot write it: Is a directory"]),
        (["--kl", 0.1, "--calibration-rows", 1], ["512 tokens", "at least 1024"]),
    ],
    ids=lambda x: " ".join(map(str, x)) if isinstance(x, list) else None,
)
def test_options_out_of_range(convert: Convert, tiny_llama: Path, options: list[object], words: list[str]) -> None:
    refused(convert(tiny_llama, *options), *words)


def test_a_group_size_that_does_not_divide_is_noted(edgeq: Run, checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = checkpoint("llama_gqa", hidden_size=96, intermediate_size=80, num_attention_heads=4, num_key_value_heads=2)
    result = edgeq("convert", folder, "-o", tmp_path / "out.edgeq", "--group-size", 64)
    assert result.exit_code == 0, result.stderr
    assert "qkv, o, gate_up: group size 64 does not divide 96 input channels: groups of 64, the last group" in result.stderr
    assert "down: group size 64 does not divide 80 input channels" in result.stderr


def test_a_folder_that_does_not_exist_for_the_output(edgeq: Run, tiny_llama: Path, tmp_path: Path) -> None:
    refused(edgeq("convert", tiny_llama, "-o", tmp_path / "none" / "out.edgeq"), "no such folder")


FULL_DISK = """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))
from edgeq.tools.cli.main import main
main()
"""


def test_a_full_disk_leaves_nothing_under_the_name_and_the_next_run_goes_on(
    edgeq: Run, tiny_llama: Path, tmp_path: Path, demo: Path
) -> None:
    out = tmp_path / "out.edgeq"
    command = [sys.executable, "-c", FULL_DISK, "convert", str(tiny_llama), "-o", str(out)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=600)
    refused(found, "disk is full", "run the same command again", begun=True)
    assert not out.exists()
    assert edgeq("convert", tiny_llama, "-o", out).exit_code == 0
    assert out.read_bytes() == demo.read_bytes()


@pytest.mark.exhaustive
def test_an_interrupted_conversion_with_other_options_is_not_mixed_up(edgeq: Run, tiny_llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.edgeq"
    command = [sys.executable, "-c", FULL_DISK, "convert", str(tiny_llama), "-o", str(out)]
    subprocess.run(command, capture_output=True, timeout=600)
    refused(edgeq("convert", tiny_llama, "-o", out, "--bits", 5), "bits", "--restart")
    assert edgeq("convert", tiny_llama, "-o", out, "--bits", 5, "--restart").exit_code == 0


def test_a_damaged_gguf_file_cannot_be_converted(convert: Convert, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF\x03\0\0\0")
    refused(convert(tmp_path / "m.gguf"), "m.gguf: the header ends inside", "download it again")
