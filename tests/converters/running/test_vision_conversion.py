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

from edgeq.converters.checkpoint.checkpoint import Checkpoint
from edgeq.converters.convert import ConvertOptions, convert, preflight
from edgeq.converters.families import EMBEDDING, recognise
from edgeq.errors import CheckpointError, InputError, UnsupportedError
from edgeq.format.codec import Codec
from edgeq.format.container import ModelFile
from edgeq.format.safetensors import read_json
from tests.checkpoints.vision import build


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
    matrix = file.array(file.metadata.linears["vision.layers.1.qkv"].weights[0].arrays["q"])
    stored = matrix.transpose(0, 2, 1).reshape(-1, 120)[:360]
    assert np.array_equal(stored, tensors["visual.blocks.1.attn.qkv.weight"].numpy())
    patch = file.array(file.metadata.linears["vision.patch"].weights[0].arrays["q"]).transpose(0, 2, 1).reshape(-1, 216)[:120]
    assert np.array_equal(patch, tensors["visual.patch_embed.proj.weight"].flatten(1).numpy())
    assert file.metadata.linears["vision.patch"].weights[0].codec == Codec("f32")
    bias = file.metadata.linears["vision.layers.1.qkv"].bias
    assert bias and np.array_equal(file.array(bias), tensors["visual.blocks.1.attn.qkv.bias"].numpy())


@pytest.mark.parametrize("projector", ["vision.", "vision.taps.0.", "vision.taps.1."])
def test_a_rotated_decoder_reads_rotated_features(taps: Path, projector: str) -> None:
    """Inner products of features, and of what taps add, with embeddings are what they were."""
    plan = preflight(str(taps), ConvertOptions(method="quarot", kv_bits=16))
    checkpoint, tower = plan.checkpoint, plan.method.config.vision
    assert tower
    rotated = plan.method.tensors(checkpoint, {})
    inner = np.random.default_rng(0).standard_normal(tower.project_size).astype(np.float32)

    def product(tensors: Any) -> Any:
        features = tensors.whole(f"{projector}project.1.weight") @ inner + tensors.whole(f"{projector}project.1.bias")
        return tensors.whole(EMBEDDING) @ features

    assert np.allclose(product(rotated), product(checkpoint), atol=1e-4)
    bias = f"{projector}project.1.bias"
    assert not np.allclose(rotated.whole(bias), checkpoint.whole(bias))
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


def changed(source: Path, **keys: Any) -> Any:
    """The configuration with `keys` changed, vision_config__hidden_size within its object."""
    config = read_json(source / "config.json")
    for key, value in keys.items():
        owner, _, name = key.rpartition("__")
        (config[owner] if owner else config)[name] = value
    return recognise(config, read_json(source / "preprocessor_config.json"))[1]


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("clip"), "clip_llama")


@pytest.fixture(scope="module")
def taps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("taps"), "taps")


SPELLED = {
    "transformers 4.40": {
        "language_model.": "language_model.",
        "vision_tower.": "vision_tower.vision_model.",
        "multi_modal_projector.": "multi_modal_projector.",
    },
    "in memory": {
        "language_model.model.": "model.language_model.",
        "language_model.lm_head.": "lm_head.",
        "vision_tower.": "model.vision_tower.",
        "multi_modal_projector.": "model.multi_modal_projector.",
    },
}


@pytest.mark.parametrize("spelling", SPELLED.values(), ids=SPELLED)
def test_a_llava_of_every_version_gives_the_same_segments(clip: Path, tmp_path: Path, spelling: dict[str, str]) -> None:
    first = made(clip, tmp_path / "first.edgeq")
    other = edited(tmp_path / "other", clip, lambda values: None)
    renamed = {"vision_tower.vision_model.embeddings.position_ids": torch.arange(17)[None]}
    for name, tensor in load_file(clip / "model.safetensors").items():
        begin = next(each for each in spelling if name.startswith(each))
        renamed[spelling[begin] + name.removeprefix(begin)] = tensor
    save_file(renamed, other / "model.safetensors", {"format": "pt"})
    second = made(other, tmp_path / "second.edgeq")
    assert second.metadata.config == first.metadata.config
    assert [s.digest for s in second.segments] == [s.digest for s in first.segments]


def test_the_class_row_is_in_the_first_position(clip: Path, tmp_path: Path) -> None:
    file, tensors = made(clip, tmp_path / "m.edgeq", method="none"), load_file(clip / "model.safetensors")
    expected = tensors["vision_tower.embeddings.position_embedding.weight"].clone()
    expected[0] += tensors["vision_tower.embeddings.class_embedding"]
    ref = file.metadata.arrays["vision.positions"]
    assert ref.dtype == "f32" and np.array_equal(file.array(ref), expected.numpy())
    vision = file.metadata.config.vision
    assert vision and (vision.num_hidden_layers, vision.class_row, vision.merge) == (2, True, 1)


def test_a_llava_takes_what_its_classes_default_to(clip: Path) -> None:
    """Published files leave out what is as in LlamaConfig or CLIPVisionConfig."""
    config = read_json(clip / "config.json")
    text = {"model_type": "llama", "vocab_size": 32064, "rms_norm_eps": 1e-5, "max_position_embeddings": 4096}
    vision = {"hidden_size": 1024, "image_size": 336, "intermediate_size": 4096, "model_type": "clip_vision_model"}
    vision |= {"num_attention_heads": 16, "num_hidden_layers": 24, "patch_size": 14, "projection_dim": 768}
    config |= {"text_config": text, "vision_config": vision}
    for key in ("vision_feature_layer", "vision_feature_select_strategy", "projector_hidden_act", "multimodal_projector_bias"):
        del config[key]
    processor = {"feature_extractor_type": "CLIPFeatureExtractor", "crop_size": 336, "size": 336}
    found = recognise(config, processor)[1]
    assert (found.hidden_size, found.intermediate_size, found.num_hidden_layers, found.head_dim) == (4096, 11008, 32, 128)
    assert found.vision and (found.vision.num_hidden_layers, found.vision.position_rows) == (23, 577)
    assert found.vision.most_tokens == 576


@pytest.mark.parametrize(
    ("keys", "kind", "message"),
    [
        ({"text_config": None}, CheckpointError, "text_config is None; expected an object"),
        ({"text_config__model_type": "gemma"}, UnsupportedError, "model_type 'gemma' is not supported; supported: llama"),
        ({"vision_config__model_type": "dinov2"}, UnsupportedError, "model_type 'dinov2' .* clip_vision_model, siglip"),
        ({"vision_feature_layer": [-2, -1]}, UnsupportedError, "several layers; supported: one"),
        ({"vision_feature_layer": 7}, CheckpointError, "vision_feature_layer is 7; expected a layer of 3"),
        ({"vision_feature_select_strategy": "cls"}, UnsupportedError, "strategy is 'cls'; supported: default, full"),
        ({"multimodal_projector_bias": False}, UnsupportedError, "multimodal_projector_bias is False"),
        ({"projector_hidden_act": "silu"}, UnsupportedError, "project_act 'silu'"),
        ({"vision_config__image_size": 30}, CheckpointError, "position_rows is 26; expected 17"),
        ({"vision_config__num_attention_heads": 3}, CheckpointError, "not a multiple of twice num_attention_heads 3"),
        ({"vision_config__model_type": "siglip_vision_model"}, UnsupportedError, "leaves out the first patch"),
        ({"vision_config__hidden_size": "1024"}, CheckpointError, "hidden_size is 1024; expected an integer"),
        ({"image_token_index": 9999}, CheckpointError, "image_token_id is 9999 of 2052"),
    ],
)
def test_what_a_llava_cannot_have_is_named(clip: Path, keys: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        changed(clip, **keys)


@pytest.mark.parametrize(
    ("keys", "kind", "message"),
    [
        ({"vision_config__deepstack_visual_indexes": [2, 0]}, CheckpointError, "expected ascending numbers from 0 to 2"),
        ({"vision_config__deepstack_visual_indexes": 1}, CheckpointError, "deepstack_visual_indexes is 1"),
        ({"vision_config__num_position_embeddings": 24}, CheckpointError, "position_rows is 24; expected a square"),
        ({"text_config__num_hidden_layers": 1}, CheckpointError, "2 tap_layers for 1 layers"),
        ({"text_config__attention_bias": True}, UnsupportedError, "attention_bias is True"),
        (
            {"text_config__rope_parameters": {"mrope_section": [6, 3, 3], "mrope_interleaved": False}},
            UnsupportedError,
            "mrope_interleaved is False; supported: True",
        ),
        ({"text_config__rope_parameters": {"mrope_section": [2, 5, 5]}}, CheckpointError, "take every third pair"),
    ],
)
def test_what_a_qwen3_vl_cannot_have_is_named(taps: Path, keys: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        changed(taps, **keys)


@pytest.fixture(scope="module")
def aspect(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("aspect"), "aspect")


@pytest.mark.parametrize(
    ("keys", "kind", "message"),
    [
        ({"text_config": 3}, CheckpointError, "text_config is 3; expected an object"),
        (
            {"text_config__model_type": "qwen3_moe"},
            UnsupportedError,
            "model_type 'qwen3_moe' is not supported",
        ),
        ({"downsample_ratio": 0.3}, UnsupportedError, "downsample_ratio is 0.3; supported: 1, 1 / 2 and 1 / 4"),
        ({"downsample_ratio": True}, UnsupportedError, "downsample_ratio is True"),
        ({"downsample_ratio": 1 / 3}, UnsupportedError, "downsample_ratio is 0.333"),
        ({"vision_feature_select_strategy": "full"}, UnsupportedError, "joins the class row with patches"),
        ({"vision_config__norm_type": "batch_norm"}, UnsupportedError, "norm_type is 'batch_norm'; supported: layer_norm"),
        ({"vision_config__norm_type": []}, UnsupportedError, "norm_type is .*; supported: layer_norm, rms_norm"),
        ({"vision_config__use_qk_norm": True}, UnsupportedError, "layer_norm_eps 0.03 with use_qk_norm"),
        ({"vision_config__use_qk_norm": "no"}, CheckpointError, "use_qk_norm is 'no'; expected true or false"),
        ({"vision_config__attention_bias": 1}, CheckpointError, "attention_bias is 1; expected true or false"),
        ({"vision_config__image_size": [24, 30]}, UnsupportedError, "two equal numbers"),
        ({"vision_config__image_size": [30, 30]}, UnsupportedError, "does not divide a side of 5 patches"),
        ({"vision_config__patch_size": [None, None]}, CheckpointError, "patch_size is None; expected an integer"),
        ({"vision_config__image_size": 36}, CheckpointError, "position_rows is 37; expected 17"),
        ({"vision_config__use_mean_pooling": False}, UnsupportedError, "use_mean_pooling is False"),
        ({"vision_config__use_absolute_position_embeddings": False}, UnsupportedError, "use_absolute_position_embeddings"),
    ],
)
def test_what_an_internvl_cannot_have_is_named(aspect: Path, keys: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        changed(aspect, **keys)


def test_what_a_layer_of_an_internvl_adds_has_its_factors_in_its_rows(aspect: Path, tmp_path: Path) -> None:
    """And the bias of the patches is in their positions, that of the class row in its own."""
    file, tensors = made(aspect, tmp_path / "m.edgeq", method="none", dtype="f32"), load_file(aspect / "model.safetensors")
    stored = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    layer, embeddings = "vision_tower.encoder.layer.1.", "vision_tower.embeddings."
    for ours, theirs, scale in (("o", "attention.projection_layer", "lambda_1"), ("down", "mlp.fc2", "lambda_2")):
        wanted = stored[f"{layer}{theirs}.bias"] * stored[f"{layer}{scale}"]
        bias = file.metadata.linears[f"vision.layers.1.{ours}"].bias
        assert bias and np.array_equal(file.array(bias), wanted.numpy())
    table = file.array(file.metadata.arrays["vision.positions"])
    positions = stored[f"{embeddings}position_embeddings"][0]
    assert np.array_equal(table[0], (positions[0] + stored[f"{embeddings}cls_token"][0, 0]).numpy())
    # The first patch of the second row is joined with those of the first.
    wanted = positions[1 + 4] + stored[f"{embeddings}patch_embeddings.projection.bias"]
    assert np.array_equal(table[1 + 2], wanted.numpy())


@pytest.fixture(scope="module")
def naflex(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("naflex"), "naflex")


@pytest.mark.parametrize(
    ("keys", "kind", "message"),
    [
        ({"text_config": 3}, CheckpointError, "text_config is 3; expected an object"),
        ({"text_config__model_type": "lfm2_moe"}, UnsupportedError, "text_config: model_type 'lfm2_moe' is not supported"),
        ({"vision_config__model_type": "clip_vision_model"}, UnsupportedError, "supported: siglip2_vision_model"),
        ({"vision_config__num_patches": 24}, CheckpointError, "num_patches is 24; expected a square"),
        ({"vision_config__num_channels": 1}, UnsupportedError, "num_channels is 1"),
        ({"downsample_factor": 5}, CheckpointError, "downsample_factor is 5; expected an integer from 1 to 4"),
        ({"downsample_factor": 1}, UnsupportedError, "downsample_factor 2 is not supported; only 1 is"),
        ({"projector_hidden_size": "80"}, CheckpointError, "projector_hidden_size is 80; expected an integer"),
        ({"projector_bias": 1}, CheckpointError, "projector_bias is 1; expected true or false"),
        ({"projector_use_layernorm": None}, CheckpointError, "projector_use_layernorm is None"),
        ({"vision_feature_layer": -2}, UnsupportedError, "vision_feature_layer is -2"),
        ({"use_image_special_tokens": False}, UnsupportedError, "use_image_special_tokens is False"),
    ],
)
def test_what_an_lfm2_vl_cannot_have_is_named(naflex: Path, keys: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        changed(naflex, **keys)


def test_colours_of_a_pixel_of_an_lfm2_vl_are_neighbours_in_its_matrix(naflex: Path, tmp_path: Path) -> None:
    file, tensors = made(naflex, tmp_path / "m.edgeq", method="none", dtype="f32"), load_file(naflex / "model.safetensors")
    stored = next(tensor for name, tensor in tensors.items() if name.endswith("embeddings.patch_embedding.weight"))
    patch = file.array(file.metadata.linears["vision.patch"].weights[0].arrays["q"]).transpose(0, 2, 1).reshape(-1, 108)[:96]
    assert np.array_equal(patch.reshape(96, 3, 6, 6), stored.numpy().reshape(96, 6, 6, 3).transpose(0, 3, 1, 2))


@pytest.mark.parametrize(
    ("architecture", "words"),
    [
        ("LlavaNextForConditionalGeneration", "cuts pictures into tiles in a way of its own; supported instead: LLaVA-1.5"),
        ("Qwen3VLMoeForConditionalGeneration", "experts beside a vision tower; supported instead: Qwen3-VL without experts"),
        ("InternVLChatModel", "runs by code of its own; convert the checkpoint of the same model whose name ends in -HF"),
        ("LlavaLlamaForCausalLM", "does not carry its vision tower; convert the llava-hf checkpoint"),
    ],
)
def test_architectures_near_a_supported_one_say_what_to_do(architecture: str, words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        recognise({"architectures": [architecture]}, None)


def test_the_chat_template_may_lie_beside_the_tokenizer(clip: Path, tmp_path: Path) -> None:
    """Processors kept it in chat_template.json before transformers 5."""
    other = edited(tmp_path / "other", clip, lambda values: None)
    template = (other / "chat_template.jinja").read_text()
    (other / "chat_template.jinja").unlink()
    assert "chat_template" not in preflight(str(other), ConvertOptions()).text.blobs
    (other / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    assert preflight(str(other), ConvertOptions()).text.blobs["chat_template"] == template.encode()
