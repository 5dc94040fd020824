"""Activations of an MLP."""

from __future__ import annotations

from edgeq.errors import UnsupportedError

GATED, PLAIN = ("silu", "gelu_pytorch_tanh"), ("relu", "relu2", "gelu", "quick_gelu")
"""Activations with a gate and without one, where `gated_mlp` does not say."""
ACTIVATIONS = (*GATED, *PLAIN)


def check_activation(name: str) -> None:
    """UnsupportedError: it is none of ACTIVATIONS."""
    if name not in ACTIVATIONS:
        raise UnsupportedError(f"hidden_act {name!r} is not supported; supported: {', '.join(ACTIVATIONS)}")
