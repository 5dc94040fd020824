"""Vision towers in GGUF files of their own: the checkpoint that they were made of, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray
from PIL import Image

from edgeq.converters.checkpoint.download import HubAccess
from edgeq.converters.convert import carry_out
from edgeq.converters.importers import open_source
from edgeq.converters.planning.options import ConvertOptions
from edgeq.converters.planning.plan import ConversionPlan
from edgeq.converters.planning.preflight import planned
from edgeq.errors import CheckpointError, EdgeqError, InputError, UnsupportedError
from edgeq.network.config import VisionConfig
from edgeq.pictures.image import Picture
from edgeq.pictures.prompt import with_pictures
from edgeq.runtime.model import Model
from edgeq.text.chat_template import ChatTemplate
from edgeq.text.tokenizer import Tokenizer
from tests.checkpoints.vision import END, IMAGE, START, build
from tests.converters.importers.conversions import plan_of, silent
from tests.converters.importers.gguf_files import in_type
from tests.converters.importers.mmproj_files import Keys, Tensors, write_mmproj, write_pair

MODELS = {
    "head80": "Qwen2VLForConditionalGeneration",
    "windows": "Qwen2_5_VLForConditionalGeneration",
    "taps": "Qwen3VLForConditionalGeneration",
    "clip_llama": "LlavaForConditionalGeneration",
    "siglip_qwen2": "LlavaForConditionalGeneration",
    "aspect": "InternVLForConditionalGeneration",
    "aspect_rms": "InternVLForConditionalGeneration",
    "averaged": "Gemma3ForConditionalGeneration",
    "tiles": "Idefics3ForConditionalGeneration",
    "states": "Qwen3_5ForConditionalGeneration",
    "states_experts": "Qwen3_5MoeForConditionalGeneration",
    "naflex_16": "Lfm2VlForConditionalGeneration",
    "gemma4_280": "Gemma4ForConditionalGeneration",
    "gemma4_whole_280": "Gemma4ForConditionalGeneration",
}
"""Names in tests/checkpoints/vision.py, and what they are."""
SAID: dict[str, dict[str, dict[str, Any]]] = {
    "aspect": {"": {"projector_hidden_act": "gelu", "vision_feature_layer": -1}, "vision_config": {"hidden_act": "gelu"}},
    "averaged": {"text_config": {"query_pre_attn_scalar": 24}},
    "tiles": {
        "": {"architectures": ["Idefics3ForConditionalGeneration"], "model_type": "idefics3"},
        "vision_config": {"hidden_act": "gelu_pytorch_tanh"},
    },
    "states": {"vision_config": {"hidden_act": "gelu_pytorch_tanh", "rope_parameters": None}},
    "naflex_16": {"": {"projector_hidden_act": "gelu"}, "vision_config": {"hidden_act": "gelu_pytorch_tanh"}},
    "gemma4_280": {
        "text_config": {"use_bidirectional_attention": "vision"},
        "vision_config": {"rope_parameters": None},
    },
    "gemma4_whole_280": {"vision_config": {"hidden_activation": "gelu_pytorch_tanh"}},
}
"""Object of config.json, "" the whole -> settings that llama.cpp's files can say, of checkpoints that have others."""
UNSAID = ("max_soft_tokens", "tile_size", "max_tiles", "min_image_tokens", "max_image_tokens", "max_pixels_tolerance")
"""Keys of preprocessor_config.json that such files have none for: what comes of them is as in published checkpoints."""
Folder = Callable[[str], Path]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """A checkpoint, built when a test first asks for it."""
    built: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in built:
            built[name] = build(tmp_path_factory.mktemp(name), name)
            path = built[name] / "config.json"
            config = json.loads(path.read_text())
            for part, settings in SAID.get(name, {}).items():
                (config[part] if part else config).update(settings)
            path.write_text(json.dumps(config))
            path = built[name] / "preprocessor_config.json"
            processor = json.loads(path.read_text())
            path.write_text(json.dumps({key: value for key, value in processor.items() if key not in UNSAID}))
        return built[name]

    return get


def plan_with(model: Path, mmproj: Path | None, **options: Any) -> ConversionPlan:
    return planned(open_source(str(model), HubAccess(), mmproj=mmproj), ConvertOptions(**options))


def pair(folder: Path, place: Path, **settings: Any) -> tuple[Path, Path]:
    place.mkdir(exist_ok=True)
    paths = place / "m.gguf", place / "mmproj.gguf"
    write_pair(folder, *paths, **settings)
    return paths


LATER = ("aspect_rms", "tiles", "states", "gemma4_whole_280")
"""What is left to the exhaustive run."""
FLOATS = [pytest.param(name, marks=pytest.mark.exhaustive if name in LATER else ()) for name in MODELS]


@pytest.mark.parametrize("name", FLOATS)
def test_a_pair_of_floats_is_the_checkpoint_that_it_was_made_of(folder: Folder, tmp_path: Path, name: str) -> None:
    wanted, found = plan_of(folder(name), method="none"), plan_with(*pair(folder(name), tmp_path), method="none")
    assert found.method.family.architecture == MODELS[name] and found.method.config == wanted.method.config
    assert found.method.family.tower and wanted.method.family.tower
    shapes = wanted.method.family.tensor_shapes() | wanted.method.family.tower.tensor_shapes()
    for tensor, shape in shapes.items():
        expected, values = (plan.checkpoint.rows(tensor, 0, shape[0]) for plan in (wanted, found))
        # The decay of a delta net is a logarithm of what the file has.
        np.testing.assert_allclose(values, expected, rtol=1e-6 * tensor.endswith("decay.weight"), err_msg=tensor)
    # Rows that begin and end inside a patch embedding.
    assert np.array_equal(*(plan.checkpoint.rows("vision.patch.weight", 5, 41) for plan in (wanted, found)))


def logits(plan: ConversionPlan, path: Path, pictures: list[Picture]) -> NDArray[np.float32]:
    """After a picture and a text; the first file's own processor makes the pixels of `pictures`."""
    file = carry_out(plan, path, silent).file
    with Model.load(file.path, target="reference", threads=1) as model:
        vision = file.metadata.config.vision
        assert vision
        if not pictures:
            pixels = np.random.default_rng(3).integers(0, 256, (30, 45, 3), np.uint8)
            pictures.append(model.read_image(Image.fromarray(pixels)))
        tokens, encode = [5, 9, START, IMAGE, END, 2, 30], model.text.encode_part
        return model.session().prefill(with_pictures(tokens, pictures, vision, encode))


SLOW = [pytest.param(name, marks=pytest.mark.exhaustive) for name in MODELS if name not in ("clip_llama", *LATER)]


@pytest.mark.parametrize("name", ["clip_llama", *SLOW])
def test_a_pair_sees_what_the_checkpoint_sees(folder: Folder, tmp_path: Path, name: str) -> None:
    wanted, found = plan_of(folder(name), method="none"), plan_with(*pair(folder(name), tmp_path), method="none")
    pictures = list[Picture]()
    seen = logits(found, tmp_path / "found.edgeq", pictures)
    assert np.abs(seen).max() > 0.1
    expected = logits(wanted, tmp_path / "wanted.edgeq", pictures)
    np.testing.assert_allclose(seen, expected, rtol=0, atol=1e-5 * name.startswith("states"))


def test_a_tower_for_audio_is_left_out(folder: Folder, tmp_path: Path) -> None:
    def hear(keys: Keys, tensors: Tensors) -> None:
        put(has_audio_encoder=True, audio__projector_type="gemma4a", audio__block_count=2)(keys, tensors)
        tensors |= {name: np.zeros((4, 4), np.float32) for name in ("a.blk.0.attn_q.weight", "mm.a.input_projection.weight")}

    deaf = plan_with(*pair(folder("gemma4_280"), tmp_path / "deaf"), method="none")
    hearing = plan_with(*pair(folder("gemma4_280"), tmp_path / "hearing", change=hear), method="none")
    assert hearing.method.config == deaf.method.config
    (note,) = set(hearing.notes()) - set(deaf.notes())
    assert note.endswith("left out: its audio tower")


TEXTS_ALONE = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"


def test_a_template_that_knows_no_pictures_is_given_them_as_the_familys_own_writes_them(folder: Folder, tmp_path: Path) -> None:
    def template_of(place: Path, **settings: Any) -> tuple[str, ChatTemplate]:
        model, mmproj = pair(folder("aspect"), place, **settings)
        source = open_source(str(model), HubAccess(), mmproj=mmproj)
        text = Tokenizer((source.texts / "tokenizer.json").read_bytes(), {})
        written = (source.texts / "chat_template.jinja").read_text()
        return written, ChatTemplate(written, text, sees=True)

    written, alone = template_of(tmp_path, change_model=lambda keys: keys.update({"tokenizer.chat_template": TEXTS_ALONE}))
    parts = [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "What?"}]
    turns = [{"role": "user", "content": parts}, {"role": "assistant", "content": "A."}, {"role": "user", "content": "Why?"}]
    asked = "<|im_start|>user\n<IMG_CONTEXT>\n<IMG_CONTEXT>\nWhat?<|im_end|>\n<|im_start|>assistant\nA.<|im_end|>\n"
    assert alone.render(turns) == f"{asked}<|im_start|>user\nWhy?<|im_end|>\n" and written.endswith(TEXTS_ALONE)
    typed = [{"role": "user", "content": "<IMG_CONTEXT>?"}]
    assert alone.encode_with_images(typed, 2, IMAGE).count(IMAGE) == 2
    own = (folder("aspect") / "chat_template.jinja").read_text().replace("<|image_pad|>", "<IMG_CONTEXT>")
    assert template_of(tmp_path)[0] == own


@pytest.mark.parametrize(("name", "family"), [("head80", "Qwen2ForCausalLM"), ("taps", "Qwen3ForCausalLM")])
def test_a_language_model_without_its_tower_reads_text(folder: Folder, tmp_path: Path, name: str, family: str) -> None:
    model, mmproj = pair(folder(name), tmp_path)
    seeing, alone = (plan_with(model, given, method="none") for given in (mmproj, None))
    config = seeing.method.config
    assert alone.method.family.architecture == family and alone.method.config.vision is None
    # All of a text has one position on all axes.
    rope = replace(config.rope, sections=(), interleaved=False)
    text = {"vision": None, "rope": rope, "model_type": alone.method.config.model_type}
    assert alone.method.config == replace(config, **text)
    for tensor, shape in alone.method.family.tensor_shapes().items():
        assert np.array_equal(*(plan.checkpoint.rows(tensor, 0, shape[0]) for plan in (seeing, alone))), tensor


def test_integers_of_a_tower_are_kept(folder: Folder, tmp_path: Path) -> None:
    def choose(name: str, values: NDArray[np.float32]) -> Type:
        return in_type(Type.Q8_0)(name, values) if values.shape[-1] % 32 == 0 and "position" not in name else Type.F32

    model, mmproj = pair(folder("head80"), tmp_path, choose=choose)
    plan = plan_with(model, mmproj)
    file = carry_out(plan, tmp_path / "m.edgeq", silent).file
    assert plan.method.name == "as-stored"
    codecs = {name: linear.weights[0].codec.name for name, linear in file.metadata.linears.items()}
    assert codecs["vision.layers.0.qkv"] == codecs["layers.0.qkv"] == "i8 g32" and codecs["vision.patch"] == "f32"
    origin = file.metadata.provenance["origin"]
    assert isinstance(origin, dict) and set(origin["types"]) == {"F32", "Q8_0"}
    assert mmproj in plan.checkpoint.files()


def test_matrices_that_have_each_others_names_are_told_by_their_shape(folder: Folder, tmp_path: Path) -> None:
    def swap(keys: Keys, tensors: Tensors) -> None:
        for name in [name for name in tensors if "ffn_up" in name]:
            other = name.replace("ffn_up", "ffn_down")
            tensors[name], tensors[other] = tensors[other], tensors[name]

    new = plan_with(*pair(folder("windows"), tmp_path / "new"), method="none")
    old = plan_with(*pair(folder("windows"), tmp_path / "old", change=swap), method="none")
    assert old.method.config == new.method.config
    for part in ("up", "down", "gate"):
        name = f"vision.layers.1.mlp.{part}_proj.weight"
        assert np.array_equal(old.checkpoint.whole(name), new.checkpoint.whole(name))


def test_layers_without_windows_are_a_period_or_a_list(folder: Folder, tmp_path: Path) -> None:
    def windows(**changes: Any) -> VisionConfig:
        found = plan_with(*pair(folder("windows"), tmp_path, change=put(**changes)), method="none").method.config.vision
        assert found
        return found

    for key in ("vision__wa_layer_indexes", "vision__fullatt_block_indexes"):
        assert windows(**{key: [0, 2]}, vision__n_wa_pattern=None).window_layers == (1,)
    with pytest.raises(CheckpointError, match=r"wa_layer_indexes is \[0\]; expected \[1\], as clip.vision.n_wa_pattern says"):
        windows(vision__wa_layer_indexes=[0])
    assert windows(vision__window_size=None).window_size == 112 // 12


def put(**changes: Any) -> Callable[[Keys, Tensors], None]:
    """Set keys of the tower, dots as two underscores; None: take it out."""

    def change(keys: Keys, tensors: Tensors) -> None:
        for name, value in changes.items():
            key = f"clip.{name.replace('__', '.')}"
            if value is None:
                del keys[key]
            else:
                keys[key] = value

    return change


def without(name: str) -> Callable[[Keys, Tensors], None]:
    def change(keys: Keys, tensors: Tensors) -> None:
        del tensors[name]

    return change


def tensor(name: str, *shape: int) -> Callable[[Keys, Tensors], None]:
    return lambda keys, tensors: tensors.update({name: np.zeros(shape, np.float32)})


Change = Callable[[Keys, Tensors], None]
REFUSED: list[tuple[str, Change, type[EdgeqError], str]] = [
    ("head80", put(projector_type="pixtral"), UnsupportedError, r"clip.projector_type is 'pixtral'; supported: mlp, qwen2vl"),
    (
        "aspect",
        put(vision__projector__scale_factor=0),
        CheckpointError,
        "scale_factor is 0; expected an integer from 1 to 4",
    ),
    ("averaged", put(vision__projection_dim=72), CheckpointError, "projection_dim is 72; expected 64, as the tensors have it"),
    ("tiles", tensor("mm.model.fc.bias", 72), UnsupportedError, r"modality_projection\.proj\.bias"),
    ("head80", put(projector_type="mlp"), UnsupportedError, "'mlp', which goes with llama and qwen2, and .* is 'qwen2vl'"),
    ("head80", put(vision__projector_type="mlp"), CheckpointError, "vision.projector_type is 'mlp'; expected 'qwen2vl_merger'"),
    ("head80", put(vision__projector_type=[1, 2]), CheckpointError, "vision.projector_type is array.*; expected 'qwen2vl"),
    ("head80", put(vision__block_count=None), CheckpointError, r"clip.vision.block_count is missing; expected an integer"),
    (
        "head80",
        put(vision__block_count=1 << 30),
        CheckpointError,
        "block_count is 1073741824; expected an integer from 1 to 1024",
    ),
    ("head80", put(vision__block_count=1), UnsupportedError, r"tensor v\.blk\.1\.\S+ has no place in the tower of a Qwen2VL"),
    ("head80", put(vision__block_count=3), CheckpointError, r"visual\.blocks\.2\.\S+ is missing"),
    ("head80", put(vision__attention__head_count=0), CheckpointError, "head_count is 0; expected an integer from 1"),
    ("head80", put(vision__attention__head_count=7), CheckpointError, "160 channels are not a multiple of 4 times num_heads 7"),
    ("head80", put(vision__attention__layer_norm_epsilon=1e-5), UnsupportedError, "epsilon is 1e-05; supported: 1e-06"),
    ("head80", put(vision__image_mean=[0.5] * 2), CheckpointError, "vision.image_mean is .*; expected three numbers"),
    ("head80", put(vision__image_std=[0.0] * 3), CheckpointError, "image std is 0.0"),
    ("head80", put(vision__image_max_pixels=1 << 30), CheckpointError, "max_pixels is 1073741824; expected an integer from 1"),
    ("head80", put(vision__projection_dim=256), CheckpointError, "projection_dim is 256; expected 128, as the tensors have it"),
    ("head80", put(vision__patch_size=7), CheckpointError, r"patch_embed\S+ has the shape"),
    ("head80", put(vision__spatial_merge_size=9), CheckpointError, r"merge is 9"),
    ("head80", put(use_gelu=True, use_silu=True), CheckpointError, "use_silu is True; expected false, as clip.use_gelu is"),
    ("head80", put(has_audio_encoder=True), UnsupportedError, "has_audio_encoder is True; supported: False"),
    ("head80", put(vision__of_tomorrow=1), UnsupportedError, "clip.vision.of_tomorrow is 1; supported: files without it"),
    ("head80", without("v.patch_embd.weight.1"), CheckpointError, r"tensor v\.patch_embd\.weight\.1 is missing"),
    ("head80", tensor("v.patch_embd.weight.1", 160, 3, 7, 14), CheckpointError, r"weight\.1 is of the shape \(160, 3, 7, 14\)"),
    ("head80", without("v.blk.0.ffn_down.weight"), CheckpointError, r"tensor v\.blk\.0\.ffn_down\.weight is missing"),
    ("head80", without("mm.2.weight"), CheckpointError, r"tensor mm\.2\.weight is missing"),
    ("head80", tensor("mm.4.weight", 4, 4), UnsupportedError, r"tensor mm\.4\.weight has no place"),
    ("head80", tensor("v.class_embd", 160), UnsupportedError, r"tensor v\.class_embd has no place"),
    ("windows", put(vision__n_wa_pattern=None), CheckpointError, "n_wa_pattern is missing; expected which layers"),
    (
        "windows",
        put(vision__n_wa_pattern=0),
        CheckpointError,
        "n_wa_pattern is 0; expected an integer from 1 to clip.vision.bl",
    ),
    ("windows", put(vision__wa_layer_indexes=[7]), CheckpointError, r"wa_layer_indexes is array\(\[7\].*; expected integers"),
    ("taps", put(vision__is_deepstack_layers=[True]), CheckpointError, "expected 3 times true or false"),
    ("taps", put(vision__is_deepstack_layers=[True, False, False]), CheckpointError, "n_deepstack_layers of .*m.gguf"),
    ("taps", tensor("v.position_embd.weight", 24, 144), CheckpointError, "position_rows is 24; expected a square"),
    ("clip_llama", put(vision__image_grid_pinpoints=[336, 672]), UnsupportedError, "image_grid_pinpoints is .*; supported: fi"),
    ("clip_llama", put(vision__mm_patch_merge_type="spatial_unpad"), UnsupportedError, "merge_type is 'spatial_unpad'; supp"),
    ("clip_llama", put(vision__feature_layer=[1, 2]), UnsupportedError, r"vision_feature_layer is \[1, 2\]: several layers"),
    ("clip_llama", put(vision__feature_layer=[3]), CheckpointError, "feature_layer is .*; expected integers from 0 to 2"),
    ("clip_llama", put(vision__feed_forward_length=160), CheckpointError, "feed_forward_length is 160; expected 84, as the"),
    ("clip_llama", put(vision__image_size=48), CheckpointError, r"position_embedding\S+ has the shape \(17, 160\)"),
    ("naflex_16", put(vision__projector__scale_factor=64), CheckpointError, "scale_factor is 64; expected an integer from 1"),
    ("naflex_16", tensor("v.patch_embd.weight", 96, 12, 8, 8), CheckpointError, r"of the shape \(96, 12, 8, 8\); expected 1"),
    ("naflex_16", without("mm.1.weight"), CheckpointError, r"tensor mm\.1\.weight is missing"),
    ("naflex_16", tensor("v.position_embd.weight", 24, 96), CheckpointError, "num_patches is 24; expected a square"),
    ("gemma4_280", tensor("v.position_embd.weight", 560, 72), CheckpointError, r"\(560, 72\); expected two tables"),
    ("gemma4_280", put(vision__attention__head_count=5), CheckpointError, "head_count is 5; expected a number that divides"),
    ("gemma4_280", without("v.blk.1.ffn_up.input_min"), CheckpointError, r"up_proj\.input_min is missing, and use_clipped"),
    ("gemma4_280", tensor("a.blk.0.attn_q.weight", 4, 4), UnsupportedError, r"tensor a\.blk\.0\.attn_q\.weight has no place"),
    ("gemma4_280", put(audio__block_count=2), UnsupportedError, "clip.audio.block_count is 2; supported: files without it"),
    ("clip_llama", tensor("v.post_ln.weight", 160), UnsupportedError, r"tensor v\.post_ln\.weight has no place in the tower"),
]


@pytest.fixture(scope="module")
def sound(folder: Folder, tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """The GGUF file of a checkpoint's language model."""
    place = tmp_path_factory.mktemp("sound")

    def get(name: str) -> Path:
        if not (place / name).exists():
            pair(folder(name), place / name)
        return place / name / "m.gguf"

    return get


@pytest.mark.parametrize(("name", "change", "kind", "message"), REFUSED)
def test_what_is_missing_or_contradicts_is_named(
    folder: Folder, sound: Folder, tmp_path: Path, name: str, change: Change, kind: type[EdgeqError], message: str
) -> None:
    write_mmproj(folder(name), tmp_path / "mmproj.gguf", change=change)
    with pytest.raises(kind, match=message) as found:
        plan_with(sound(name), tmp_path / "mmproj.gguf")
    assert type(found.value) is kind and "\n" not in str(found.value)


def test_files_that_do_not_belong_together_are_refused(folder: Folder, tmp_path: Path) -> None:
    for name in ("head80", "windows", "taps"):
        write_pair(folder(name), tmp_path / f"{name}.gguf", tmp_path / f"{name}.mmproj")
    model = tmp_path / "head80.gguf"
    for tower, message in {
        "windows.mmproj": r"mm\.2\.weight gives 64 channels, and qwen2vl\.embedding_length of .*head80\.gguf is 128",
        "taps.mmproj": r"'qwen3vl_merger', which goes with qwen3vl",
        "taps.gguf": "general.architecture is 'qwen3vl', expected 'clip': --mmproj takes the file of the tower",
    }.items():
        with pytest.raises(EdgeqError, match=message):
            plan_with(model, tmp_path / tower)
    with pytest.raises(UnsupportedError, match="a file of kind 'mmproj', not a model: .*--mmproj"):
        plan_of(tmp_path / "head80.mmproj")
    with pytest.raises(InputError, match="--mmproj goes with a GGUF file"):
        plan_with(folder("head80"), tmp_path / "head80.mmproj")
    with pytest.raises(CheckpointError, match="none: no such file"):
        plan_with(model, tmp_path / "none")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.tokens": ["a"] * 2052}, r"tokenizer.ggml.tokens has no '<\|image_pad\|>'"),
        ({"qwen2vl.rope.dimension_sections": [4, 6, 6, 1]}, "dimension_sections is .*; expected three integers, and 0"),
        ({"qwen2vl.rope.dimension_sections": [4, 6, 7, 0]}, r"sections \(4, 6, 7\)|sections"),
    ],
)
def test_keys_of_the_language_model_count_too(folder: Folder, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    model, mmproj = pair(folder("head80"), tmp_path, change_model=lambda keys: keys.update(changes))
    with pytest.raises(EdgeqError, match=message):
        plan_with(model, mmproj)
