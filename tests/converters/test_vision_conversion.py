"""A checkpoint with a vision tower: every spelling of its keys and tensors, what is rounded and how, and refusals."""

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
from vision_checkpoints import build

from edgeq.codec import Codec
from edgeq.container import ModelFile
from edgeq.converters.checkpoint import Checkpoint, read_json
from edgeq.converters.convert import ConvertOptions, convert, preflight
from edgeq.converters.families import EMBEDDING, recognise
from edgeq.errors import CheckpointError, InputError, UnsupportedError


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("padded"), "padded")


def silent(*_: object) -> None:
    pass


def made(source: Path, output: Path, **options: Any) -> ModelFile:
    return convert(str(source), output, ConvertOptions(**options), silent)


def edited(folder: Path, source: Path, edit: Callable[[dict[str, Any]], None], file: str = "config.json") -> Path:
    shutil.copytree(source, folder)
    values = json.loads((folder / file).read_text())
    edit(values)
    (folder / file).write_text(json.dumps(values))
    return folder


def flat(values: dict[str, Any]) -> None:
    """As Qwen2-VL's config.json on the hub is."""
    text = values.pop("text_config")
    rope = text.pop("rope_parameters")
    text |= {"rope_theta": rope["rope_theta"], "rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]}}
    values |= {key: value for key, value in text.items() if key not in ("model_type", "tie_word_embeddings", "layer_types")}
    values["vision_config"] |= {"in_chans": 3, "spatial_patch_size": values["vision_config"]["patch_size"]}
    del values["vision_config"]["rope_parameters"]


def test_every_spelling_of_keys_and_tensors_gives_the_same_segments(source: Path, tmp_path: Path) -> None:
    nested = made(source, tmp_path / "nested.edgeq")
    spelled = edited(tmp_path / "flat", source, flat)
    tensors = load_file(spelled / "model.safetensors")
    renamed = {
        name.replace("visual.", "model.visual.", 1) if name.startswith("visual.") else
        name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name: tensor
        for name, tensor in tensors.items()
    }  # fmt: skip
    save_file(renamed, spelled / "model.safetensors", {"format": "pt"})
    other = made(spelled, tmp_path / "flat.edgeq")
    assert other.metadata.config == nested.metadata.config
    assert [s.digest for s in other.segments] == [s.digest for s in nested.segments]
    renamed["visual.merger.ln_q.weight"] = torch.zeros(120)
    save_file(renamed, spelled / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"visual\.merger\.ln_q\.weight under two names"):
        made(spelled, tmp_path / "twice.edgeq")


def test_the_tower_has_8_bits_unless_options_say_otherwise(source: Path, tmp_path: Path) -> None:
    files = {
        (8, "a8"): made(source, tmp_path / "a.edgeq", bits=4),
        (4, "a16"): made(source, tmp_path / "b.edgeq", bits=4, vision_bits=4, vision_activation_bits=16),
        (0, None): made(source, tmp_path / "c.edgeq", bits=4, vision_bits=16),
    }
    for (bits, mode), file in files.items():
        linears = file.metadata.linears
        towers = {name: x.weights[0].codec for name, x in linears.items() if name.startswith("vision.")}
        assert {"vision.patch", "vision.layers.2.qkv", "vision.layers.0.up", "vision.project.0", "vision.project.1"} < set(
            towers
        )
        assert {codec.bits for codec in towers.values()} == {bits} and file.metadata.vision_mode == mode
        assert linears["layers.0.qkv"].weights[0].codec.bits == 4 and file.metadata.default_mode == "a16"
        assert bits or {codec.kind for codec in towers.values()} == {"f32"}
    sizes = [file.metadata.bytes_per_token() for file in files.values()]
    assert sizes[0] == sizes[1] == sizes[2]
    written = files[4, "a16"].metadata.provenance["vision"]
    assert isinstance(written, dict) and written["bits"] == 4


def test_without_a_method_every_tensor_of_the_tower_is_exact(source: Path, tmp_path: Path) -> None:
    file, tensors = made(source, tmp_path / "m.edgeq", method="none"), load_file(source / "model.safetensors")
    matrix = file.array(file.metadata.linears["vision.layers.1.qkv"].weights[0].q)
    stored = matrix.transpose(0, 2, 1).reshape(-1, 120)[:360]
    assert np.array_equal(stored, tensors["visual.blocks.1.attn.qkv.weight"].numpy())
    patch = file.array(file.metadata.linears["vision.patch"].weights[0].q).transpose(0, 2, 1).reshape(-1, 216)[:120]
    assert np.array_equal(patch, tensors["visual.patch_embed.proj.weight"].flatten(1).numpy())
    assert file.metadata.linears["vision.patch"].weights[0].codec == Codec("f32")
    bias = file.metadata.linears["vision.layers.1.qkv"].bias
    assert bias and np.array_equal(file.array(bias), tensors["visual.blocks.1.attn.qkv.bias"].numpy())


def test_a_rotated_decoder_reads_rotated_features(source: Path) -> None:
    """Inner products of features with embeddings are what they were."""
    plan = preflight(str(source), ConvertOptions(method="quarot", kv_bits=16))
    checkpoint, tower = plan.checkpoint, plan.method.config.vision
    assert tower
    rotated = plan.method.tensors(checkpoint, {})
    inner = np.random.default_rng(0).standard_normal(tower.project_size).astype(np.float32)

    def product(tensors: Any) -> Any:
        features = tensors.whole("vision.project.1.weight") @ inner + tensors.whole("vision.project.1.bias")
        return tensors.whole(EMBEDDING) @ features

    assert np.allclose(product(rotated), product(checkpoint), atol=1e-4)
    assert not np.allclose(rotated.whole("vision.project.1.bias"), checkpoint.whole("vision.project.1.bias"))
    name = "vision.layers.0.mlp.up_proj.weight"
    assert np.array_equal(rotated.rows(name, 3, 5), checkpoint.rows(name, 3, 5))


class Interrupted(Exception):
    pass


def test_interrupted_in_the_tower_it_goes_on_to_the_same_bytes(source: Path, tmp_path: Path) -> None:
    whole = made(source, tmp_path / "whole.edgeq").path.read_bytes()

    def stop(done: float, total: float, label: str) -> None:
        if label == "vision layer 2 of 3":
            raise Interrupted

    with pytest.raises(Interrupted):
        convert(str(source), tmp_path / "m.edgeq", ConvertOptions(), stop)
    assert made(source, tmp_path / "m.edgeq").path.read_bytes() == whole


def nested(key: str, **values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda config: config[key].update(values)


REFUSED: dict[str, tuple[Callable[[dict[str, Any]], Any], type[Exception], str]] = {
    "no tower": (lambda c: c.pop("vision_config"), CheckpointError, "config.json: vision_config is None"),
    "no name of a rope": (
        nested("text_config", rope_parameters={"rope_type": ["mrope"], "mrope_section": [2, 4, 6]}),
        UnsupportedError,
        "rope kind .*mrope.* is not supported with mrope_section",
    ),
    "no sections": (nested("text_config", rope_parameters={"rope_type": "default"}), CheckpointError, "with mrope_section"),
    "stretched": (
        nested("text_config", rope_parameters={"rope_type": "yarn", "mrope_section": [2, 4, 6]}),
        UnsupportedError,
        "rope kind 'yarn' is not supported with mrope_section",
    ),
    "sections of another head": (
        nested("text_config", rope_parameters={"mrope_section": [2, 4, 4]}), CheckpointError, "add up to 12"
    ),
    "grey pictures": (nested("vision_config", in_channels=1), UnsupportedError, "in_channels is 1"),
    "heads that do not divide": (nested("vision_config", num_heads=7), CheckpointError, "multiple of 4 times num_heads"),
    "a tower without end": (nested("vision_config", depth=2**40), CheckpointError, "depth is 1099511627776"),
    "a size as text": (nested("vision_config", patch_size="14"), CheckpointError, "patch_size is '14'"),
    "another width": (nested("vision_config", hidden_size=64), CheckpointError, "gives 64 channels; hidden_size is 72"),
    "a token that is not there": (lambda c: c.update(image_token_id=5000), CheckpointError, "image_token_id is 5000 of 2052"),
    "another merge": (nested("vision_config", spatial_merge_size=3), UnsupportedError, "merge_size 2"),
}  # fmt: skip


WINDOWED = {"hidden_size": 96, "num_heads": 4, "intermediate_size": 84, "out_hidden_size": 72, "depth": 3, "patch_size": 6}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"window_size": 11}, "window_size is 11; expected that of a merged patch"),
        ({"fullatt_block_indexes": [3]}, "fullatt_block_indexes is .3.; expected numbers from 0 to 2"),
        ({"fullatt_block_indexes": 1}, "fullatt_block_indexes is 1"),
        ({"depth": 1 << 19, "fullatt_block_indexes": []}, "num_hidden_layers is 524288"),
    ],
)
def test_windows_that_are_not_possible_are_named(source: Path, keys: dict[str, Any], message: str) -> None:
    config, preprocessor = read_json(source / "config.json"), read_json(source / "preprocessor_config.json")
    config["architectures"], given = ["Qwen2_5_VLForConditionalGeneration"], {"fullatt_block_indexes": [1], "window_size": 24}
    config["vision_config"] = {**WINDOWED, **given}
    found = recognise(config, preprocessor)[1].vision
    assert found and (found.window_size, found.window_layers, found.gated, found.layer_norm) == (2, (0, 2), True, False)
    config["vision_config"] |= keys
    with pytest.raises(CheckpointError, match=message):
        recognise(config, preprocessor)


@pytest.mark.parametrize(("edit", "kind", "message"), REFUSED.values(), ids=REFUSED)
def test_keys_that_are_not_supported_are_named(
    source: Path, edit: Callable[[dict[str, Any]], Any], kind: type[Exception], message: str
) -> None:
    config = read_json(source / "config.json")
    edit(config)
    with pytest.raises(kind, match=message):
        recognise(config, read_json(source / "preprocessor_config.json"))


def test_settings_of_pictures_may_lie_in_the_processors(source: Path, tmp_path: Path) -> None:
    moved = edited(tmp_path / "moved", source, lambda values: None)
    inner = json.loads((moved / "preprocessor_config.json").read_text())
    (moved / "preprocessor_config.json").unlink()
    with pytest.raises(CheckpointError, match="has no preprocessor_config.json"):
        preflight(str(moved), ConvertOptions())
    (moved / "processor_config.json").write_text(json.dumps({"image_processor": inner}))
    assert preflight(str(moved), ConvertOptions()).method.config.vision


def test_weights_as_they_are_have_no_rounded_inputs(source: Path) -> None:
    with pytest.raises(InputError, match="--vision-bits 16/8.*choose 16"):
        preflight(str(source), ConvertOptions(vision_bits=16, vision_activation_bits=8))


def test_bits_of_a_tower_that_is_not_there(checkpoint: Callable[..., Path]) -> None:
    with pytest.raises(InputError, match="--vision-bits: LlamaForCausalLM reads text alone"):
        preflight(str(checkpoint("llama_gqa")), ConvertOptions(vision_bits=8))
    with pytest.raises(InputError, match=r"a vision tower of 1 bits: not supported"):
        ConvertOptions(vision_bits=1)


def test_sources_are_named_by_the_checkpoints_own_names(source: Path, tmp_path: Path) -> None:
    short = edited(tmp_path / "short", source, lambda values: None)
    tensors = load_file(short / "model.safetensors")
    del tensors["visual.blocks.0.attn.qkv.bias"]
    save_file(tensors, short / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"visual\.blocks\.0\.attn\.qkv\.bias is missing"):
        preflight(str(short), ConvertOptions())
    assert isinstance(preflight(str(source), ConvertOptions()).checkpoint, Checkpoint)
