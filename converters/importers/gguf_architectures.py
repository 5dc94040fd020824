"""What llama.cpp calls architectures and tensors, and what their keys are in transformers' config.json.

Read in llama.cpp's converter and model code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from edgeq.converters.importers import gguf_settings as settings
from edgeq.converters.importers.gguf_families import alibi, encoders
from edgeq.converters.importers.gguf_families.falcon import SECOND_NORM, falcon
from edgeq.converters.importers.gguf_families.nemotron_h import nemotron_h
from edgeq.converters.importers.gguf_keys import EMBEDDING, HEAD, NORM, GgufKeys, Keys, Settings
from edgeq.converters.importers.gguf_tensors import GgufLayout, Tiles
from edgeq.errors import CheckpointError, UnsupportedError

ENDS = {EMBEDDING: "model.embed_tokens.weight", NORM: "model.norm.weight", HEAD: "lm_head.weight"}
ATTENTION = {f"attn_{part}": f"self_attn.{part}_proj" for part in ("q", "k", "v")} | {"attn_output": "self_attn.o_proj"}
MLP = {f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")}
NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
LLAMA = NORMS | ATTENTION | MLP
EXPERTS = {f"ffn_{part}_exps": f"mlp.experts.{{}}.{part}_proj" for part in ("gate", "up", "down")}
MIXTRAL = {"ffn_gate_exps": "w1", "ffn_down_exps": "w2", "ffn_up_exps": "w3"}
SHARED = {f"ffn_{part}_shexp": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")}
POST_NORMS = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
"""Norms after attention and MLP, of layers that have none before them."""
GLM_NORMS = {"post_attention_norm": "post_self_attn_layernorm", "post_ffw_norm": "post_mlp_layernorm"}
GLM_MLP = {"ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"}
COHERE = ATTENTION | MLP | {"attn_norm": "input_layernorm"}
LFM2_CONVOLUTION = {f"shortconv.{part}": f"conv.{part}" for part in ("in_proj", "conv", "out_proj")}
LFM2 = {
    **{"attn_norm": "operator_norm", "attn_q_norm": "self_attn.q_layernorm", "attn_k_norm": "self_attn.k_layernorm"},
    **{f"ffn_{part}": f"feed_forward.{module}" for part, module in (("gate", "w1"), ("up", "w3"), ("down", "w2"))},
    **{"ffn_norm": "ffn_norm", "attn_output": "self_attn.out_proj"},
}
LFM2_NORM = {name: "model.embedding_norm.weight" for name in (NORM, "token_embd_norm.weight")}
"""llama.cpp calls the last norm one of the embedding."""
GPT_OSS = {
    "attn_sinks.weight": "self_attn.sinks",
    "ffn_gate_inp": "mlp.router",
    "post_attention_norm": "post_attention_layernorm",
}
GEMMA_NORMS = HEAD_NORMS | {"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"}
GEMMA_NORMS |= {"ffn_norm": "pre_feedforward_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
GEMMA4 = ATTENTION | MLP | GEMMA_NORMS
GEMMA4 |= {"inp_gate": "per_layer_input_gate", "proj": "per_layer_projection", "post_norm": "post_per_layer_input_norm"}
GEMMA4 |= {"pre_ffw_norm_2": "pre_feedforward_layernorm_2", "ffn_gate_inp": "router.proj"}
GEMMA4 |= {f"post_ffw_norm_{i}": f"post_feedforward_layernorm_{i}" for i in (1, 2)}
GEMMA4 |= {"layer_output_scale.weight": "layer_scalar", "ffn_gate_inp.scale": "router.scale"}
GEMMA4 |= {"ffn_gate_up_exps.weight": "experts.gate_up_proj", "ffn_down_exps.weight": "experts.down_proj"}
GEMMA4 |= {"ffn_down_exps.scale": "router.per_expert_scale"}
GEMMA4_ENDS = {"per_layer_token_embd.weight": "model.embed_tokens_per_layer.weight"}
GEMMA4_ENDS |= {"per_layer_model_proj.weight": "model.per_layer_model_projection.weight"}
GEMMA4_ENDS |= {"per_layer_proj_norm.weight": "model.per_layer_projection_norm.weight"}
HUNYUAN_NORMS = {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}
NORM_BIAS = {"output_norm.bias": "model.norm.bias"}
QWEN_NEXT = ATTENTION | HEAD_NORMS | MLP | {"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"}
QWEN_NEXT |= {"attn_qkv": "linear_attn.in_proj_qkv", "attn_gate": "linear_attn.in_proj_z", "ssm_out": "linear_attn.out_proj"}
QWEN_NEXT |= {"ssm_in": "linear_attn.in_proj_qkvz", "ssm_ba": "linear_attn.in_proj_ba", "ssm_conv1d": "linear_attn.conv1d"}
QWEN_NEXT |= {"ssm_beta": "linear_attn.in_proj_b", "ssm_alpha": "linear_attn.in_proj_a", "ssm_norm": "linear_attn.norm"}
QWEN_NEXT |= {"ssm_a.weight": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias"}
QWEN_DRAFTS = {"nextn.eh_proj": "mtp.fc", "nextn.enorm": "mtp.pre_fc_norm_embedding", "nextn.hnorm": "mtp.pre_fc_norm_hidden"}
QWEN_DRAFTS |= {"nextn.shared_head_norm": "mtp.norm", "nextn.embed_tokens": "mtp.embed_tokens"}
QWEN_DRAFTS |= {"nextn.shared_head_head": "mtp.lm_head"}
QWEN_EXPERTS = EXPERTS | SHARED | {"ffn_gate_inp": "mlp.gate", "ffn_gate_inp_shexp": "mlp.shared_expert_gate"}
QWEN_EXPERTS |= {"ffn_gate_up_exps.weight": "mlp.experts.gate_up_proj"}
MAMBA = {f"ssm_{part}": f"mamba.{module}" for part, module in (("in", "in_proj"), ("conv1d", "conv1d"), ("norm", "norm"))}
MAMBA |= {"ssm_out": "mamba.out_proj", "ssm_dt.bias": "mamba.dt_bias", "ssm_a.weight": "mamba.A_log", "ssm_d.weight": "mamba.D"}
NEMOTRON_H = {name: f"mixer.{module.rpartition('.')[2]}" for name, module in (ATTENTION | MAMBA).items()}
NEMOTRON_H |= {"attn_norm": "norm", "ffn_up": "mixer.up_proj", "ffn_down": "mixer.down_proj"}
FALCON_H1 = ATTENTION | MAMBA | {"attn_norm": "input_layernorm", "ffn_norm": "pre_ff_layernorm"}
FALCON_H1 |= {f"ffn_{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")}
FALCON = {"attn_norm": "input_layernorm", "attn_qkv": "self_attention.query_key_value", "attn_output": "self_attention.dense"}
FALCON |= {"ffn_up": "mlp.dense_h_to_4h", "ffn_down": "mlp.dense_4h_to_h"}
BLOOM = FALCON | {"ffn_norm": "post_attention_layernorm"}
MPT = {"attn_norm": "norm_1", "attn_qkv": "attn.Wqkv", "attn_output": "attn.out_proj"}
MPT |= {"ffn_norm": "norm_2", "ffn_up": "ffn.up_proj", "ffn_down": "ffn.down_proj"}
RMS_EPSILON = "rms_norm_eps"
BERT = {f"attn_{part}": f"attention.self.{module}" for part, module in (("q", "query"), ("k", "key"), ("v", "value"))}
BERT |= {"attn_output": "attention.output.dense", "attn_output_norm": "attention.output.LayerNorm"}
BERT |= {"ffn_up": "intermediate.dense", "ffn_down": "output.dense", "layer_output_norm": "output.LayerNorm"}
BERT_ENDS = {EMBEDDING: "embeddings.word_embeddings.weight", "position_embd.weight": "embeddings.position_embeddings.weight"}
BERT_ENDS |= {encoders.SEGMENTS: "embeddings.token_type_embeddings.weight"}
BERT_ENDS |= {f"token_embd_norm.{kind}": f"embeddings.LayerNorm.{kind}" for kind in ("weight", "bias")}
NOMIC = {"attn_qkv": "attn.Wqkv", "attn_output": "attn.out_proj", "attn_output_norm": "norm1", "layer_output_norm": "norm2"}
NOMIC |= {"ffn_up": "mlp.fc11", "ffn_gate": "mlp.fc12", "ffn_down": "mlp.fc2"}
NOMIC_ENDS = {name: BERT_ENDS[name] for name in (EMBEDDING, encoders.SEGMENTS)}
NOMIC_ENDS |= {f"token_embd_norm.{kind}": f"emb_ln.{kind}" for kind in ("weight", "bias")}
SCORES = {f"cls.{kind}": f"pooler.dense.{kind}" for kind in ("weight", "bias")}
SCORES |= {f"cls.output.{kind}": f"classifier.{kind}" for kind in ("weight", "bias")}
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
    ends: Mapping[str, str] = field(default_factory=lambda: ENDS)
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
    QWEN_NEXT,
    settings.qwen3_5,
    gain=1.0,
    ungained=("ssm_norm",),
    layouts=tiled_heads,
    drafts=QWEN_DRAFTS,
)
ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", "llama", LLAMA, settings.nothing_else, interleaved=True),
    "smollm3": Architecture("SmolLM3ForCausalLM", "smollm3", LLAMA, settings.no_windows, interleaved=True),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2", LLAMA, settings.no_windows),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3", LLAMA | HEAD_NORMS, settings.no_windows),
    "qwen2vl": Architecture("Qwen2ForCausalLM", "qwen2", LLAMA, settings.qwen2_vl),
    "qwen3vl": Architecture("Qwen3ForCausalLM", "qwen3", LLAMA | HEAD_NORMS, settings.qwen3_vl),
    "phi3": Architecture(
        "Phi3ForCausalLM",
        "phi3",
        NORMS
        | {"attn_qkv": "self_attn.qkv_proj", "attn_output": "self_attn.o_proj"}
        | {"ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"},
        settings.phi3,
    ),
    "gemma3": Architecture(
        "Gemma3ForCausalLM",
        "gemma3_text",
        ATTENTION | MLP | GEMMA_NORMS,
        settings.gemma3,
        gain=1.0,
    ),
    "gemma4": Architecture("Gemma4ForCausalLM", "gemma4_text", GEMMA4, settings.gemma4, ends=ENDS | GEMMA4_ENDS),
    "qwen2moe": Architecture(
        "Qwen2MoeForCausalLM",
        "qwen2_moe",
        NORMS | ATTENTION | EXPERTS | SHARED | {"ffn_gate_inp": "mlp.gate", "ffn_gate_inp_shexp": "mlp.shared_expert_gate"},
        settings.qwen2_moe,
    ),
    "qwen3moe": Architecture(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        NORMS | ATTENTION | HEAD_NORMS | EXPERTS | {"ffn_gate_inp": "mlp.gate"},
        settings.qwen3_moe,
    ),
    "olmo2": Architecture("Olmo2ForCausalLM", "olmo2", ATTENTION | MLP | HEAD_NORMS | POST_NORMS, settings.nothing_else),
    "exaone4": Architecture("Exaone4ForCausalLM", "exaone4", ATTENTION | MLP | HEAD_NORMS | POST_NORMS, settings.exaone4),
    "glm4": Architecture("Glm4ForCausalLM", "glm4", NORMS | ATTENTION | GLM_NORMS | GLM_MLP, settings.glm4),
    "granite": Architecture("GraniteForCausalLM", "granite", LLAMA, settings.granite, interleaved=True),
    "granitehybrid": Architecture(
        "GraniteMoeHybridForCausalLM",
        "granitemoehybrid",
        LLAMA | MAMBA | EXPERTS | SHARED | {"ffn_gate_inp": "block_sparse_moe.router.layer"},
        settings.granite_hybrid,
        interleaved=True,
        layouts=decays,
    ),
    "falcon-h1": Architecture(
        "FalconH1ForCausalLM",
        "falcon_h1",
        FALCON_H1,
        settings.falcon_h1,
        ends=ENDS | {NORM: "model.final_layernorm.weight"},
        layouts=decays,
    ),
    "nemotron_h": Architecture(
        "NemotronHForCausalLM",
        "nemotron_h",
        NEMOTRON_H,
        nemotron_h,
        ends={EMBEDDING: "model.embeddings.weight", NORM: "model.norm_f.weight", HEAD: ENDS[HEAD]},
        layouts=decays,
    ),
    "command-r": Architecture("CohereForCausalLM", "cohere", COHERE, settings.command_r, epsilon="layer_norm_eps"),
    "cohere2": Architecture("Cohere2ForCausalLM", "cohere2", COHERE, settings.cohere2, epsilon="layer_norm_eps"),
    "hunyuan-dense": Architecture(
        "HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense", LLAMA | HUNYUAN_NORMS, settings.nothing_else
    ),
    "stablelm": Architecture(
        "StableLmForCausalLM", "stablelm", LLAMA, settings.stablelm, epsilon="layer_norm_eps", ends=ENDS | NORM_BIAS
    ),
    "starcoder2": Architecture(
        "Starcoder2ForCausalLM",
        "starcoder2",
        NORMS | ATTENTION | {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        settings.starcoder2,
        epsilon="norm_epsilon",
        ends=ENDS | NORM_BIAS,
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
        FALCON,
        falcon,
        epsilon="layer_norm_epsilon",
        ends={EMBEDDING: "transformer.word_embeddings.weight", HEAD: "lm_head.weight"}
        | {NORM: "transformer.ln_f.weight", "output_norm.bias": "transformer.ln_f.bias"},
        layers="transformer.h.",
    ),
    "bloom": Architecture(
        "BloomForCausalLM",
        "bloom",
        BLOOM,
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
        MPT,
        alibi.mpt,
        epsilon="layer_norm_epsilon",
        ends={EMBEDDING: "transformer.wte.weight", HEAD: "lm_head.weight", NORM: "transformer.norm_f.weight"},
        layers="transformer.blocks.",
    ),
    "lfm2": Architecture("Lfm2ForCausalLM", "lfm2", ATTENTION | LFM2 | LFM2_CONVOLUTION, settings.lfm2, ends=ENDS | LFM2_NORM),
    "gpt-oss": Architecture(
        "GptOssForCausalLM",
        "gpt_oss",
        {"attn_norm": "input_layernorm"} | ATTENTION | GPT_OSS | EXPERTS,
        settings.gpt_oss,
        # llama.cpp rounds the bounds of its frequencies, the checkpoints do not.
        scaling={"truncate": False},
    ),
    "qwen3next": Architecture(
        "Qwen3NextForCausalLM",
        "qwen3_next",
        QWEN_NEXT | QWEN_EXPERTS,
        settings.qwen3_next,
        gain=1.0,
        ungained=("ssm_norm",),
        layouts=decays,
    ),
    "qwen35": QWEN_3_5,
    "qwen35moe": replace(
        QWEN_3_5,
        family="Qwen3_5MoeForCausalLM",
        model_type="qwen3_5_moe_text",
        tensors=QWEN_NEXT | QWEN_EXPERTS,
        settings=settings.qwen3_5_moe,
    ),
    "ernie4_5": Architecture("Ernie4_5ForCausalLM", "ernie4_5", LLAMA, settings.ernie4_5),
    "bert": Architecture(
        "BertModel",
        "bert",
        BERT,
        encoders.bert,
        epsilon="layer_norm_eps",
        ends=BERT_ENDS,
        rows=(encoders.SEGMENTS,),
        layers="encoder.layer.",
    ),
    "nomic-bert": Architecture(
        "NomicBertModel",
        "nomic_bert",
        NOMIC,
        encoders.nomic_bert,
        epsilon="layer_norm_eps",
        ends=NOMIC_ENDS,
        rows=(encoders.SEGMENTS,),
        layers="encoder.layers.",
    ),
}
"""llama.cpp's name of an architecture, in `general.architecture`."""
MIXTRAL_ARCHITECTURE = Architecture(
    "MixtralForCausalLM",
    "mixtral",
    NORMS
    | ATTENTION
    | {"ffn_gate_inp": "block_sparse_moe.gate"}
    | {name: f"block_sparse_moe.experts.{{}}.{module}" for name, module in MIXTRAL.items()},
    settings.mixtral,
    interleaved=True,
)
"""Mixtral's files say "llama" and have experts."""
OLMO3_ARCHITECTURE = replace(ARCHITECTURES["olmo2"], family="Olmo3ForCausalLM", model_type="olmo3", settings=settings.olmo3)
"""OLMo 3's files say "olmo2" and have windows."""

FALCON_40B = replace(ARCHITECTURES["falcon"], tensors=FALCON | {"attn_norm": "ln_mlp", "attn_norm_2": "ln_attn"})
"""Larger models have two norms in a layer, of which the first in the file is that of the MLP."""
BERT_RERANKER = replace(
    ARCHITECTURES["bert"],
    family="BertForSequenceClassification",
    settings=encoders.bert_reranker,
    ends=BERT_ENDS | SCORES,
    rows=(encoders.SEGMENTS, encoders.SCORE),
)
"""Rerankers' files say "bert" and have a head; of all kinds of BERT it is of one form."""


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
    if name == "bert" and encoders.SCORE in shapes:
        return BERT_RERANKER, keys
    return ARCHITECTURES[name], keys
