"""The layer that drafts of a checkpoint of Qwen3.5: it is kept, rounded as the others are, or left out."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from edgeq.converters.checkpoint.tokenizer import TextAssets
from edgeq.converters.convert import convert
from edgeq.converters.planning.draft_tokens import drafted_tokens
from edgeq.converters.planning.options import ConvertOptions
from edgeq.converters.planning.preflight import preflight
from edgeq.errors import CheckpointError, FormatError, InputError, UnsupportedError
from edgeq.format.codec import as_float32, dequantize
from edgeq.format.container import ModelFile
from edgeq.network.config import ModelConfig
from edgeq.runtime import Model
from tests.checkpoints.drafts import add_draft_layer, read_tensors
from tests.checkpoints.vision import build

Checkpoint = Callable[..., Path]


def converted(source: Path, output: Path, **options: Any) -> ModelFile:
    return convert(str(source), output / "model.edgeq", ConvertOptions(**options), lambda *_: None)


def weights(file: ModelFile, name: str) -> np.ndarray[Any, Any]:
    (weight,) = file.metadata.linears[name].weights
    arrays = {part: file.array(ref) for part, ref in weight.arrays.items()}
    return dequantize(weight.codec, weight.rows, weight.columns, arrays)


def test_its_tensors_are_stored_as_the_page_says(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = checkpoint("qwen3_5_mtp", dtype="float32")
    file, tensors = converted(folder, tmp_path, method="none"), read_tensors(folder)
    config = file.metadata.config
    assert config.draft_layers == 1 and ModelConfig.from_json(config.to_json()) == config
    joined = tensors["mtp.fc.weight"]
    assert np.array_equal(weights(file, "draft.embedding"), joined[:, :128])
    assert np.array_equal(weights(file, "draft.hidden"), joined[:, 128:])
    q, gate = np.split(tensors["mtp.layers.0.self_attn.q_proj.weight"].reshape(4, 128, 128), 2, axis=1)
    k, v = (tensors[f"mtp.layers.0.self_attn.{name}_proj.weight"] for name in "kv")
    rows = np.concatenate([q.reshape(-1, 128), k, v, gate.reshape(-1, 128)])
    assert np.array_equal(weights(file, "draft.layers.0.qkv"), rows)
    for ours, theirs in {
        "embedding_norm": "pre_fc_norm_embedding",
        "hidden_norm": "pre_fc_norm_hidden",
        "norm": "norm",
    }.items():
        array = file.metadata.arrays[f"draft.{ours}"]
        assert np.allclose(as_float32(file.array(array), array.dtype), 1 + tensors[f"mtp.{theirs}.weight"])


@pytest.mark.parametrize(
    "options",
    [
        {"method": "rtn", "bits": 3, "group_size": 32},
        {"method": "gptq", "bits": 4, "group_size": 32, "calibration_rows": 2, "calibration_length": 32},
        *(
            pytest.param(each, marks=pytest.mark.exhaustive)
            for each in (
                {"method": "rtn", "bits": 3, "half": True, "scale_bits": 4, "group_size": 32},
                {"method": "awq", "bits": 4, "symmetric": True, "calibration_rows": 2, "calibration_length": 32},
            )
        ),
    ],
)
def test_it_is_rounded_in_the_codec_of_the_other_layers(
    checkpoint: Checkpoint, tmp_path: Path, options: dict[str, Any]
) -> None:
    file = converted(checkpoint("qwen3_5_mtp"), tmp_path, **options)
    found, provenance = file.metadata, file.metadata.provenance
    for part in ("qkv", "o", "gate_up", "down"):
        mine, theirs = (found.linears[f"{p}.{part}"].weights[0] for p in ("draft.layers.0", "layers.1"))
        assert mine.codec == theirs.codec and mine.codec.bits == options["bits"]
    assert found.linears["draft.hidden"].weights[0].codec.bits == options["bits"]
    assert found.linears["draft.layers.0.qkv"].input_scale is None
    assert isinstance(provenance["draft"], dict) and provenance["draft"]["method"] == "rtn"
    exact = read_tensors(checkpoint("qwen3_5_mtp"))["mtp.layers.0.mlp.down_proj.weight"]
    assert np.abs(weights(file, "draft.layers.0.down") - exact).mean() < 0.3 * np.abs(exact).mean()


def test_a_budget_and_a_plan_leave_it_in_four_bits(checkpoint: Checkpoint) -> None:
    plan = preflight(str(checkpoint("qwen3_5_mtp")), ConvertOptions(method="gptq", calibration_rows=2, calibration_length=32))
    names = [part.name for part in plan.parts()]
    assert "layers.1.qkv" in names and not [name for name in names if "draft" in name]
    assert plan.draft is not None and plan.draft.options.bits == 4


@pytest.mark.parametrize("kind", ["states", "states_experts"])
def test_it_is_kept_beside_a_vision_tower(tmp_path: Path, kind: str) -> None:
    """As checkpoints of Qwen3.5 are published."""
    folder = build(tmp_path / "sees", kind)
    add_draft_layer(folder)
    path = converted(folder, tmp_path, method="rtn", group_size=32).path
    prompt = list(range(2, 40))
    with Model.load(path, target="reference", draft_layer=True, context=96) as model:
        assert model.config.vision and model.config.draft_layers == 1
        texts = [model.generate(prompt, max_tokens=16, ignore_eos=True, draft=draft, gamma=2) for draft in ("off", "mtp")]
        assert texts[0].text() == texts[1].text() and texts[0].tokens == texts[1].tokens
        assert sum(texts[1].measurement.speculation.drafted) > 0


def test_its_experts_are_rounded_and_not_counted_for_a_token(checkpoint: Checkpoint, tmp_path: Path) -> None:
    files = []
    for family in ("qwen3_5_moe_mtp", "qwen3_5_moe"):
        (tmp_path / family).mkdir()
        files.append(converted(checkpoint(family), tmp_path / family, method="rtn", bits=4, group_size=32))
    found, plain = (file.metadata for file in files)
    assert found.bytes_per_token() == plain.bytes_per_token() and found.idle_bytes() == plain.idle_bytes() > 0
    codecs = {part: found.linears[f"draft.layers.0.{part}"].weights[0].codec for part in ("experts.5.down", "router")}
    assert codecs["experts.5.down"] == found.linears["layers.0.experts.5.down"].weights[0].codec
    assert codecs["router"].kind in ("f32", "f16", "bf16")
    with Model.load(files[0].path, target="reference", draft_layer=True, context=96) as model:
        texts = [
            model.generate(list(range(2, 30)), max_tokens=8, ignore_eos=True, draft=draft, gamma=2) for draft in ("off", "mtp")
        ]
        assert texts[0].text() == texts[1].text() and texts[0].tokens == texts[1].tokens
        assert sum(texts[1].measurement.speculation.drafted) > 0


def test_it_drafts_the_tokens_that_texts_have_most(checkpoint: Checkpoint) -> None:
    """From the first on, and whole blocks of those that end a turn or have a meaning of their own."""
    folder = str(checkpoint("qwen3_5_mtp"))
    text = preflight(folder, ConvertOptions(method="rtn")).text
    tokenizer = Tokenizer.from_str(text.blobs["tokenizer.json"].decode())
    tokenizer.add_special_tokens(["<|turn|>"])
    (end,) = tokenizer.encode("<|turn|>", add_special_tokens=False).ids
    tokens = [f"<|{i}|>" for i in range(3000)]
    tokenizer.add_special_tokens(tokens)
    last, blobs = tokenizer.get_vocab_size(), {"tokenizer.json": tokenizer.to_str().encode(), "chat_template": b"x <|2990|>"}
    some = TextAssets(blobs, {"eos_token_ids": [end]})
    begin, first, *bounds = drafted_tokens(some, last, 1000)
    assert (begin, first) == (0, 1008) and all(bound % 16 == 0 or bound == last for bound in bounds)
    runs = [range(*run) for run in zip(bounds[::2], bounds[1::2], strict=True)]
    assert all(
        any(token in run for run in runs) for token in (end, *tokenizer.encode("<|2990|>", add_special_tokens=False).ids)
    )
    # Of 3,000 tokens no more than one for sixteen of the others.
    assert sum(map(len, runs)) <= 1008 // 16 and len(runs) <= 15
    assert drafted_tokens(some, last, 0) == drafted_tokens(some, last, last) == drafted_tokens(some, last, None) == ()
    assert drafted_tokens(some, 1 << 16, None)[:2] == (0, 1 << 15)


def test_how_many_it_drafts_is_asked_for_where_there_is_such_a_layer(checkpoint: Checkpoint) -> None:
    found = preflight(str(checkpoint("qwen3_5_mtp")), ConvertOptions(method="rtn", draft_head=512)).stored_config
    assert found.draft_tokens[:2] == (0, 512) and ModelConfig.from_json(found.to_json()) == found
    with pytest.raises(InputError, match="--draft-head: the checkpoint has no layer that drafts"):
        preflight(str(checkpoint("qwen3_5")), ConvertOptions(method="rtn", draft_head=512))
    with pytest.raises(InputError, match="--draft-head -1: choose 0 to"):
        ConvertOptions(draft_head=-1)


@pytest.mark.parametrize(
    "keys",
    [{"mtp_num_hidden_layers": 2}, {"mtp_use_dedicated_embeddings": True}, {"mtp_hidden_states_first": True}],
)
def test_one_of_another_form_is_left_out(checkpoint: Checkpoint, tmp_path: Path, keys: dict[str, Any]) -> None:
    folder = tmp_path / "other"
    shutil.copytree(checkpoint("qwen3_5_mtp"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | keys))
    assert preflight(str(folder), ConvertOptions(method="rtn", group_size=32)).stored_config.draft_layers == 0


def test_a_checkpoint_that_lost_its_tensors_is_converted_without(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = tmp_path / "lost"
    shutil.copytree(checkpoint("qwen3_5"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"mtp_num_hidden_layers": 1}))
    file = converted(folder, tmp_path, method="rtn", group_size=32)
    assert file.metadata.config.draft_layers == 0 and file.metadata.draft_bytes() == 0
    assert "draft_layers" not in file.metadata.config.to_json() and "draft" not in file.metadata.provenance


def test_one_that_is_not_whole_is_refused_by_tensor(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = tmp_path / "part"
    shutil.copytree(checkpoint("qwen3_5_mtp"), folder)
    tensors = load_file(folder / "model.safetensors")
    for name, change in (("mtp.norm.weight", None), ("mtp.fc.weight", tensors["mtp.fc.weight"][:, 1:].contiguous())):
        changed = {key: tensor for key, tensor in tensors.items() if key != name} | ({} if change is None else {name: change})
        save_file(changed, folder / "model.safetensors")
        with pytest.raises(CheckpointError, match=name):
            preflight(str(folder), ConvertOptions(method="rtn"))


def test_beside_other_networks_a_file_with_it_is_refused(checkpoint: Checkpoint) -> None:
    config = preflight(str(checkpoint("qwen3_5_mtp")), ConvertOptions(method="rtn")).stored_config
    with pytest.raises(FormatError, match="draft_layers is 2"):
        replace(config, draft_layers=2)
    with pytest.raises(UnsupportedError, match="draft_layers are supported with"):
        replace(config, sliding_windows=(16,) * config.num_hidden_layers)
