"""Model files as other programs read them: read back, they are the same integers bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import load_file

from edgeq.converters.checkpoint.download import HubAccess
from edgeq.converters.convert import carry_out
from edgeq.converters.exporters.export import export
from edgeq.converters.importers import open_source
from edgeq.converters.planning.options import ConvertOptions
from edgeq.converters.planning.preflight import planned
from edgeq.errors import InputError, UnsupportedError
from edgeq.format.container import ModelFile
from edgeq.tools.cli.main import main
from tests.converters.importers.packers import stream
from tests.converters.importers.published import Record, awq, compressed, gptq, mlx, publish, record

Checkpoint = Callable[..., Path]
FAMILIES = ("llama_gqa", "llama3_rope", "mistral", "qwen2", "qwen3", "smollm3")
KEYS = {"num_bits", "type", "symmetric", "strategy", "group_size", "dynamic"}


def silent(*progress: Any) -> None:
    pass


def converted(folder: Path, output: Path, **options: Any) -> ModelFile:
    return carry_out(planned(open_source(str(folder), HubAccess()), ConvertOptions(**options)), output, silent).file


def exported(file: ModelFile, output: Path) -> tuple[Path, list[str]]:
    return output, export(file.path, "compressed-tensors", output, False, silent)


def same_layers(found: ModelFile, expected: ModelFile) -> None:
    """All linear layers of a decoder, bit for bit."""
    names = [name for name in expected.metadata.linears if name not in ("head", "embedding")]
    for name in names:
        ours, theirs = found.metadata.linears[name], expected.metadata.linears[name]
        assert ours.weights[0].codec == theirs.weights[0].codec, name
        for part, ref in theirs.weights[0].arrays.items():
            assert np.array_equal(found.array(ours.weights[0].arrays[part]), expected.array(ref)), (name, part)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("symmetric", (True, False))
def test_an_export_reads_back_as_the_same_file(checkpoint: Checkpoint, tmp_path: Path, family: str, symmetric: bool) -> None:
    file = converted(checkpoint(family), tmp_path / "a.edgeq", method="rtn", bits=4, group_size=32, symmetric=symmetric)
    folder, notes = exported(file, tmp_path / "out")
    again = converted(folder, tmp_path / "b.edgeq")
    assert again.metadata.provenance["method"] == "as-stored"
    assert again.metadata.config == file.metadata.config
    assert again.metadata.generation == file.metadata.generation
    assert again.blob("tokenizer.json") == file.blob("tokenizer.json")
    same_layers(again, file)
    assert notes[-1].startswith(("vLLM can divide every layer over", "vLLM's fastest kernels need"))


@pytest.mark.parametrize(("bits", "group_size"), [(8, 0), (8, 32), (4, 64), (3, 32), (2, 0)])
def test_widths_and_groups_of_an_export(checkpoint: Checkpoint, tmp_path: Path, bits: int, group_size: int) -> None:
    options = {"method": "rtn", "bits": bits, "group_size": group_size, "symmetric": True}
    file = converted(checkpoint("llama_gqa", intermediate_size=256, hidden_size=128), tmp_path / "a.edgeq", **options)
    folder, notes = exported(file, tmp_path / "out")
    same_layers(converted(folder, tmp_path / "b.edgeq"), file)
    assert any("from the middle of 2026 on" in line for line in notes) == (bits in (2, 3))


def test_what_is_written_is_what_the_format_says(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = checkpoint("qwen2", dtype="float16")
    file = converted(folder, tmp_path / "a.edgeq", method="rtn", bits=4, group_size=32, symmetric=False)
    folder, _ = exported(file, tmp_path / "out")
    settings = json.loads((folder / "config.json").read_text())["quantization_config"]
    (group,) = settings["config_groups"].values()
    assert set(group) == {"targets", "weights", "input_activations", "output_activations"} and group["targets"] == ["Linear"]
    assert set(group["weights"]) == KEYS and settings["ignore"] == ["lm_head"]
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.self_attn.k_proj"
    rows, columns = tensors[f"{name}.weight_shape"].tolist()
    assert tensors[f"{name}.weight_packed"].shape == (rows, columns * 4 // 32)
    assert tensors[f"{name}.weight_zero_point"].shape == (rows * 4 // 32, columns // 32)
    assert tensors[f"{name}.bias"].shape == (rows,) and f"{name}.weight" not in tensors
    assert not any(name.endswith("zero_point") for name in load_symmetric(checkpoint, tmp_path))


def load_symmetric(checkpoint: Checkpoint, tmp_path: Path) -> dict[str, Any]:
    folder = checkpoint("qwen2", dtype="float16")
    file = converted(folder, tmp_path / "s.edgeq", method="rtn", bits=4, group_size=32, symmetric=True)
    tensors: dict[str, Any] = load_file(exported(file, tmp_path / "symmetric")[0] / "model.safetensors")
    return tensors


def test_negative_scales_become_zero_points(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """A weight means the same: of a fused one all parts get zero points, since vLLM computes them as one."""

    def draw(name: str, shape: tuple[int, int], seed: int) -> Record:
        drawn = record(shape, seed, symmetric=True)
        drawn.scale[:] = np.abs(drawn.scale) if "k_proj" in name else drawn.scale
        return drawn

    settings = compressed(symmetric=True)
    file = converted(publish(checkpoint("llama_gqa"), tmp_path / "packed", *settings, draw).folder, tmp_path / "a.edgeq")
    folder, _ = exported(file, tmp_path / "out")
    tensors = load_file(folder / "model.safetensors")
    assert all((array >= 0).all() for name, array in tensors.items() if name.endswith("weight_scale"))
    name = "model.layers.0.self_attn.k_proj.weight_zero_point"
    rows, groups = tensors["model.layers.0.self_attn.k_proj.weight_scale"].shape
    assert np.array_equal(tensors[name], stream(np.full((groups, rows), 8, np.uint8), 4).T)
    before, after = (planned(open_source(str(each), HubAccess()), ConvertOptions()).checkpoint for each in
                     (tmp_path / "packed", folder))  # fmt: skip
    for tensor in before.tensors:
        if "_proj" in tensor:
            assert np.array_equal(before.whole(tensor), after.whole(tensor)), tensor


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "rtn", "group_size": 16}, "groups of 16 for 128 input channels; vLLM has groups of 32"),
        ({"method": "rtn", "bits": 8, "group_size": 32, "symmetric": False}, "zero points at 8 bits; vLLM has them at 4"),
        ({"method": "ttq", "calibration_rows": 2}, "has a part that no other format has .*convert with rtn, awq or gptq"),
        ({"method": "quarot"}, "has a part that no other format has .transform."),
    ],
)
def test_what_the_format_does_not_hold_is_refused(
    checkpoint: Checkpoint, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    options = {key: value for key, value in options.items() if key != "calibration_rows"}
    file = converted(checkpoint("llama_gqa"), tmp_path / "a.edgeq", **options)
    with pytest.raises(UnsupportedError, match=message):
        exported(file, tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("family", ("gemma3", "opt", "mixtral", "phi3"))
def test_families_that_are_not_exported_are_refused(checkpoint: Checkpoint, tmp_path: Path, family: str) -> None:
    file = converted(checkpoint(family), tmp_path / "a.edgeq", method="none")
    with pytest.raises(UnsupportedError, match="are not exported; supported: "):
        exported(file, tmp_path / "out")


def test_an_order_of_channels_is_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    published = publish(
        checkpoint("llama_gqa"), tmp_path / "gptq", *gptq(), lambda name, shape, seed: record(shape, seed, order=True)
    )
    file = converted(published.folder, tmp_path / "a.edgeq")
    with pytest.raises(UnsupportedError, match="has a part that no other format has .input_order."):
        exported(file, tmp_path / "out")


def test_offsets_are_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    published = publish(
        checkpoint("llama_gqa"), tmp_path / "mlx", *mlx(), lambda name, shape, seed: record(shape, seed, offset=True)
    )
    file = converted(published.folder, tmp_path / "a.edgeq")
    with pytest.raises(UnsupportedError, match=r"q_proj: i4 g32 offset has offsets, half a step or scales of scales"):
        exported(file, tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


def test_one_of_q_k_and_v_in_another_codec_is_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    def draw(name: str, shape: tuple[int, int], seed: int) -> Record:
        return record(shape, seed, group_size=64 if "v_proj" in name else 32)

    published = publish(checkpoint("llama_gqa"), tmp_path / "gptq", *gptq(dynamic={"v_proj": {"group_size": 64}}), draw)
    file = converted(published.folder, tmp_path / "a.edgeq")
    with pytest.raises(UnsupportedError, match="as one matrix, and they have different codecs: .*v_proj i4 g64 zero"):
        exported(file, tmp_path / "out")


def test_a_folder_that_is_there_is_replaced_only_when_asked(checkpoint: Checkpoint, tmp_path: Path) -> None:
    file = converted(publish(checkpoint("llama_gqa"), tmp_path / "awq", *awq()).folder, tmp_path / "a.edgeq")
    folder, _ = exported(file, tmp_path / "out")
    (folder / "mine").touch()
    with pytest.raises(InputError, match="is there already"):
        exported(file, folder)
    export(file.path, "compressed-tensors", folder, True, silent)
    assert not (folder / "mine").exists() and (folder / "config.json").exists()
    (tmp_path / "mine").mkdir()
    with pytest.raises(InputError, match="is no folder that an export made"):
        export(file.path, "compressed-tensors", tmp_path / "mine", True, silent)
    with pytest.raises(InputError, match="no such folder"):
        exported(file, tmp_path / "nowhere" / "out")


def test_the_command_says_what_it_wrote(checkpoint: Checkpoint, tmp_path: Path) -> None:
    file = converted(checkpoint("llama_gqa"), tmp_path / "a.edgeq", method="rtn", bits=4, group_size=32)
    arguments = ["export", str(file.path), "--to", "compressed-tensors", "-o", str(tmp_path / "out")]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 0 and not done.stdout and "out: written" in done.stderr, done.output
    again = CliRunner().invoke(main, arguments)
    assert again.exit_code == 1 and "is there already" in again.stderr
