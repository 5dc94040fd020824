"""What the keys of a GGUF file say of a Nemotron-H, with experts or without, as keys of transformers' config.json.

Read in llama.cpp's converter and model code.
"""

from __future__ import annotations

from edgeq.converters.importers.gguf_keys import GgufKeys, Settings
from edgeq.converters.importers.gguf_settings import attending

SIGMOID = 2
"""llama.cpp's number of the function that ranks experts."""


def nemotron_h(keys: GgufKeys) -> Settings:
    found = network(keys, "mlp")
    return found | {"mlp_bias": keys.has("ffn_up.bias", found["layers_block_type"].index("mlp"))}


def nemotron_h_moe(keys: GgufKeys) -> Settings:
    """With experts, and one for all tokens, in place of every MLP."""
    keys.only("expert_gating_func", SIGMOID)
    keys.only("expert_shared_count", 1)
    return network(keys, "moe") | {
        "n_routed_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "moe_shared_expert_intermediate_size": keys.integer("expert_shared_feed_forward_length"),
        "norm_topk_prob": keys.flag("expert_weights_norm", False),
        # 0 says that there is none.
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0) or 1.0,
    }


def network(keys: GgufKeys, inside: str) -> Settings:
    """A layer with heads of keys and values has attention, one with inner channels is `inside`, any other a state space.

    The file has a rotation that nothing uses, and its rows of queries and keys may lie as that would want them: both do alike,
    so scores are the same.
    """
    # llama.cpp's converter writes it beside the epsilon of the norms that there are.
    keys.value("attention.layer_norm_epsilon")
    widths, inner = keys.by_layer("feed_forward_length"), {each for each in keys.by_layer("feed_forward_length") if each}
    heads, attends = attending(keys)
    kinds = ["attention" if a else inside if width else "mamba" for a, width in zip(attends, widths, strict=True)]
    if len(inner) != 1 or any(a and width for a, width in zip(attends, widths, strict=True)) or "mamba" not in kinds:
        raise keys.wrong("feed_forward_length", widths, "the same for each layer of an MLP, 0 for the others, each kind there")
    space_heads, channels = keys.integer("ssm.time_step_rank"), keys.integer("ssm.inner_size")
    if not space_heads or channels % space_heads:
        raise keys.wrong("ssm.inner_size", channels, f"a multiple of the {space_heads} heads of ssm.time_step_rank")
    return {
        "num_key_value_heads": heads,
        "layers_block_type": kinds,
        "intermediate_size": inner.pop(),
        "layer_norm_epsilon": keys.number("attention.layer_norm_rms_epsilon"),
        "mamba_num_heads": space_heads,
        "mamba_head_dim": channels // space_heads,
        "n_groups": keys.integer("ssm.group_count"),
        "ssm_state_size": keys.integer("ssm.state_size"),
        "conv_kernel": keys.integer("ssm.conv_kernel"),
        "use_conv_bias": keys.has("ssm_conv1d.bias", kinds.index("mamba")),
        "partial_rotary_factor": 1,
    }
