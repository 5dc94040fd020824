"""GPT-2, GPT-BigCode (StarCoder, SantaCoder), GPT-NeoX (Pythia), StarCoder 2 and StableLM: LayerNorm with biases.

All but StableLM have an MLP without a gate.  Queries, keys and values of the first three lie in one matrix, as the rows of each
part or head by head; GPT-2 keeps its matrices transposed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from edgeq.converters.checkpoint.checkpoint import TensorSource
from edgeq.converters.families.decoders.llama import DEFAULTS, NEUTRAL, NEUTRAL_LAYER, NO_EXPERTS, QKV, head_settings
from edgeq.converters.families.family import (
    EMBEDDING,
    HEAD,
    NORM,
    NORM_BIAS,
    POSITIONS,
    FamilyDescription,
    Values,
    linear_module,
)
from edgeq.converters.families.positions import one_window, partial_rope
from edgeq.converters.families.positions import rope as rope_from
from edgeq.converters.families.rearranged import Sources, flag
from edgeq.errors import FormatError, UnsupportedError
from edgeq.network.config import ModelConfig
from edgeq.network.rope import Rope

ALL_BIASES = ("q", "k", "v", "o", "up", "down")
TANH_GELUS = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh")
"""Names of one formula."""
ACTIVATIONS = {"gelu": "gelu", "relu": "relu"} | dict.fromkeys(TANH_GELUS, "gelu_pytorch_tanh")
"""Activations of MLPs without a gate -> as `Stack` calls them."""
GPT2_KEYS = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    # Its size is checked; settings say what an absent n_inner means.
    "intermediate_size": "n_embd",
    "hidden_act": "activation_function",
}
TRANSPOSED, BY_HEADS = "fan_in_fan_out", "qkv_by_heads"
"""Keys that no config.json has, of sources that hold the same model in another order: whether GPT-2's matrices lie
transposed, and whether the rows of GPT-NeoX's queries, keys and values lie head by head or part by part."""
GPT2_BEGINNINGS = {each: f"transformer.{each}" for each in ("wte.", "wpe.", "h.", "ln_f.")}
"""Checkpoints that were saved without their head."""


def plain_settings(values: Values, key: str) -> dict[str, Any]:
    """Settings of an MLP without a gate and norms with biases.  UnsupportedError: another activation."""
    if values[key] not in tuple(ACTIVATIONS):
        raise UnsupportedError(f"{key} {values[key]!r:.80} is not supported; supported: {', '.join(ACTIVATIONS)}")
    return {"hidden_act": ACTIVATIONS[values[key]], "gated_mlp": False, "layer_norm": True}


def whole_heads(hidden: int, heads: int) -> int:
    if hidden % heads:
        raise FormatError(f"a hidden size of {hidden} is not a multiple of {heads} heads")
    return hidden // heads


def gpt2_settings(values: Values) -> dict[str, Any]:
    hidden, heads, inner = values["n_embd"], values["n_head"], values["n_inner"]
    return plain_settings(values, "activation_function") | {
        "rms_norm_eps": values["layer_norm_epsilon"],
        "intermediate_size": 4 * hidden if inner is None else inner,
        "num_key_value_heads": heads,
        "head_dim": whole_heads(hidden, heads),
        "rope": Rope(theta=10000.0, kind="learned"),
        "query_pre_attn_scalar": None if flag(values, "scale_attn_weights") else 1.0,
    }


def bigcode_settings(values: Values) -> dict[str, Any]:
    return gpt2_settings(values) | ({"num_key_value_heads": 1} if flag(values, "multi_query") else {})


def neox_settings(values: Values) -> dict[str, Any]:
    hidden, heads = values["hidden_size"], values["num_attention_heads"]
    partial_of = {"partial_rotary_factor": values["rotary_pct"], **values, "rope_theta": values["rotary_emb_base"]}
    return plain_settings(values, "hidden_act") | {
        "rms_norm_eps": values["layer_norm_eps"],
        "num_key_value_heads": heads,
        "head_dim": whole_heads(hidden, heads),
        "rope": partial_rope(partial_of),
        "parallel_blocks": "two_norms" if flag(values, "use_parallel_residual") else "none",
    }


def starcoder2_settings(values: Values) -> dict[str, Any]:
    heads, head_dim = values["num_attention_heads"], values["head_dim"]
    return plain_settings(values, "hidden_act") | {
        "rms_norm_eps": values["norm_epsilon"],
        "num_key_value_heads": values["num_key_value_heads"],
        "head_dim": whole_heads(values["hidden_size"], heads) if head_dim is None else head_dim,
        "rope": rope_from(values),
    }


def stablelm_settings(values: Values) -> dict[str, Any]:
    # No head size of its own.
    return head_settings({**values, "head_dim": None}) | {
        "rms_norm_eps": values["layer_norm_eps"],
        "layer_norm": True,
        "gated_mlp": True,
        "rope": partial_rope(values),
        "parallel_blocks": "one_norm" if flag(values, "use_parallel_residual") else "none",
    }


def by_heads(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The rows of q, k and v in a matrix that has, for one head of keys after the other, its heads of queries, then k and v."""
    size, kv_heads = config.head_dim, config.num_key_value_heads
    queries = config.num_attention_heads // kv_heads
    places = {"q": range(queries), "k": (queries,), "v": (queries + 1,)}
    return {
        part: tuple(
            (group * (queries + 2) + at) * size + i for group in range(kv_heads) for at in places[part] for i in range(size)
        )
        for part in QKV
    }


def attention_rows(config: ModelConfig, mixed: bool) -> Iterator[tuple[str, int, int, tuple[int, ...]]]:
    """Part, first row, rows, and their order where they are apart, of q, k and v in the matrix that has all of them."""
    orders, row = by_heads(config) if mixed else {}, 0
    for part, rows in zip(QKV, (config.query_size, config.kv_size, config.kv_size), strict=True):
        yield part, 0 if mixed else row, rows, orders.get(part, ())
        row += rows


def fused_sources(
    config: ModelConfig, theirs: str, names: dict[str, str], biases: tuple[str, ...], *, mixed: bool, transposed: bool = False
) -> Sources:
    """The linear layers of every layer.

    theirs    what the names of its layers begin with;  names: "qkv", "o", "up", "down" -> modules
    mixed     rows of q, k and v lie head by head
    """
    hidden, inner, sources = config.hidden_size, config.intermediate_size, Sources()
    total = config.query_size + 2 * config.kv_size
    parts = [("qkv", total, hidden, part, row, rows, order) for part, row, rows, order in attention_rows(config, mixed)]
    for part, rows, columns in (("o", hidden, config.query_size), ("up", inner, hidden), ("down", hidden, inner)):
        parts.append((part, rows, columns, part, 0, rows, ()))
    for layer in range(config.num_hidden_layers):
        for module, height, columns, part, row, rows, order in parts:
            ours, name = f"model.layers.{layer}.{linear_module(part)}", f"{theirs}{layer}.{names[module]}"
            stored = (columns, height) if transposed else (height, columns)
            sources[f"{ours}.weight"] = TensorSource(
                f"{name}.weight", stored, (rows, columns), row, order=order, transposed=transposed
            )
            if part in biases:
                sources[f"{ours}.bias"] = TensorSource(f"{name}.bias", (height,), (rows,), row, order=order)
    return sources


def norm_sources(config: ModelConfig, theirs: str, names: dict[str, str], last: str) -> Sources:
    size, sources = (config.hidden_size,), Sources()
    for kind, ours in (("weight", NORM), ("bias", NORM_BIAS)):
        sources[ours] = TensorSource(f"{last}.{kind}", size, size)
        for layer in range(config.num_hidden_layers):
            for module, name in names.items():
                sources[f"model.layers.{layer}.{module}.{kind}"] = TensorSource(f"{theirs}{layer}.{name}.{kind}", size, size)
    return sources


def table_sources(config: ModelConfig, embedding: str, head: str) -> Sources:
    table = (config.vocab_size, config.hidden_size)
    sources = {EMBEDDING: TensorSource(embedding, table, table)}
    if not config.tie_word_embeddings and config.pooling is None:
        sources[HEAD] = TensorSource(head, table, table)
    return sources


def gpt2_sources(config: ModelConfig, *, mixed: bool, transposed: bool) -> Sources:
    p, positions = "transformer.", (config.max_position_embeddings, config.hidden_size)
    linears = {"qkv": "attn.c_attn", "o": "attn.c_proj", "up": "mlp.c_fc", "down": "mlp.c_proj"}
    norms = {"input_layernorm": "ln_1", "post_attention_layernorm": "ln_2"}
    return {
        **table_sources(config, f"{p}wte.weight", HEAD),
        POSITIONS: TensorSource(f"{p}wpe.weight", positions, positions),
        **norm_sources(config, f"{p}h.", norms, f"{p}ln_f"),
        **fused_sources(config, f"{p}h.", linears, ALL_BIASES, mixed=mixed, transposed=transposed),
    }


def neox_sources(config: ModelConfig, biases: tuple[str, ...], *, mixed: bool) -> Sources:
    p = "gpt_neox."
    linears = {"qkv": "attention.query_key_value", "o": "attention.dense"}
    linears |= {"up": "mlp.dense_h_to_4h", "down": "mlp.dense_4h_to_h"}
    norms = {each: each for each in ("input_layernorm", "post_attention_layernorm")}
    return {
        **table_sources(config, f"{p}embed_in.weight", "embed_out.weight"),
        **norm_sources(config, f"{p}layers.", norms, f"{p}final_layer_norm"),
        **fused_sources(config, f"{p}layers.", linears, biases, mixed=mixed),
    }


def starcoder2_sources(config: ModelConfig, biases: tuple[str, ...]) -> Sources:
    hidden, inner, sources = config.hidden_size, config.intermediate_size, Sources()
    for layer in range(config.num_hidden_layers):
        p = f"model.layers.{layer}.mlp."
        for part, name, shape in (("up", "c_fc", (inner, hidden)), ("down", "c_proj", (hidden, inner))):
            sources[f"{p}{part}_proj.weight"] = TensorSource(f"{p}{name}.weight", shape, shape)
            if part in biases:
                sources[f"{p}{part}_proj.bias"] = TensorSource(f"{p}{name}.bias", shape[:1], shape[:1])
    return sources


def gpt2(hf: Values) -> FamilyDescription:
    transposed = flag({**GPT2.defaults, **hf}, TRANSPOSED)
    return replace(GPT2, sources=partial(gpt2_sources, mixed=False, transposed=transposed))


def bigcode(hf: Values) -> FamilyDescription:
    mixed = not flag({**BIGCODE.defaults, **hf}, "multi_query")
    return replace(BIGCODE, sources=partial(gpt2_sources, mixed=mixed, transposed=False))


def neox(hf: Values) -> FamilyDescription:
    values = {**NEOX.defaults, **hf}
    biases = ALL_BIASES if flag(values, "attention_bias") else ("up", "down")
    return replace(NEOX, biases=biases, sources=partial(neox_sources, biases=biases, mixed=flag(values, BY_HEADS)))


def starcoder2(hf: Values) -> FamilyDescription:
    biases = ALL_BIASES if flag({**STARCODER2.defaults, **hf}, "use_bias") else ()
    return replace(STARCODER2, biases=biases, sources=partial(starcoder2_sources, biases=biases))


def stablelm(hf: Values) -> FamilyDescription:
    return replace(STABLELM, biases=QKV if flag({**STABLELM.defaults, **hf}, "use_qkv_bias") else ())


GPT2_DEFAULTS: dict[str, Any] = {
    "n_positions": 1024,
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "n_inner": None,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    "tie_word_embeddings": True,
    TRANSPOSED: True,
}
GPT2_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "scale_attn_by_inverse_layer_idx": (None, False),
    "add_cross_attention": (None, False),
}
CAUSAL_MASKS = (".attn.bias", ".attn.masked_bias")
GPT2 = FamilyDescription(
    "GPT2LMHeadModel",
    GPT2_DEFAULTS,
    GPT2_NEUTRAL,
    gpt2_settings,
    keys=GPT2_KEYS,
    biases=ALL_BIASES,
    derived=CAUSAL_MASKS,
    renamed=GPT2_BEGINNINGS,
    variants=gpt2,
)
BIGCODE = FamilyDescription(
    "GPTBigCodeForCausalLM",
    GPT2_DEFAULTS | {"activation_function": "gelu_pytorch_tanh", "multi_query": True},
    GPT2_NEUTRAL,
    bigcode_settings,
    keys=GPT2_KEYS,
    biases=ALL_BIASES,
    derived=CAUSAL_MASKS,
    renamed=GPT2_BEGINNINGS,
    variants=bigcode,
)
NEOX = FamilyDescription(
    "GPTNeoXForCausalLM",
    DEFAULTS
    | {
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-5,
        "rotary_pct": 0.25,
        "rotary_emb_base": 10000.0,
        "use_parallel_residual": True,
        "attention_bias": True,
        BY_HEADS: True,
    },
    {key: values for key, values in (NEUTRAL_LAYER | NO_EXPERTS).items() if key != "attention_bias"},
    neox_settings,
    derived=(".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq"),
    variants=neox,
)
STARCODER2 = FamilyDescription(
    "Starcoder2ForCausalLM",
    DEFAULTS
    | {
        "hidden_act": "gelu_pytorch_tanh",
        "num_key_value_heads": 2,
        "norm_epsilon": 1e-5,
        "max_position_embeddings": 4096,
        "sliding_window": None,
        "use_bias": True,
        "tie_word_embeddings": True,
    },
    NEUTRAL,
    starcoder2_settings,
    one_window,
    variants=starcoder2,
)
STABLELM = FamilyDescription(
    "StableLmForCausalLM",
    DEFAULTS
    | {
        "num_key_value_heads": 32,
        "layer_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "partial_rotary_factor": 0.25,
        "use_qkv_bias": False,
        "use_parallel_residual": False,
    },
    NEUTRAL_LAYER | NO_EXPERTS | {"qk_layernorm": (None, False)},
    stablelm_settings,
    variants=stablelm,
)
GPT_FAMILIES = (GPT2, BIGCODE, NEOX, STARCODER2, STABLELM)
