"""What the keys of a GGUF file say of a Nemotron-H, as keys of transformers' config.json.

Read in llama.cpp's converter and model code.
"""

from __future__ import annotations

from edgeq.converters.importers.gguf_keys import GgufKeys, Settings
from edgeq.converters.importers.gguf_settings import attending


def nemotron_h(keys: GgufKeys) -> Settings:
    """A layer with heads of keys and values has attention, one with inner channels is an MLP, any other a state space.

    The file has a rotation that nothing uses, and its rows of queries and keys may lie as that would want them: both do alike,
    so scores are the same.
    """
    # llama.cpp's converter writes it beside the epsilon of the norms that there are.
    keys.value("attention.layer_norm_epsilon")
    widths, inner = keys.by_layer("feed_forward_length"), {each for each in keys.by_layer("feed_forward_length") if each}
    heads, attends = attending(keys)
    kinds = ["attention" if a else "mlp" if width else "mamba" for a, width in zip(attends, widths, strict=True)]
    if len(inner) != 1 or any(a and width for a, width in zip(attends, widths, strict=True)) or "mamba" not in kinds:
        raise keys.wrong("feed_forward_length", widths, "the same for each layer of an MLP, 0 for the others, each kind there")
    space_heads, channels = keys.integer("ssm.time_step_rank"), keys.integer("ssm.inner_size")
    if not space_heads or channels % space_heads:
        raise keys.wrong("ssm.inner_size", channels, f"a multiple of the {space_heads} heads of ssm.time_step_rank")
    return {
        "num_key_value_heads": heads,
        "layers_block_type": kinds,
        "intermediate_size": inner.pop(),
        "mlp_bias": keys.has("ffn_up.bias", kinds.index("mlp")),
        "layer_norm_epsilon": keys.number("attention.layer_norm_rms_epsilon"),
        "mamba_num_heads": space_heads,
        "mamba_head_dim": channels // space_heads,
        "n_groups": keys.integer("ssm.group_count"),
        "ssm_state_size": keys.integer("ssm.state_size"),
        "conv_kernel": keys.integer("ssm.conv_kernel"),
        "use_conv_bias": keys.has("ssm_conv1d.bias", kinds.index("mamba")),
        "partial_rotary_factor": 1,
    }
