"""Layers with a state in place of attention: gated convolutions and gated delta nets."""

from __future__ import annotations

from collections.abc import Iterator

from edgeq.format.manifest import layer_prefix
from edgeq.format.metadata import Metadata
from edgeq.network.delta_net import DeltaNet
from edgeq.network.stack import Stack
from edgeq.runtime.network.block_parts import norm, projection, residual
from edgeq.targets.family_operations import DeltaRule, GatedNorm, ShortConv, SiluConv, delta_state
from edgeq.targets.graph import Linear, Operation, Select
from edgeq.targets.states import StateSpec


def layer_states(config: Stack) -> tuple[StateSpec, ...]:
    """The states of each layer that has some."""
    if net := config.delta_net:
        return (
            StateSpec("tail", (net.taps - 1, net.channels)),
            delta_state(net.key_heads, net.value_heads, net.key_dim, net.value_dim),
        )
    return (StateSpec("tail", (config.conv_taps - 1, config.hidden_size)),) if config.conv_layers else ()


def delta_widths(net: DeltaNet) -> dict[str, int]:
    return {
        "delta_in": net.channels + net.value_size,
        "delta_rates": 2 * net.value_heads,
        "convolved": net.channels,
        "recalled": net.value_size,
        "delta_normed": net.value_size,
    }


def conv_block(metadata: Metadata, config: Stack, layer: int, state: int, *, select: bool = False) -> Iterator[Operation]:
    """x += conv_out(c * conv(b * u)), with b, c, u = conv_in(norm(x)).

    state    index in `Graph.states`;  select: as of `attention_block`
    """
    p = layer_prefix(config, layer)
    yield norm(metadata, config, layer, "x", f"{p}attention_norm", "normed")
    yield Linear(layer, "normed", metadata.linears[f"{p}conv_in"], "conv_in")
    yield ShortConv(layer, "conv_in", config.hidden_size, metadata.arrays[f"{p}conv"], "convolved", state)
    if select:
        yield Select(layer, ("x", "convolved"))
    yield from residual(metadata, config, layer, "convolved", f"{p}conv_out", f"{p}post_attention_norm")


def delta_block(metadata: Metadata, config: Stack, layer: int, state: int, *, select: bool = False) -> Iterator[Operation]:
    """x += delta_out(norm(delta(silu(conv(qkv)), rates)) * silu(gate)), with qkv, gate = delta_in(norm(x)) and the rates of
    norm(x).

    state    index in `Graph.states` of the convolution's, before that of the delta rule;  select: as of `attention_block`
    """
    net, arrays, p = config.delta_net, metadata.arrays, layer_prefix(config, layer)
    assert net is not None
    yield norm(metadata, config, layer, "x", f"{p}attention_norm", "normed")
    yield from projection(metadata, config, layer, "normed", f"{p}delta_in", "delta_in")
    yield from projection(metadata, config, layer, "normed", f"{p}delta_rates", "delta_rates")
    yield SiluConv(layer, "delta_in", net.channels, arrays[f"{p}delta_conv"], "convolved", state)
    yield DeltaRule(
        layer, "convolved", "delta_rates", net.key_heads, net.value_heads, net.key_dim, net.value_dim,
        arrays[f"{p}decay_log"], arrays[f"{p}dt_bias"], net.beta_scale, "recalled", state + 1,
    )  # fmt: skip
    if select:
        yield Select(layer, ("x", "recalled", "delta_in"))
    heads, gain, eps = net.value_heads, arrays[f"{p}delta_norm"], net.norm_eps or config.rms_norm_eps
    yield GatedNorm(layer, "recalled", "delta_in", net.channels, heads, net.value_dim, gain, eps, "delta_normed")
    yield from residual(metadata, config, layer, "delta_normed", f"{p}delta_out", f"{p}post_attention_norm")
