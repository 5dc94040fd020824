"""The MLP of a layer: activations, and experts in its place."""

from __future__ import annotations

from typing import Any

from edgeq.errors import FormatError, UnsupportedError
from edgeq.network.json_records import check_integer, check_positive

GATED, PLAIN = ("silu", "gelu_pytorch_tanh"), ("relu", "relu2", "gelu", "quick_gelu")
"""Activations with a gate and without one, where `gated_mlp` does not say."""
ACTIVATIONS = (*GATED, *PLAIN)
MAX_EXPERTS = 32_768
"""The most experts of all layers together."""
MAX_INNER = 1_048_576
"""The most channels inside of an MLP."""
SCORES = ("softmax", "sigmoid")
"""What experts are ranked and weighted by."""


def check_activation(name: str) -> None:
    """UnsupportedError: it is none of ACTIVATIONS."""
    if name not in ACTIVATIONS:
        raise UnsupportedError(f"hidden_act {name!r} is not supported; supported: {', '.join(ACTIVATIONS)}")


def check_experts(stack: Any) -> None:
    """Check those of a `Stack` (stack.py, which imports this module).

    FormatError, UnsupportedError: experts that do not fit each other or the rest.
    """
    shared, beside = stack.shared_expert_intermediate_size, stack.experts_beside_mlp
    limits = {
        "num_experts": MAX_EXPERTS // stack.num_hidden_layers,
        "num_experts_per_tok": stack.num_experts,
        "shared_expert_intermediate_size": MAX_INNER if stack.num_experts else 0,
    }
    for name, limit in limits.items():
        check_integer(name, getattr(stack, name), 0, limit)
    if stack.num_experts and not stack.num_experts_per_tok:
        raise FormatError(f"config has {stack.num_experts} experts and uses none of them")
    fits = stack.hidden_act == "silu" or beside if stack.gated else stack.hidden_act == "relu2" and not beside
    if stack.num_experts and not fits:
        raise UnsupportedError(
            f"experts with hidden_act {stack.hidden_act!r}{'' if stack.gated else ' and no gate'} are not supported; "
            "supported: silu, and relu2 without a gate"
        )
    if not stack.shared_expert_gate and (not shared or beside):
        raise UnsupportedError("shared_expert_gate of false is supported with a shared expert, without experts_beside_mlp")
    normed = stack.pre_norms and stack.post_norms and not stack.layer_norm
    if beside and (not shared or not normed or stack.num_kv_shared_layers):
        raise UnsupportedError(
            "experts_beside_mlp is supported with shared_expert_intermediate_size, pre_norms and post_norms, without "
            "layer_norm and num_kv_shared_layers"
        )
    check_positive("swiglu_alpha", stack.swiglu_alpha)
    if stack.swiglu_limit is not None:
        check_positive("swiglu_limit", stack.swiglu_limit)
        if not stack.num_experts or shared or not stack.gated:
            raise UnsupportedError("swiglu_limit without experts that have a gate, or beside a shared one, is not supported")
    if stack.num_experts and stack.post_norms and not beside:
        raise UnsupportedError("experts with a norm after them (post_norms) are not supported")
    if stack.expert_scores not in SCORES:
        raise UnsupportedError(f"expert_scores {stack.expert_scores!r:.80} is not known; supported: {', '.join(SCORES)}")
    check_positive("routed_scaling_factor", stack.routed_scaling_factor)
    if stack.expert_scores == "softmax" and stack.routed_scaling_factor != 1:
        raise UnsupportedError("routed_scaling_factor is supported with expert_scores 'sigmoid'")
    if stack.expert_scores != "softmax" and (not stack.num_experts or beside):
        raise UnsupportedError(f"expert_scores {stack.expert_scores!r} is supported with experts, without experts_beside_mlp")
