"""Nomic BERT (Nussbaum et al. 2024, arXiv 2402.01613): BERT with a rope, a SiLU gate and no biases of linear layers.

Published checkpoints have keys of GPT-2's names, those that transformers writes its own; tensors are the same.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from edgeq.converters.checkpoint.checkpoint import TensorSource
from edgeq.converters.families.encoders.bert import types_of
from edgeq.converters.families.family import EMBEDDING, NORM, FamilyDescription, Values
from edgeq.converters.families.positions import rope_of
from edgeq.converters.families.rearranged import Sources
from edgeq.errors import FormatError, UnsupportedError
from edgeq.network.config import ModelConfig

THETA = 1000.0
PUBLISHED = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
    "hidden_act": "activation_function",
}
"""Key of ModelConfig -> what published checkpoints call it."""
GATES = {"silu": "silu", "swiglu": "silu"}


def nomic_settings(values: Values) -> dict[str, Any]:
    published = "n_embd" in values
    keys = PUBLISHED if published else {key: key for key in PUBLISHED}
    hidden, heads, gate = (values[keys[key]] for key in ("hidden_size", "num_attention_heads", "hidden_act"))
    if not isinstance(gate, str) or gate not in GATES:
        raise UnsupportedError(f"{keys['hidden_act']} {gate!r:.80} is not supported; supported: {', '.join(GATES)}")
    size = values.get("head_dim")
    if size is None and hidden % heads:
        raise FormatError(f"{keys['hidden_size']} {hidden} is not a multiple of {keys['num_attention_heads']} {heads}")
    settings = values["rope_parameters"] or {}
    return {
        "layer_norm": True,
        "rms_norm_eps": values["layer_norm_epsilon" if published else "layer_norm_eps"],
        "rope": rope_of(values, "rope_parameters", settings, values["rotary_emb_base" if published else "rope_theta"]),
        "num_key_value_heads": heads,
        "head_dim": hidden // heads if size is None else size,
        "hidden_act": GATES[gate],
        "gated_mlp": True,
        "normed_residual": "all",
        "bidirectional": True,
    }


def nomic_sources(config: ModelConfig, types: int) -> Sources:
    """`types`: segments (token types); the row of the first is added to every embedding."""
    hidden, inner, layers, heads = config.hidden_size, config.intermediate_size, config.num_hidden_layers, config.query_size
    table = (config.vocab_size, hidden)
    segment = TensorSource("embeddings.token_type_embeddings.weight", (types, hidden), (1, hidden))
    sources = {EMBEDDING: TensorSource("embeddings.word_embeddings.weight", table, table, every=segment)}

    def same(ours: str, theirs: str, shape: tuple[int, ...]) -> None:
        sources[ours] = TensorSource(theirs, shape, shape)

    for kind in ("weight", "bias"):
        # A norm after a block is counted to the block after it, as in BERT.
        theirs = ["emb_ln", *(f"encoder.layers.{layer}.norm2" for layer in range(layers))]
        norms = [*(f"model.layers.{layer}.input_layernorm" for layer in range(layers)), NORM.removesuffix(".weight")]
        for mine, name in zip(norms, theirs, strict=True):
            same(f"{mine}.{kind}", f"{name}.{kind}", (hidden,))
        for layer in range(layers):
            first = f"model.layers.{layer}.post_attention_layernorm.{kind}"
            same(first, f"encoder.layers.{layer}.norm1.{kind}", (hidden,))
    for layer in range(layers):
        p, block = f"model.layers.{layer}.", f"encoder.layers.{layer}."
        for row, part in enumerate(("q_proj", "k_proj", "v_proj")):
            fused, shape = f"{block}attn.Wqkv.weight", (heads, hidden)
            sources[f"{p}self_attn.{part}.weight"] = TensorSource(fused, (3 * heads, hidden), shape, row * heads)
        same(f"{p}self_attn.o_proj.weight", f"{block}attn.out_proj.weight", (hidden, heads))
        same(f"{p}mlp.up_proj.weight", f"{block}mlp.fc11.weight", (inner, hidden))
        same(f"{p}mlp.gate_proj.weight", f"{block}mlp.fc12.weight", (inner, hidden))
        same(f"{p}mlp.down_proj.weight", f"{block}mlp.fc2.weight", (hidden, inner))
    return sources


def of_checkpoint(values: Values) -> FamilyDescription:
    """The description of one: its keys have the names of GPT-2, or those of transformers."""
    types = types_of({**NOMIC.defaults, **values})
    keys = PUBLISHED if "n_embd" in values else {}
    return replace(NOMIC, keys=keys, sources=lambda config: nomic_sources(config, types))


NOMIC = FamilyDescription(
    "NomicBertModel",
    {
        "vocab_size": 30528,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "hidden_act": "silu",
        "activation_function": "swiglu",
        "max_position_embeddings": 2048,
        "n_positions": 8192,
        "type_vocab_size": 2,
        "layer_norm_eps": 1e-12,
        "layer_norm_epsilon": 1e-12,
        "rope_parameters": None,
        "rope_theta": THETA,
        "rotary_emb_base": THETA,
        "tie_word_embeddings": True,
    },
    {
        "qkv_proj_bias": (None, False),
        "mlp_fc1_bias": (None, False),
        "mlp_fc2_bias": (None, False),
        "prenorm": (None, False),
        "parallel_block": (None, False),
        "use_rms_norm": (None, False),
        "causal": (None, False),
        "rotary_emb_fraction": (None, 1),
        "rotary_emb_interleaved": (None, False),
        "rotary_emb_scale_base": (None,),
        "rotary_scaling_factor": (None,),
        "rope_scaling": (None,),
        "scale_attn_weights": (None, True),
        "scale_attn_by_inverse_layer_idx": (None, False),
        "moe_every_n_layers": (None, 0),
        "num_experts": (None, 0),
    },
    nomic_settings,
    renamed={"nomic_bert.": "", "bert.": ""},
    headless=True,
    variants=of_checkpoint,
    own_code=True,
)
