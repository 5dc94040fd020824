"""`--rotate`: the rotated model is the same function, and what is made of it is what is made of a rotated checkpoint."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from edgeq.converters.budget.budget import Budget
from edgeq.converters.budget.part_names import HEAD as HEAD_PART
from edgeq.converters.budget.part_names import TABLE
from edgeq.converters.convert import ConvertOptions, convert, preflight
from edgeq.converters.families import HEAD
from edgeq.converters.probing.allocate import allocate
from edgeq.errors import EdgeqError, InputError, UnsupportedError
from edgeq.format.container import ModelFile
from edgeq.runtime import Model

Folders = Callable[..., Path]
pytestmark = pytest.mark.usefixtures("own_cache")
SMALL = ConvertOptions(method="gptq", calibration_rows=8, calibration_length=128)
TOKENS = torch.randint(0, 2048, (1, 40), generator=torch.Generator().manual_seed(5))


def silent(*_: object) -> None:
    pass


@pytest.fixture(scope="module")
def folder(checkpoint: Folders) -> Path:
    return checkpoint("llama_gqa", dtype="float32", intermediate_size=128)


@pytest.fixture(scope="module")
def rotated_folder(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the rotated model, its head apart."""
    made = tmp_path_factory.mktemp("rotated") / folder.name
    shutil.copytree(folder, made)
    plan = preflight(str(folder), replace(SMALL, rotate=True))
    names = [*plan.method.family.tensor_shapes(), HEAD]
    model = plan.model
    save_file({name: torch.from_numpy(model.whole(name).copy()) for name in names}, made / "model.safetensors")
    config = json.loads((made / "config.json").read_text()) | {"tie_word_embeddings": False}
    (made / "config.json").write_text(json.dumps(config))
    return made


def logits(file: ModelFile) -> np.ndarray[Any, Any]:
    model = Model.load(file.path, target="cpu", mode="a16", context=64)
    return np.concatenate([part.copy() for part in model.session().all_logits(TOKENS[0].tolist())])


@torch.no_grad()
def expected(folder: Path) -> np.ndarray[Any, Any]:
    found: np.ndarray[Any, Any] = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(TOKENS).logits[0].numpy()
    return found


def in_floats(folder: Path) -> dict[str, str]:
    """A plan of the rotated model that rounds nothing."""
    plan = preflight(str(folder), replace(SMALL, rotate=True, budget=Budget("bits", 4.0)))
    return {part.name: "f32" for part in plan.parts()}


@pytest.mark.parametrize(
    ("family", "method"),
    [
        *(pytest.param(each, "rtn", marks=pytest.mark.exhaustive) for each in ("llama_mha", "llama_gqa", "qwen2", "qwen3")),
        ("qwen2_moe", "rtn"),
        ("llama_gqa", "awq+gptq"),
    ],
)
def test_a_file_of_unrounded_rotated_weights_gives_the_logits_of_the_source(
    checkpoint: Folders, tmp_path: Path, family: str, method: str
) -> None:
    folder = checkpoint(family)
    reads: dict[str, Any] = {"calibration_rows": 8, "calibration_length": 128} if method != "rtn" else {}
    options = ConvertOptions(method=method, rotate=True, allocation=in_floats(folder), **reads)
    file = convert(str(folder), tmp_path / "o.edgeq", options, silent)
    assert not file.metadata.config.tie_word_embeddings
    provenance: dict[str, Any] = file.metadata.provenance
    assert provenance["options"]["rotate"] is True and provenance["details"] == {"seeds": {"signs": 0}}
    assert "source_channels" not in provenance
    if method != "rtn":
        # The source, too, is run with the rotated weights.
        assert provenance["measured"]["kl"] < 1e-6
    wanted = expected(folder)
    # The runtime keeps keys and values in 16 bits.
    assert np.abs(logits(file) - wanted).max() < 3e-3 * np.abs(wanted).max()


@pytest.mark.exhaustive
def test_rounding_a_rotated_model_is_rounding_its_checkpoint(folder: Path, rotated_folder: Path, tmp_path: Path) -> None:
    wanted = expected(folder)
    assert np.abs(expected(rotated_folder) - wanted).max() < 1e-4 * np.abs(wanted).max()
    options = replace(SMALL, bits=2, trellis=True, group_size=32)
    rotated = convert(str(folder), tmp_path / "a.edgeq", replace(options, rotate=True), silent)
    plain = convert(str(rotated_folder), tmp_path / "b.edgeq", options, silent)
    assert rotated.metadata.config == plain.metadata.config
    assert rotated.metadata.default_mode == plain.metadata.default_mode
    assert rotated.metadata.linears.keys() - plain.metadata.linears.keys() == {TABLE}
    for name, linear in plain.metadata.linears.items():
        mine = rotated.metadata.linears[name]
        for a, b in zip(mine.weights, linear.weights, strict=True):
            assert a.codec == b.codec
            assert all(np.array_equal(rotated.array(ref), plain.array(b.arrays[key])) for key, ref in a.arrays.items()), name


@pytest.mark.exhaustive
def test_a_budget_measures_the_rotated_model(folder: Path, rotated_folder: Path) -> None:
    found = []
    for source, rotate in ((folder, True), (rotated_folder, None), (folder, None)):
        plan = preflight(str(source), replace(SMALL, rotate=rotate, budget=Budget("bits", 2.6)))
        found.append(allocate(plan, silent, silent))
    assert found[0].frontier.measured == found[1].frontier.measured
    assert found[0].point.codecs == found[1].point.codecs and {HEAD_PART, TABLE} <= found[0].point.codecs.keys()
    assert found[0].frontier.measured["layers.1.qkv"] != found[2].frontier.measured["layers.1.qkv"]


def test_what_was_one_table_takes_room_twice_and_the_user_is_told(folder: Path, checkpoint: Folders, tmp_path: Path) -> None:
    options = ConvertOptions(method="rtn", group_size=32)
    tied, twice = (preflight(str(folder), replace(options, rotate=rotate)) for rotate in (None, True))
    more = twice.contents.linears[TABLE]
    assert more.weights[0].codec.name == "i8 g128"
    (line,) = twice.notes()
    assert f"the file has both, and {more.nbytes / 1e6:,.1f} MB for the embedding" in line and not tied.notes()
    file = convert(str(folder), tmp_path / "o.edgeq", replace(options, rotate=True), silent)
    assert file.metadata.bytes_per_token() == tied.metadata().bytes_per_token()
    # An embedding that was not the head stays as it is.
    apart = preflight(str(checkpoint("llama_mha")), replace(options, rotate=True))
    assert apart.contents.arrays[TABLE].dtype == "bf16" and not apart.notes()


def test_a_rotated_conversion_that_was_killed_ends_in_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    options = replace(SMALL, bits=3, group_size=32, rotate=True)
    whole = convert(str(folder), tmp_path / "whole.edgeq", options, silent).path.read_bytes()

    def stop(done: float, total: float, label: str) -> None:
        if label == "layer 2 of 2":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(str(folder), tmp_path / "o.edgeq", options, stop)
    lines: list[str] = []
    resumed = convert(str(folder), tmp_path / "o.edgeq", options, silent, lines.append)
    assert "continuing at layer 2 of 2" in lines and resumed.path.read_bytes() == whole
    with pytest.raises(InputError, match="made with rotate True, now it is None; pass --force"):
        convert(str(folder), tmp_path / "o.edgeq", replace(options, rotate=None), silent)


@pytest.mark.parametrize(
    ("family", "options", "error", "says"),
    [
        ("gemma3", {}, UnsupportedError, "--rotate cannot rotate a gemma3.*: it has norms after attention and MLP.*; leave it"),
        ("opt", {}, UnsupportedError, "it has LayerNorm"),
        ("lfm2", {}, UnsupportedError, "it has conv.* in layer 0, through which no"),
        ("llama_gqa", {"pooling": "last"}, UnsupportedError, "it has states of texts and no head"),
        ("llama_gqa", {"method": "quarot"}, InputError, "goes with --method rtn, awq, gptq, awq\\+gptq, mquant"),
        ("llama_gqa", {"method": "none"}, InputError, "--method none has no use for it"),
    ],
    ids=str,
)
def test_what_cannot_be_rotated_is_refused_by_name(
    checkpoint: Folders, family: str, options: dict[str, Any], error: type[EdgeqError], says: str
) -> None:
    with pytest.raises(error, match=says):
        preflight(str(checkpoint(family)), replace(ConvertOptions(**{"method": "gptq", **options}), rotate=True))
