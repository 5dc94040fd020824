"""Finds the family of a config.json and the network that it describes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from edgeq.converters.families.alibi.bloom import BLOOM
from edgeq.converters.families.alibi.mpt import MPT
from edgeq.converters.families.decoders.cohere import COHERE_FAMILIES
from edgeq.converters.families.decoders.experts import EXPERT_FAMILIES
from edgeq.converters.families.decoders.falcon import FALCON
from edgeq.converters.families.decoders.gemma import GEMMA_FAMILIES
from edgeq.converters.families.decoders.gemma4 import GEMMA_4
from edgeq.converters.families.decoders.glm import GLM_FAMILIES
from edgeq.converters.families.decoders.gpt import GPT_FAMILIES
from edgeq.converters.families.decoders.granite import GRANITE_FAMILIES
from edgeq.converters.families.decoders.hunyuan import HUNYUAN
from edgeq.converters.families.decoders.lfm import LFM2
from edgeq.converters.families.decoders.llama import LLAMA_FAMILIES
from edgeq.converters.families.decoders.olmo import OLMO_FAMILIES
from edgeq.converters.families.decoders.opt import OPT_FAMILIES
from edgeq.converters.families.decoders.qwen_next import QWEN_NEXT_FAMILIES
from edgeq.converters.families.decoders.smollm import SMOLLM_FAMILIES
from edgeq.converters.families.encoders.bert import BERT_FAMILIES
from edgeq.converters.families.encoders.modernbert import MODERNBERT_FAMILIES
from edgeq.converters.families.encoders.nomic import NOMIC
from edgeq.converters.families.family import Family, FamilyDescription, Values
from edgeq.converters.families.ranking import RANKING_FAMILIES
from edgeq.converters.families.state_spaces.falcon_h1 import FALCON_H1
from edgeq.converters.families.state_spaces.granite_hybrid import GRANITE_HYBRID
from edgeq.converters.families.state_spaces.nemotron_h import NEMOTRON_H
from edgeq.converters.families.vision.gemma3 import GEMMA_3_VL
from edgeq.converters.families.vision.gemma4 import GEMMA_4_VL
from edgeq.converters.families.vision.idefics3 import IDEFICS_FAMILIES
from edgeq.converters.families.vision.internvl import INTERNVL
from edgeq.converters.families.vision.lfm2_vl import LFM2_VL
from edgeq.converters.families.vision.llava import LLAVA_FAMILIES
from edgeq.converters.families.vision.paligemma import PALIGEMMA
from edgeq.converters.families.vision.pi0 import PI0
from edgeq.converters.families.vision.qwen3_5 import QWEN_3_5_VL_FAMILIES
from edgeq.converters.families.vision.qwen3_vl import QWEN3_VL
from edgeq.converters.families.vision.qwen_vl import QWEN_VL_FAMILIES
from edgeq.errors import CheckpointError, FormatError, UnsupportedError
from edgeq.network.config import ModelConfig, VisionConfig
from edgeq.network.image_config import ImageConfig
from edgeq.network.pooling import Pooling
from edgeq.network.stack import MAX_SIZES

TEXT_FAMILIES = (
    *LLAMA_FAMILIES, *SMOLLM_FAMILIES, *GEMMA_FAMILIES, *OPT_FAMILIES, *EXPERT_FAMILIES, LFM2, *OLMO_FAMILIES, *GLM_FAMILIES,
    *GRANITE_FAMILIES, GRANITE_HYBRID, *COHERE_FAMILIES, HUNYUAN, *GPT_FAMILIES, FALCON, FALCON_H1, NEMOTRON_H,
    *QWEN_NEXT_FAMILIES, GEMMA_4, BLOOM, MPT, *BERT_FAMILIES, *MODERNBERT_FAMILIES, NOMIC,
    *RANKING_FAMILIES,
)  # fmt: skip
DESCRIPTIONS = (
    *TEXT_FAMILIES,
    *QWEN_VL_FAMILIES,
    QWEN3_VL,
    *QWEN_3_5_VL_FAMILIES,
    *IDEFICS_FAMILIES,
    GEMMA_3_VL,
    GEMMA_4_VL,
    INTERNVL,
    LFM2_VL,
    *LLAVA_FAMILIES,
    PALIGEMMA,
    PI0,
)
FAMILIES = {description.architecture: description for description in DESCRIPTIONS}
TILES = (
    "cuts pictures into tiles in a way of its own; supported instead: LLaVA-1.5 (LlavaForConditionalGeneration), SmolVLM, "
    "InternVL3, Qwen2-VL, Qwen2.5-VL, Qwen3-VL, Qwen3.5"
)
RELATED = {
    "LlavaNextForConditionalGeneration": TILES,
    "LlavaNextVideoForConditionalGeneration": TILES,
    "LlavaOnevisionForConditionalGeneration": TILES,
    "InternVLChatModel": "runs by code of its own; convert the checkpoint of the same model whose name ends in -HF",
    "Qwen3VLMoeForConditionalGeneration": "has experts beside a vision tower; supported instead: Qwen3-VL without experts",
    "LlavaLlamaForCausalLM": "does not carry its vision tower; convert the llava-hf checkpoint of the same model",
    "LlavaMistralForCausalLM": "does not carry its vision tower; convert the llava-hf checkpoint of the same model",
}
"""Architectures close to one that is supported: why not, and what to do."""
CONTINUES, STATES = "ForCausalLM", "Model"
"""Ends of the names of an architecture with its head, and without."""
ONE_DIRECTION: dict[str, tuple[Any, ...]] = {
    "is_causal": (None, True),
    "use_bidirectional_attention": (None, False),
    "bidirectional": (None, False),
    "is_bidirectional": (None, False),
}
"""Keys of checkpoints whose tokens see those after them -> values with which they do not."""


def recognise(hf: Values, preprocessor: Values | None = None, pooling: Pooling | None = None) -> tuple[Family, ModelConfig]:
    """The family of a config.json and the network it describes.

    preprocessor   the checkpoint's preprocessor_config.json, which a model with a vision tower needs
    pooling        it embeds texts so, and its head, if it has one, is not used

    UnsupportedError: names the key, what was found and what is supported.  CheckpointError: a key missing or out of range, or a
    checkpoint that is already quantized.
    """
    if hf.get("quantization_config") is not None:
        method = hf["quantization_config"].get("quant_method") if isinstance(hf["quantization_config"], dict) else None
        raise CheckpointError(
            f"config.json: quantization_config: the checkpoint is already quantized ({method or 'method not named'}); "
            "convert the original checkpoint instead"
        )
    architectures = hf.get("architectures")
    name = architectures[0] if isinstance(architectures, list) and architectures else None
    if isinstance(name, str) and name in RELATED:
        raise UnsupportedError(f"config.json: architectures is {architectures!r:.200}: {name} {RELATED[name]}")
    if isinstance(name, str) and name not in FAMILIES and (headed := name.removesuffix(STATES) + CONTINUES) in FAMILIES:
        if pooling is None:
            raise UnsupportedError(
                f"config.json: architectures is {architectures!r:.200}: {name} has no head, and the folder no modules.json, "
                "which says how an embedding model makes one vector of a text; give --pooling last or --pooling mean, as "
                "its authors say"
            )
        name = headed
    if not isinstance(name, str) or name not in FAMILIES:
        raise UnsupportedError(
            f"config.json: architectures is {architectures!r} (model_type {hf.get('model_type')!r}); "
            f"supported: {', '.join(FAMILIES)}"
        )
    description, vision = FAMILIES[name], None
    if description.inside:
        with _named("config.json"):
            hf = {**hf, **_object(hf, description.inside), "model_type": hf.get("model_type")}
    if description.scores is not None:
        if pooling is not None:
            raise UnsupportedError(
                f"config.json: architectures is {architectures!r:.200}: {name} gives a score and no vector; leave --pooling "
                "and modules.json out"
            )
        with _named("config.json"):
            pooling = description.scores({**description.defaults, **hf})
    if description.headless and pooling is None:
        raise UnsupportedError(
            f"config.json: architectures is {architectures!r:.200}: {name} has no head, and the folder no modules.json, which "
            "says how an embedding model makes one vector of a text; give --pooling mean or --pooling cls, as its authors say"
        )
    if pooling is not None:
        _check_embedding(hf, description)
    if description.variants is not None:
        with _named("config.json"):
            description = description.variants(hf)
    values = _decoder_values(description, hf)
    if description.tower is not None:
        with _named("config.json"):
            settings = _tower_settings(description.tower, hf, values)
        image = _image(settings, preprocessor)
        token = values.get("image_token_id", values.get("image_token_index"))
        if description.policy is not None and token == values["vocab_size"]:
            # It stands for features alone, and has no row of the embedding.
            token = 0
        with _named("config.json"):
            vision = VisionConfig(**settings, image=image, image_token_id=token)
    with _named("config.json"):
        _check_neutral(description, values)
        config = _model_config(description, values, vision, pooling)
        if description.policy is not None:
            config = replace(config, policy=description.policy(hf))
    return Family(description, config), config


@contextmanager
def _named(file: str) -> Iterator[None]:
    """Errors of what is done inside name the file."""
    try:
        yield
    except FormatError as error:
        raise CheckpointError(f"{file}: {error}") from None
    except UnsupportedError as error:
        raise UnsupportedError(f"{file}: {error}") from None


def _decoder_values(description: FamilyDescription, hf: Values) -> Values:
    """The keys of the decoder, completed by their defaults: some checkpoints with a tower nest them."""
    if (description.tower is None and not description.nested) or "text_config" not in hf:
        return {**description.defaults, **hf}
    with _named("config.json"):
        nested = _object(hf, "text_config")
    # transformers ties the head if either level says so.
    said = [each for each in (hf.get("tie_word_embeddings"), nested.get("tie_word_embeddings")) if each is not None]
    tied = any(said) if said else description.defaults["tie_word_embeddings"]
    return {**description.defaults, **hf, **nested, "model_type": hf.get("model_type"), "tie_word_embeddings": tied}


def _tower_settings(description: FamilyDescription, hf: Values, decoder: Values) -> dict[str, Any]:
    tower = _object(hf, "vision_config")
    _check_neutral(description, tower)
    outside = {key: decoder[theirs] for key, theirs in description.outside.items()}
    return description.settings({**description.defaults, **tower, **outside})


def _image(settings: dict[str, Any], preprocessor: Values | None) -> ImageConfig:
    """How a picture becomes pixels for a tower of these settings."""
    if preprocessor is None:
        raise CheckpointError("the checkpoint has no preprocessor_config.json, which says how a picture becomes pixels")
    sizes = {"patch_size": "patch_size", "temporal_patch_size": "temporal_patch_size", "merge_size": "merge"}
    try:
        return ImageConfig.from_preprocessor(preprocessor, {key: settings[name] for key, name in sizes.items()})
    except FormatError as error:
        raise CheckpointError(f"{error}") from None


def _check_neutral(description: FamilyDescription, values: Values) -> None:
    """UnsupportedError: a key has a value that changes the computation in a way that is not supported."""
    for key, neutral in description.neutral.items():
        if values.get(key) not in neutral:
            supported = " or ".join(repr(value) for value in neutral if value is not None) or "absent"
            raise UnsupportedError(f"{key} is {values[key]!r}; {description.architecture} is supported with: {supported}")


def _object(values: Values, key: str) -> Values:
    found = values.get(key)
    if not isinstance(found, dict):
        raise FormatError(f"{key} is {str(found)[:80]}; expected an object")
    return found


def _check_embedding(values: Values, description: FamilyDescription) -> None:
    """UnsupportedError: states of texts are computed by code of the checkpoint's own, or tokens see those after them, which the
    family does not read."""
    own = values.get("auto_map")
    if isinstance(own, dict) and "AutoModel" in own and not description.own_code:
        raise UnsupportedError(
            f"config.json: auto_map: AutoModel is {str(own['AutoModel'])[:80]!r}, code of the checkpoint's own, which edgeq "
            "does not run; supported: embedding models that transformers runs itself"
        )
    for key, neutral in ONE_DIRECTION.items():
        if key not in description.defaults and values.get(key) not in neutral:
            raise UnsupportedError(
                f"config.json: {key} is {values[key]!r:.40}: tokens see those after them; supported: decoders, whose tokens "
                "see those before them"
            )


def _model_config(
    description: FamilyDescription, values: Values, vision: VisionConfig | None, pooling: Pooling | None
) -> ModelConfig:
    def value(key: str) -> Any:
        return values[description.keys.get(key, key)]

    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    for key in sizes:
        theirs = description.keys.get(key, key)
        found = values.get(theirs)
        if type(found) is not int or not 1 <= found <= MAX_SIZES[key]:
            raise FormatError(f"{theirs} is {found!r}; expected an integer from 1 to {MAX_SIZES[key]}")
    return ModelConfig(
        model_type=str(values.get("model_type")),
        tie_word_embeddings=values["tie_word_embeddings"] if pooling is None else False,
        sliding_windows=description.windows(values, value("num_hidden_layers")),
        vision=vision,
        pooling=pooling,
        **({key: value(key) for key in (*sizes, "max_position_embeddings", "hidden_act")} | description.settings(values)),
    )
