"""Folders in MXFP4, as gpt-oss is published: numbers and scales are kept bit for bit; what cannot be is refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from edgeq.converters.convert import carry_out
from edgeq.errors import CheckpointError, EdgeqError
from edgeq.runtime import Model
from tests.converters.importers.conversions import codecs, plan_of, silent

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
Change = Callable[[dict[str, torch.Tensor]], None]


def published(folder: Path, output: Path, change: Change = lambda tensors: None) -> tuple[Path, Path]:
    """The folder with its experts in MXFP4, random, and one with the floats that they mean."""
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    floats, generator = dict(tensors), torch.Generator().manual_seed(3)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, columns, rows = tensors.pop(name).shape
        codes = torch.randint(0, 16, (experts, rows, columns // 32, 32), dtype=torch.uint8, generator=generator)
        scales = torch.randint(122, 125, (experts, rows, columns // 32), dtype=torch.uint8, generator=generator)
        tensors[f"{name}_blocks"] = codes[..., 0::2] | codes[..., 1::2] << 4
        tensors[f"{name}_scales"] = scales
        values = E2M1[codes.long()] * 2.0 ** (scales.float()[..., None] - 127)
        floats[name] = values.reshape(experts, rows, columns).transpose(1, 2).contiguous()
    change(tensors)
    for kind, found, settings in (
        ("mxfp4", tensors, {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}),
        ("floats", floats, {}),
    ):
        shutil.copytree(folder, output / kind)
        save_file({name: each.contiguous() for name, each in found.items()}, output / kind / "model.safetensors")
        (output / kind / "config.json").write_text(json.dumps(config | settings))
    return output / "mxfp4", output / "floats"


def test_mxfp4_is_kept_and_means_its_floats(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    stored, floats = published(checkpoint("gpt_oss", dtype="float32"), tmp_path)
    plan = plan_of(stored)
    file = carry_out(plan, tmp_path / "kept.edgeq", silent).file
    assert file.metadata.provenance["method"] == "as-stored"
    found = codecs(file)
    experts = {codec for name, codec in found.items() if ".experts." in name}
    assert experts == {"n4 g32"} and {codec for name, codec in found.items() if ".experts." not in name} == {"f32"}
    plain = carry_out(plan_of(floats, method="none"), tmp_path / "plain.edgeq", silent).file
    tokens = list(range(5, 45))
    wanted, *others = (
        next(Model.load(path, target=target, mode="a16", context=64, max_logits=40).session().all_logits(tokens))
        for path, target in ((plain.path, "reference"), (file.path, "reference"), (file.path, "cpu"))
    )
    for logits in others:
        assert np.abs(logits - wanted).max() < 2e-3 * np.abs(wanted).max()


def test_rounding_mxfp4_again_rounds_its_floats(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    files = [
        carry_out(plan_of(folder, method="rtn", group_size=32), folder.with_suffix(".edgeq"), silent).file
        for folder in published(checkpoint("gpt_oss", dtype="float32"), tmp_path)
    ]
    for name, linear in files[0].metadata.linears.items():
        arrays = linear.weights[0].arrays, files[1].metadata.linears[name].weights[0].arrays
        for part in arrays[0]:
            assert np.array_equal(files[0].array(arrays[0][part]), files[1].array(arrays[1][part])), (name, part)


DOWN = "model.layers.1.mlp.experts.down_proj"


def replaced(name: str, make: Callable[[torch.Tensor], torch.Tensor | None]) -> Change:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        if (made := make(tensors.pop(name))) is not None:
            tensors[name] = made

    return change


HOSTILE: dict[str, tuple[Change, str]] = {
    "no scales": (replaced(f"{DOWN}_scales", lambda x: None), "down_proj_scales is missing"),
    "no blocks": (replaced(f"{DOWN}_blocks", lambda x: None), "experts.0.down_proj.weight|down_proj is missing"),
    "scales of another shape": (replaced(f"{DOWN}_scales", lambda x: x[:, 1:].contiguous()), "down_proj_scales is U8"),
    "halves of blocks": (replaced(f"{DOWN}_blocks", lambda x: x[..., :8].contiguous()), "expected .*rows, blocks, 16"),
    "one matrix": (replaced(f"{DOWN}_blocks", lambda x: x.view(-1, 16)), "expected .*rows, blocks, 16"),
    "signed blocks": (replaced(f"{DOWN}_blocks", lambda x: x.view(torch.int8)), "down_proj_blocks is I8"),
    "fewer experts": (lambda t: t.update({f"{DOWN}{e}": t[f"{DOWN}{e}"][1:] for e in ("_blocks", "_scales")}), "is missing"),
    "a scale beyond f16": (replaced(f"{DOWN}_scales", lambda x: x.fill_(200)), "a power of two that f16 does not hold"),
    "its floats too": (lambda t: t.update({f"{DOWN}.weight": torch.ones(5, 128, 96)}), "has both .*down_proj.weight and its"),
}


@pytest.mark.parametrize(("change", "why"), HOSTILE.values(), ids=HOSTILE)
def test_what_is_not_mxfp4_is_refused(checkpoint: Callable[..., Path], tmp_path: Path, change: Change, why: str) -> None:
    stored, _ = published(checkpoint("gpt_oss", dtype="float32"), tmp_path, change)
    with pytest.raises(EdgeqError, match=why):
        carry_out(plan_of(stored), tmp_path / "a.edgeq", silent)


def test_a_folder_that_says_mxfp4_and_has_none_is_refused(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = tmp_path / "none"
    shutil.copytree(checkpoint("gpt_oss"), folder)
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    with pytest.raises(CheckpointError, match="already quantized .mxfp4., and none of its tensors is"):
        plan_of(folder)
