"""The decoder, once, as a flat list of operations.  Read from the top it is the forward pass.

Its blocks serve a vision tower too (vision.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from edgeq.format.manifest import fused_shapes, layer_prefix
from edgeq.format.metadata import Metadata
from edgeq.network.delta_net import DeltaNet
from edgeq.network.rope import rotation
from edgeq.network.stack import Stack
from edgeq.targets.graph import (
    Activate,
    Attention,
    CacheSpec,
    CacheWrite,
    Embed,
    Experts,
    Function,
    GatedAdd,
    Graph,
    HeadNorm,
    HeadRotate,
    InjectVectors,
    LayerNorm,
    Linear,
    NormAdd,
    Operation,
    PositionAdd,
    RmsNorm,
    RopeRotate,
    Route,
    Scale,
    Select,
)
from edgeq.targets.state_operations import DeltaRule, Gate, GatedNorm, ShortConv, SiluConv, delta_state
from edgeq.targets.states import StateSpec


def decoder(metadata: Metadata, context: int = 0) -> Graph:
    """The graph of a decoder: embedding, layers, final norm and head; its sessions hold up to `context` positions.

    Where the model embeds texts there is no head: the result are the states of the wanted rows after the norm.
    """
    config, linears = metadata.config, metadata.linears
    operations: list[Operation] = [*embedding(metadata)]
    # The inputs of masters are summed over all rows.
    early = not any(linear.master for linear in linears.values())
    attends = [layer for layer in range(config.num_hidden_layers) if layer not in config.state_layers]
    for layer in range(config.num_hidden_layers):
        last = early and layer + 1 == config.num_hidden_layers
        if layer in config.conv_layers:
            operations += conv_block(metadata, config, layer, config.conv_layers.index(layer), select=last)
        elif layer in config.delta_layers:
            operations += delta_block(metadata, config, layer, 2 * config.delta_layers.index(layer), select=last)
        else:
            operations += attention_block(metadata, config, layer, context, cache=attends.index(layer), select=last)
        operations += mlp_block(metadata, config, layer)
        if config.vision is not None and layer < len(config.vision.tap_layers):
            operations.append(InjectVectors(layer, "x", (1 + layer) * config.hidden_size, add=True))
    if not early:
        operations.append(Select(-1, ("x",)))
    result, width = ("logits", config.vocab_size) if config.pooling is None else ("states", config.hidden_size)
    if config.pooling is None:
        operations += [norm(metadata, config, -1, "x", "norm", "normed"), Linear(-1, "normed", linears["head"], "logits")]
    else:
        operations.append(norm(metadata, config, -1, "x", "norm", "states"))
    # A text that is embedded has all its pages before it is read, and gives them back right after.
    windows = [config.window(layer) or None if config.pooling is None else None for layer in attends]
    return Graph(
        buffers=buffer_widths(config) | {result: width},
        operations=tuple(operations),
        result=result,
        cache=tuple(cache_of(config, window) for window in windows),
        states=layer_states(config) * len(config.state_layers),
    )


def layer_states(config: Stack) -> tuple[StateSpec, ...]:
    """The states of each layer that has some."""
    if net := config.delta_net:
        return (
            StateSpec("tail", (net.taps - 1, net.channels)),
            delta_state(net.key_heads, net.value_heads, net.key_dim, net.value_dim),
        )
    return (StateSpec("tail", (config.conv_taps - 1, config.hidden_size)),) if config.conv_layers else ()


def cache_of(config: Stack, window: int | None = None) -> CacheSpec:
    """What the cache holds of one of the stack's layers."""
    return CacheSpec(config.num_key_value_heads, config.head_dim, config.head_dim, window)


def buffer_widths(config: Stack) -> dict[str, int]:
    """Channels of the buffers that the layers read and write."""
    return {
        "x": config.hidden_size,  # the residual stream
        "normed": config.hidden_size,
        "qkv": config.query_size * (2 if config.attention_gate else 1) + 2 * config.kv_size,
        "attended": config.query_size,
        **({"conv_in": 3 * config.hidden_size, "convolved": config.hidden_size} if config.conv_layers else {}),
        **(delta_widths(config.delta_net) if config.delta_net else {}),
        **({"mlp_normed": config.hidden_size} if config.parallel_blocks == "two_norms" else {}),
        **(expert_widths(config) if config.num_experts else mlp_widths(config)),
    }


def delta_widths(net: DeltaNet) -> dict[str, int]:
    return {
        "delta_in": net.channels + net.value_size,
        "delta_rates": 2 * net.value_heads,
        "convolved": net.channels,
        "recalled": net.value_size,
        "delta_normed": net.value_size,
    }


def mlp_input(config: Stack, layer: int) -> str:
    """The buffer that the MLP reads."""
    if not config.norms_before(layer):
        return "x"
    return "mlp_normed" if config.parallel_blocks == "two_norms" else "normed"


def mlp_widths(config: Stack) -> dict[str, int]:
    inner = config.intermediate_size
    branch = {"branch": config.hidden_size} if config.post_norms else {}
    return {"gate_up": inner * (2 if config.gated else 1), "inner": inner, **branch}


def expert_widths(config: Stack) -> dict[str, int]:
    shared = config.shared_expert_intermediate_size
    of_shared = {"shared_gate": 1, "gate_up": 2 * shared, "inner": shared, "branch": config.hidden_size}
    return {"router": config.num_experts, "routing": 2 * config.num_experts_per_tok, **(of_shared if shared else {})}


def embedding(metadata: Metadata) -> Iterator[Operation]:
    """x = table[token] * multiplier (+ positions[position]), or the feature of a picture that a row brings."""
    config, arrays, linears = metadata.config, metadata.arrays, metadata.linears
    yield Embed(-1, linears["head"] if config.tie_word_embeddings else linears.get("embedding") or arrays["embedding"], "x")
    if config.embedding_multiplier != 1:
        yield Scale(-1, "x", config.embedding_multiplier, "x")
    if config.vision is not None:
        yield InjectVectors(-1, "x")
    if config.rope.kind == "learned":
        yield PositionAdd(-1, "x", arrays["positions"])


def norm(metadata: Metadata, config: Stack, layer: int, x: str, name: str, out: str) -> Operation:
    """The norm of the stack's kind whose gain is the array `name`."""
    arrays, eps = metadata.arrays, config.rms_norm_eps
    if config.layer_norm:
        return LayerNorm(layer, x, arrays[name], arrays[f"{name}_bias"], eps, out)
    return RmsNorm(layer, x, arrays[name], eps, out)


def attention_block(
    metadata: Metadata, config: Stack, layer: int, context: int = 0, *, cache: int, span: int = -1, select: bool = False
) -> Iterator[Operation]:
    """x += o(attention(rope(norm(q)), rope(norm(k)), v)), with q, k, v = qkv(norm(x)); before o perhaps times sigmoid(gate).

    cache, span   as of Attention
    select        once keys and values are in the cache, no later layer asks for the other rows

    Where blocks are parallel, what the MLP reads of x is kept beside it.
    """
    arrays, p = metadata.arrays, layer_prefix(config, layer)
    heads, kv_heads, head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    k, v = config.query_size, config.query_size + config.kv_size  # offsets in "qkv"
    normed = config.norms_before(layer)
    if normed:
        yield norm(metadata, config, layer, "x", f"{p}attention_norm", "normed")
    if config.parallel_blocks == "two_norms":
        yield norm(metadata, config, layer, "x", f"{p}mlp_norm", mlp_input(config, layer))
    yield from projection(metadata, config, layer, "normed" if normed else "x", f"{p}qkv", "qkv")
    if config.qk_norm_kind != "rotated":
        yield from head_norms(metadata, config, layer)
    rope = config.layer_rope(layer)
    if rope is not None:
        frequencies, axes = rotation(rope, head_dim, context)
        yield RopeRotate(layer, "qkv", 0, heads, head_dim, frequencies, rope.attention_factor, axes)
        yield RopeRotate(layer, "qkv", k, kv_heads, head_dim, frequencies, rope.attention_factor, axes)
    if config.qk_norm_kind == "rotated":
        yield from head_norms(metadata, config, layer)
    if f"{p}key_rotation" in arrays:
        matrix = arrays[f"{p}key_rotation"], arrays[f"{p}key_rotation_scale"]
        yield HeadRotate(layer, "qkv", 0, heads, head_dim, *matrix)
        yield HeadRotate(layer, "qkv", k, kv_heads, head_dim, *matrix)
    yield CacheWrite(layer, "qkv", k, v, kv_heads, head_dim, cache)
    if select:
        yield Select(layer, ("x", "qkv", *((mlp_input(config, layer),) if config.parallel else ())))
    scale, window = config.attention_scale, config.window(layer)
    sinks = arrays.get(f"{p}sinks")
    yield Attention(layer, "qkv", 0, "attended", heads, kv_heads, head_dim, scale, window, cache, span, sinks)
    if config.attention_gate:
        yield Gate(layer, "attended", "qkv", v + config.kv_size, config.query_size)
    yield from residual(metadata, config, layer, "attended", f"{p}o", f"{p}post_attention_norm")


def head_norms(metadata: Metadata, config: Stack, layer: int) -> Iterator[Operation]:
    """The norms of queries and keys, each over a head or over all heads, where there are some."""
    if config.qk_norm:
        p, sides = layer_prefix(config, layer), ("q", "k")
        widths, begins = (config.query_size, config.kv_size), (0, config.query_size)
        for side, begin, width, size in zip(sides, begins, widths, config.qk_norm_sizes, strict=True):
            gain = metadata.arrays[f"{p}{side}_norm"]
            yield HeadNorm(layer, "qkv", begin, width // size, size, gain, config.rms_norm_eps)


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


def mlp_block(metadata: Metadata, config: Stack, layer: int) -> Iterator[Operation]:
    """x += down(act(gate) * up), with gate, up = gate_up(norm(x)); or, without a gate, x += down(act(up(norm(x))))."""
    p, x = layer_prefix(config, layer), mlp_input(config, layer)
    if config.norms_before(layer) and not config.parallel:
        yield norm(metadata, config, layer, "x", f"{p}mlp_norm", x)
    if config.num_experts:
        yield from experts(metadata, config, layer)
        return
    if config.gated:
        yield from projection(metadata, config, layer, x, f"{p}gate_up", "gate_up")
    else:
        yield Linear(layer, x, metadata.linears[f"{p}up"], "gate_up")
    yield activation(config, layer, config.intermediate_size)
    yield from residual(metadata, config, layer, "inner", f"{p}down", f"{p}post_mlp_norm")


def activation(config: Stack, layer: int, width: int) -> Operation:
    return Activate(layer, "gate_up", width, "inner", cast(Function, config.hidden_act), config.gated)


def experts(metadata: Metadata, config: Stack, layer: int) -> Iterator[Operation]:
    """x += sum of share * expert(normed) over the chosen experts, and + sigmoid(gate) * shared(normed) where there is one."""
    linears, p = metadata.linears, layer_prefix(config, layer)
    chosen, inner, shared = config.num_experts_per_tok, config.intermediate_size, config.shared_expert_intermediate_size
    parts = dict(fused_shapes(config, layer))
    projections, downs = [], []
    for owner in (f"{p}experts.{e}." for e in range(config.num_experts)):
        names = [f"{owner}gate_up"] if f"{owner}gate_up" in linears else list(parts[f"{owner}gate_up"])
        projections.append(tuple(linears[name] for name in names))
        downs.append(linears[f"{owner}down"])
    yield Linear(layer, "normed", linears[f"{p}router"], "router")
    yield Route(layer, "router", config.num_experts, chosen, config.norm_topk_prob, "routing")
    if shared:
        yield Linear(layer, "normed", linears[f"{p}shared_gate"], "shared_gate")
        yield from projection(metadata, config, layer, "normed", f"{p}shared.gate_up", "gate_up")
        yield activation(config, layer, shared)
        yield Linear(layer, "inner", linears[f"{p}shared.down"], "branch")
    yield Experts(layer, "normed", "routing", chosen, tuple(projections), tuple(downs), inner, "x", config.clamp)
    if shared:
        yield GatedAdd(layer, "branch", "shared_gate", "x")


def residual(metadata: Metadata, config: Stack, layer: int, x: str, linear: str, post_norm: str) -> Iterator[Operation]:
    """x += linear(...), or x += norm(linear(...)) where blocks end in a norm."""
    if config.norms_after(layer):
        yield Linear(layer, x, metadata.linears[linear], "branch")
        yield NormAdd(layer, "branch", metadata.arrays[post_norm], config.rms_norm_eps, "x")
    else:
        yield Linear(layer, x, metadata.linears[linear], "x", add=True)


def projection(metadata: Metadata, config: Stack, layer: int, x: str, fused: str, out: str) -> Iterator[Operation]:
    """The fused layer if the file has it, else its parts side by side in the same buffer."""
    if fused in metadata.linears:
        yield Linear(layer, x, metadata.linears[fused], out)
        return
    offset = 0
    for name, (rows, _) in dict(fused_shapes(config, layer))[fused].items():
        yield Linear(layer, x, metadata.linears[name], out, offset)
        offset += rows
