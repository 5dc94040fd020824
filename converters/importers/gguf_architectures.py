"""What llama.cpp calls architectures, and what their keys are in transformers' config.json.

Read in llama.cpp's converter and model code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from edgeq.converters.importers import gguf_settings as settings
from edgeq.converters.importers.gguf_families import alibi, encoders
from edgeq.converters.importers.gguf_families import tensor_names as names
from edgeq.converters.importers.gguf_families.falcon import SECOND_NORM, falcon
from edgeq.converters.importers.gguf_families.nemotron_h import nemotron_h, nemotron_h_moe
from edgeq.converters.importers.gguf_keys import EMBEDDING, HEAD, NORM, GgufKeys, Keys, Settings
from edgeq.converters.importers.gguf_tensors import GgufLayout, Tiles
from edgeq.errors import CheckpointError, UnsupportedError

RMS_EPSILON = "rms_norm_eps"
DECAYS = {"ssm_a": GgufLayout(negative_exp=True)}


def as_converted(config: Settings) -> Mapping[str, GgufLayout]:
    return {}


def decays(config: Settings) -> Mapping[str, GgufLayout]:
    return DECAYS


def tiled_heads(config: Settings) -> Mapping[str, GgufLayout]:
    """Value heads of a delta net: the first of every key head, then the second of every one, and so on."""
    keys, heads, width = (config[f"linear_{size}"] for size in ("num_key_heads", "num_value_heads", "value_head_dim"))
    if not keys or heads % keys or heads == keys:
        # Nothing moves; what does not fit is refused where the network is described.
        return DECAYS
    before, each = 2 * keys * config["linear_key_head_dim"], heads // keys
    channels, mixed = Tiles(0, keys, each, width), Tiles(before, keys, each, width)
    one = GgufLayout(Tiles(0, keys, each, 1))
    return {
        "attn_qkv": GgufLayout(mixed),
        "ssm_conv1d": GgufLayout(mixed),
        "attn_gate": GgufLayout(channels),
        "ssm_out": GgufLayout(columns=channels),
        "ssm_beta": one,
        "ssm_alpha": one,
        "ssm_dt": one,
        "ssm_a": replace(one, negative_exp=True),
    }


@dataclass(frozen=True)
class Architecture:
    """An architecture of llama.cpp.

    family        as in `architectures` of config.json;  model_type  there
    tensors       of a layer: llama.cpp's name -> module; {} stands for the number of an expert.  A name that ends as the
                  tensor's does, in .weight or .scale -> that of a tensor; one without such an end is a weight
    interleaved   rows of q and k in pairs of one rotation, as the original Llama has them, instead of half by half
    gain          what llama.cpp adds to the gains of norms
    ungained      norms to whose gains it adds nothing
    layouts       by the keys of config.json: what it does to tensors of a layer, by its names of them
    drafts        tensors of the layers after the last, which draft tokens, as `tensors`; none: there are no such layers
    settings      further keys of config.json
    epsilon       what config.json calls the epsilon of the norms; any name but RMS_EPSILON is that of a LayerNorm
    ends          tensors outside of the layers: llama.cpp's name -> transformers'
    rows          those of them that are matrices, though of one row programs drop the dimension
    layers        what transformers' names of tensors in layers begin with
    scaling       further keys of `rope_scaling`
    """

    family: str
    model_type: str
    tensors: Mapping[str, str]
    settings: Callable[[GgufKeys], Settings]
    interleaved: bool = False
    gain: float = 0.0
    epsilon: str = RMS_EPSILON
    ends: Mapping[str, str] = field(default_factory=lambda: names.ENDS)
    rows: tuple[str, ...] = ()
    layers: str = "model.layers."
    ungained: tuple[str, ...] = ()
    layouts: Callable[[Settings], Mapping[str, GgufLayout]] = as_converted
    drafts: Mapping[str, str] = field(default_factory=dict)
    scaling: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ranks(self) -> bool:
        """Whether it gives a score of two texts."""
        return self.family.endswith("ForSequenceClassification")


GPT2 = Architecture(
    "GPT2LMHeadModel",
    "gpt2",
    {"attn_norm": "ln_1", "attn_qkv": "attn.c_attn", "attn_output": "attn.c_proj"}
    | {"ffn_norm": "ln_2", "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
    settings.gpt2,
    epsilon="layer_norm_epsilon",
    ends={EMBEDDING: "transformer.wte.weight", "position_embd.weight": "transformer.wpe.weight", HEAD: "lm_head.weight"}
    | {NORM: "transformer.ln_f.weight", "output_norm.bias": "transformer.ln_f.bias"},
    layers="transformer.h.",
)
QWEN_3_5 = Architecture(
    "Qwen3_5ForCausalLM",
    "qwen3_5_text",
    names.QWEN_NEXT,
    settings.qwen3_5,
    gain=1.0,
    ungained=("ssm_norm",),
    layouts=tiled_heads,
    drafts=names.QWEN_DRAFTS,
)
ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", "llama", names.LLAMA, settings.nothing_else, interleaved=True),
    "smollm3": Architecture("SmolLM3ForCausalLM", "smollm3", names.LLAMA, settings.no_windows, interleaved=True),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2", names.LLAMA, settings.no_windows),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3", names.LLAMA | names.HEAD_NORMS, settings.no_windows),
    "qwen2vl": Architecture("Qwen2ForCausalLM", "qwen2", names.LLAMA, settings.qwen2_vl),
    "qwen3vl": Architecture("Qwen3ForCausalLM", "qwen3", names.LLAMA | names.HEAD_NORMS, settings.qwen3_vl),
    "phi3": Architecture(
        "Phi3ForCausalLM",
        "phi3",
        names.NORMS
        | {"attn_qkv": "self_attn.qkv_proj", "attn_output": "self_attn.o_proj"}
        | {"ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"},
        settings.phi3,
    ),
    "gemma3": Architecture(
        "Gemma3ForCausalLM",
        "gemma3_text",
        names.ATTENTION | names.MLP | names.GEMMA_NORMS,
        settings.gemma3,
        gain=1.0,
    ),
    "gemma4": Architecture(
        "Gemma4ForCausalLM", "gemma4_text", names.GEMMA4, settings.gemma4, ends=names.ENDS | names.GEMMA4_ENDS
    ),
    "qwen2moe": Architecture(
        "Qwen2MoeForCausalLM",
        "qwen2_moe",
        names.NORMS
        | names.ATTENTION
        | names.EXPERTS
        | names.SHARED
        | {"ffn_gate_inp": "mlp.gate", "ffn_gate_inp_shexp": "mlp.shared_expert_gate"},
        settings.qwen2_moe,
    ),
    "qwen3moe": Architecture(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        names.NORMS | names.ATTENTION | names.HEAD_NORMS | names.EXPERTS | {"ffn_gate_inp": "mlp.gate"},
        settings.qwen3_moe,
    ),
    "olmo2": Architecture(
        "Olmo2ForCausalLM", "olmo2", names.ATTENTION | names.MLP | names.HEAD_NORMS | names.POST_NORMS, settings.nothing_else
    ),
    "exaone4": Architecture(
        "Exaone4ForCausalLM", "exaone4", names.ATTENTION | names.MLP | names.HEAD_NORMS | names.POST_NORMS, settings.exaone4
    ),
    "glm4": Architecture(
        "Glm4ForCausalLM", "glm4", names.NORMS | names.ATTENTION | names.GLM_NORMS | names.GLM_MLP, settings.glm4
    ),
    "granite": Architecture("GraniteForCausalLM", "granite", names.LLAMA, settings.granite, interleaved=True),
    "granitemoe": Architecture(
        "GraniteMoeSharedForCausalLM",
        "granitemoeshared",
        names.NORMS | names.ATTENTION | names.GRANITE_EXPERTS,
        settings.granite_moe,
        interleaved=True,
    ),
    "granitehybrid": Architecture(
        "GraniteMoeHybridForCausalLM",
        "granitemoehybrid",
        names.LLAMA | names.MAMBA | names.GRANITE_EXPERTS,
        settings.granite_hybrid,
        interleaved=True,
        layouts=decays,
    ),
    "falcon-h1": Architecture(
        "FalconH1ForCausalLM",
        "falcon_h1",
        names.FALCON_H1,
        settings.falcon_h1,
        ends=names.ENDS | {NORM: "model.final_layernorm.weight"},
        layouts=decays,
    ),
    "nemotron_h": Architecture(
        "NemotronHForCausalLM",
        "nemotron_h",
        names.NEMOTRON_H,
        nemotron_h,
        ends={EMBEDDING: "model.embeddings.weight", NORM: "model.norm_f.weight", HEAD: names.ENDS[HEAD]},
        layouts=decays,
    ),
    "nemotron_h_moe": Architecture(
        "NemotronHForCausalLM",
        "nemotron_h",
        names.NEMOTRON_H | names.NEMOTRON_H_EXPERTS,
        nemotron_h_moe,
        ends={EMBEDDING: "model.embeddings.weight", NORM: "model.norm_f.weight", HEAD: names.ENDS[HEAD]},
        layouts=decays,
    ),
    "command-r": Architecture("CohereForCausalLM", "cohere", names.COHERE, settings.command_r, epsilon="layer_norm_eps"),
    "cohere2": Architecture("Cohere2ForCausalLM", "cohere2", names.COHERE, settings.cohere2, epsilon="layer_norm_eps"),
    "hunyuan-dense": Architecture(
        "HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense", names.LLAMA | names.HUNYUAN_NORMS, settings.nothing_else
    ),
    "stablelm": Architecture(
        "StableLmForCausalLM",
        "stablelm",
        names.LLAMA,
        settings.stablelm,
        epsilon="layer_norm_eps",
        ends=names.ENDS | names.NORM_BIAS,
    ),
    "starcoder2": Architecture(
        "Starcoder2ForCausalLM",
        "starcoder2",
        names.NORMS | names.ATTENTION | {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        settings.starcoder2,
        epsilon="norm_epsilon",
        ends=names.ENDS | names.NORM_BIAS,
    ),
    "gpt2": GPT2,
    "starcoder": replace(GPT2, family="GPTBigCodeForCausalLM", model_type="gpt_bigcode", settings=settings.starcoder),
    "gptneox": Architecture(
        "GPTNeoXForCausalLM",
        "gpt_neox",
        {"attn_norm": "input_layernorm", "attn_qkv": "attention.query_key_value", "attn_output": "attention.dense"}
        | {"ffn_norm": "post_attention_layernorm", "ffn_up": "mlp.dense_h_to_4h", "ffn_down": "mlp.dense_4h_to_h"},
        settings.gptneox,
        epsilon="layer_norm_eps",
        ends={EMBEDDING: "gpt_neox.embed_in.weight", HEAD: "embed_out.weight"}
        | {NORM: "gpt_neox.final_layer_norm.weight", "output_norm.bias": "gpt_neox.final_layer_norm.bias"},
        layers="gpt_neox.layers.",
    ),
    "falcon": Architecture(
        "FalconForCausalLM",
        "falcon",
        names.FALCON,
        falcon,
        epsilon="layer_norm_epsilon",
        ends={EMBEDDING: "transformer.word_embeddings.weight", HEAD: "lm_head.weight"}
        | {NORM: "transformer.ln_f.weight", "output_norm.bias": "transformer.ln_f.bias"},
        layers="transformer.h.",
    ),
    "bloom": Architecture(
        "BloomForCausalLM",
        "bloom",
        names.BLOOM,
        alibi.bloom,
        epsilon="layer_norm_epsilon",
        ends={EMBEDDING: "transformer.word_embeddings.weight", HEAD: "lm_head.weight"}
        | {f"token_embd_norm.{kind}": f"transformer.word_embeddings_layernorm.{kind}" for kind in ("weight", "bias")}
        | {f"output_norm.{kind}": f"transformer.ln_f.{kind}" for kind in ("weight", "bias")},
        layers="transformer.h.",
    ),
    "mpt": Architecture(
        "MptForCausalLM",
        "mpt",
        names.MPT,
        alibi.mpt,
        epsilon="layer_norm_epsilon",
        ends={EMBEDDING: "transformer.wte.weight", HEAD: "lm_head.weight", NORM: "transformer.norm_f.weight"},
        layers="transformer.blocks.",
    ),
    "lfm2": Architecture(
        "Lfm2ForCausalLM",
        "lfm2",
        names.ATTENTION | names.LFM2 | names.LFM2_CONVOLUTION,
        settings.lfm2,
        ends=names.ENDS | names.LFM2_NORM,
    ),
    "gpt-oss": Architecture(
        "GptOssForCausalLM",
        "gpt_oss",
        {"attn_norm": "input_layernorm"} | names.ATTENTION | names.GPT_OSS | names.EXPERTS,
        settings.gpt_oss,
        # llama.cpp rounds the bounds of its frequencies, the checkpoints do not.
        scaling={"truncate": False},
    ),
    "qwen3next": Architecture(
        "Qwen3NextForCausalLM",
        "qwen3_next",
        names.QWEN_NEXT | names.QWEN_EXPERTS,
        settings.qwen3_next,
        gain=1.0,
        ungained=("ssm_norm",),
        layouts=decays,
        drafts=names.QWEN_DRAFTS,
    ),
    "qwen35": QWEN_3_5,
    "qwen35moe": replace(
        QWEN_3_5,
        family="Qwen3_5MoeForCausalLM",
        model_type="qwen3_5_moe_text",
        tensors=names.QWEN_NEXT | names.QWEN_EXPERTS,
        settings=settings.qwen3_5_moe,
    ),
    "ernie4_5": Architecture("Ernie4_5ForCausalLM", "ernie4_5", names.LLAMA, settings.ernie4_5),
    "bert": Architecture(
        "BertModel",
        "bert",
        names.BERT,
        encoders.bert,
        epsilon="layer_norm_eps",
        ends=names.BERT_ENDS,
        rows=(encoders.SEGMENTS,),
        layers="encoder.layer.",
    ),
    "nomic-bert": Architecture(
        "NomicBertModel",
        "nomic_bert",
        names.NOMIC,
        encoders.nomic_bert,
        epsilon="layer_norm_eps",
        ends=names.NOMIC_ENDS,
        rows=(encoders.SEGMENTS,),
        layers="encoder.layers.",
    ),
    "modern-bert": Architecture(
        "ModernBertModel",
        "modernbert",
        names.MODERN_BERT,
        encoders.modern_bert,
        epsilon="norm_eps",
        ends=names.MODERN_BERT_ENDS,
        layers="layers.",
    ),
}
"""llama.cpp's name of an architecture, in `general.architecture`."""
MIXTRAL_ARCHITECTURE = Architecture(
    "MixtralForCausalLM",
    "mixtral",
    names.NORMS
    | names.ATTENTION
    | {"ffn_gate_inp": "block_sparse_moe.gate"}
    | {name: f"block_sparse_moe.experts.{{}}.{module}" for name, module in names.MIXTRAL.items()},
    settings.mixtral,
    interleaved=True,
)
"""Mixtral's files say "llama" and have experts."""
OLMO3_ARCHITECTURE = replace(ARCHITECTURES["olmo2"], family="Olmo3ForCausalLM", model_type="olmo3", settings=settings.olmo3)
"""OLMo 3's files say "olmo2" and have windows."""

FALCON_40B = replace(ARCHITECTURES["falcon"], tensors=names.FALCON | {"attn_norm": "ln_mlp", "attn_norm_2": "ln_attn"})
"""Larger models have two norms in a layer, of which the first in the file is that of the MLP."""
RERANKERS = {
    "bert": replace(
        ARCHITECTURES["bert"],
        family="BertForSequenceClassification",
        settings=encoders.bert_reranker,
        ends=names.BERT_ENDS | names.SCORES,
        rows=(encoders.SEGMENTS, encoders.SCORE),
    ),
    "modern-bert": replace(
        ARCHITECTURES["modern-bert"],
        family="ModernBertForSequenceClassification",
        settings=encoders.modern_bert_reranker,
        ends=names.MODERN_BERT_ENDS | names.MODERN_BERT_SCORES,
        rows=(encoders.SCORE,),
    ),
}
"""Rerankers' files say the same and have a head; of all kinds of BERT it is of one form."""


def architecture(metadata: Keys, place: str, shapes: Mapping[str, tuple[int, ...]]) -> tuple[Architecture, GgufKeys]:
    """What the metadata name, and its keys;  tensors: names of all.

    UnsupportedError: one that edgeq does not run, by name.  CheckpointError: none is named.
    """
    name = metadata.get("general.architecture")
    if not isinstance(name, str):
        raise CheckpointError(f"{place}: general.architecture is {'missing' if name is None else f'{name!r:.60}'}")
    if name == "clip" or metadata.get("general.type") in ("mmproj", "adapter"):
        kind = metadata.get("general.type", "mmproj")
        raise UnsupportedError(
            f"{place}: a file of kind {kind!r:.40}, not a model: give the file of the model itself, and that of its tower with "
            "--mmproj (docs/vision.md); LoRA adapters are read from the folder of PEFT (docs/adapters.md)"
        )
    if name not in ARCHITECTURES:
        raise UnsupportedError(f"{place}: architecture {name!r:.60} is not supported; supported: {', '.join(ARCHITECTURES)}")
    keys = GgufKeys(metadata, name, place, shapes)
    if name == "llama" and keys.integer("expert_count", 0):
        return MIXTRAL_ARCHITECTURE, keys
    if name == "olmo2" and keys.integer("attention.sliding_window", 0):
        return OLMO3_ARCHITECTURE, keys
    if name == "falcon" and keys.has(SECOND_NORM):
        return FALCON_40B, keys
    if name in RERANKERS and encoders.SCORE in shapes:
        return RERANKERS[name], keys
    return ARCHITECTURES[name], keys
