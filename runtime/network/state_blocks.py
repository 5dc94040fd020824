"""Layers with a state in place of attention, or beside it: gated convolutions, gated delta nets and state spaces."""

from __future__ import annotations

from collections.abc import Iterator

from edgeq.format.manifest import layer_prefix
from edgeq.format.metadata import Metadata
from edgeq.network.delta_net import DeltaNet
from edgeq.network.ssd import StateSpace
from edgeq.network.stack import Stack
from edgeq.runtime.network.block_parts import norm, projection, residual
from edgeq.targets.family_operations import DeltaRule, Gate, GatedNorm, ShortConv, SiluConv, SsdScan, delta_state, ssd_state
from edgeq.targets.graph import Linear, Operation, Select
from edgeq.targets.states import StateSpec


def layer_states(config: Stack) -> tuple[StateSpec, ...]:
    """The states of each layer that has some."""
    if net := config.delta_net:
        return (
            StateSpec("tail", (net.taps - 1, net.channels)),
            delta_state(net.key_heads, net.value_heads, net.key_dim, net.value_dim),
        )
    if space := config.ssd:
        return (
            StateSpec("tail", (space.taps - 1, space.channels)),
            ssd_state(space.heads, space.head_dim, space.groups, space.state_dim),
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


def ssd_widths(net: StateSpace) -> dict[str, int]:
    return {
        "ssd_in": net.channels + net.inner_size,
        "ssd_dt": net.heads,
        "convolved": net.channels,
        "scanned": net.inner_size,
        **({} if net.norm == "none" else {"ssd_normed": net.inner_size}),
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


def ssd_block(metadata: Metadata, config: Stack, layer: int, state: int, *, select: bool = False) -> Iterator[Operation]:
    """x += ssd_out(norm(scan(silu(conv(xbc)), dt) * silu(gate))), with xbc, gate = ssd_in(norm(x)) and dt = ssd_dt(norm(x)).

    The norm may be before the gate, or there is none.

    state    index in `Graph.states` of the convolution's, before that of the scan;  select: as of `attention_block`
    """
    net, arrays, linears, p = config.ssd, metadata.arrays, metadata.linears, layer_prefix(config, layer)
    assert net is not None
    yield norm(metadata, config, layer, "x", f"{p}attention_norm", "normed")
    yield Linear(layer, "normed", linears[f"{p}ssd_in"], "ssd_in")
    yield Linear(layer, "normed", linears[f"{p}ssd_dt"], "ssd_dt")
    weight, bias = arrays[f"{p}ssd_conv"], arrays[f"{p}ssd_conv_bias"]
    yield SiluConv(layer, "ssd_in", net.channels, weight, "convolved", state, bias)
    yield SsdScan(
        layer, "convolved", "ssd_dt", net.heads, net.head_dim, net.groups, net.state_dim,
        arrays[f"{p}decay_log"], arrays[f"{p}dt_bias"], arrays[f"{p}skip"], net.time_step_limits, "scanned", state + 1,
    )  # fmt: skip
    if select:
        yield Select(layer, ("x", "scanned", "ssd_in"))
    if net.norm == "none":
        yield Gate(layer, "scanned", "ssd_in", net.channels, net.inner_size, "silu")
    else:
        of_group, gain, first = net.inner_size // net.groups, arrays[f"{p}ssd_norm"], net.norm == "after_gate"
        yield GatedNorm(
            layer, "scanned", "ssd_in", net.channels, net.groups, of_group, gain, net.norm_eps, "ssd_normed", gate_first=first
        )
    result = "scanned" if net.norm == "none" else "ssd_normed"
    yield from residual(metadata, config, layer, result, f"{p}ssd_out", f"{p}post_attention_norm")
