"""The decoder, once, as a flat list of operations.  Read from the top it is the forward pass.

Its blocks serve a vision tower too (vision.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from edgeq.format.manifest import fused_shapes, layer_prefix
from edgeq.format.metadata import Metadata
from edgeq.network.rope import rotation
from edgeq.network.stack import Stack
from edgeq.runtime.network.block_parts import norm, projection, residual
from edgeq.runtime.network.state_blocks import conv_block, delta_block, delta_widths, layer_states, ssd_block, ssd_widths
from edgeq.targets.family_operations import (
    ArrayScale,
    Gate,
    GatedAdd,
    Limit,
    Route,
    ScaleAdd,
    ShareScale,
    SoftCap,
    ValueNorm,
)
from edgeq.targets.graph import (
    Activate,
    Attention,
    CacheSpec,
    CacheWrite,
    Embed,
    Experts,
    Function,
    Graph,
    HeadNorm,
    HeadRotate,
    InjectVectors,
    Linear,
    NormAdd,
    Operation,
    PositionAdd,
    RmsNorm,
    RopeRotate,
    Scale,
    Select,
)


def decoder(metadata: Metadata, context: int = 0, *, all_rows: bool = False) -> Graph:
    """The graph of a decoder: embedding, layers, final norm and head; its sessions hold up to `context` positions.

    all_rows   all layers run over all rows, and those that are not wanted are left out after the last one

    Where the model embeds texts there is no head: the result are the states of the wanted rows after the norm.
    """
    config, linears = metadata.config, metadata.linears
    operations: list[Operation] = [*embedding(metadata)]
    # The inputs of masters are summed over all rows.
    early = not all_rows and not any(linear.master for linear in linears.values())
    layers = range(config.num_hidden_layers)
    cached = [layer for layer in layers if config.attends(layer) and not config.shares_cache(layer)]
    if config.bidirectional:
        # A text is one run, after which nothing of it is needed: each layer overwrites the keys and values of the last.
        cached = cached[:1]
    # Layers after the last one with keys and values of its own, or a state, run over the wanted rows alone.
    choosing = max(layer for layer in layers if config.blocks(layer)[0] and not config.shares_cache(layer)) if early else -1
    for layer in layers:
        last = layer == choosing
        if layer in config.conv_layers:
            operations += conv_block(metadata, config, layer, config.conv_layers.index(layer), select=last)
        elif layer in config.delta_layers:
            operations += delta_block(metadata, config, layer, 2 * config.delta_layers.index(layer), select=last)
        elif layer in config.ssd_layers:
            alone = not config.attends(layer)
            operations += ssd_block(metadata, config, layer, 2 * config.ssd_layers.index(layer), select=last and alone)
        if config.attends(layer):
            cache = 0 if config.bidirectional else cached.index(config.cache_layer(layer))
            ranges = config.ranges or config.picture_ranges
            span = ranges.index(config.window(layer)) if config.window(layer) in ranges else -1
            ahead, goes_on = config.whole_pictures and span >= 0, not config.bidirectional
            operations += attention_block(
                metadata, config, layer, context, cache=cache, span=span, ahead=ahead, goes_on=goes_on, select=last
            )
        if config.blocks(layer)[1]:
            operations += mlp_block(metadata, config, layer)
        if config.hidden_size_per_layer_input:
            operations += row_block(metadata, config, layer)
        if config.layer_scalars:
            operations.append(ArrayScale(layer, "x", metadata.arrays[f"{layer_prefix(config, layer)}layer_scalar"]))
        if config.vision is not None and layer < len(config.vision.tap_layers):
            operations.append(InjectVectors(layer, "x", (1 + layer) * config.hidden_size, add=True))
    if not early:
        operations.append(Select(-1, ("x",)))
    result, width = ("logits", config.vocab_size) if config.pooling is None else ("states", config.hidden_size)
    if config.pooling is None:
        operations += [norm(metadata, config, -1, "x", "norm", "normed"), Linear(-1, "normed", linears["head"], "logits")]
        if config.final_logit_softcapping is not None:
            operations.append(SoftCap(-1, "logits", config.final_logit_softcapping))
    else:
        operations.append(norm(metadata, config, -1, "x", "norm", "states"))
    # A text that is embedded has all its pages before it is read, and gives them back right after.
    windows = {layer: config.window(layer) or None if config.pooling is None else None for layer in cached}
    return Graph(
        buffers=buffer_widths(config) | {result: width},
        operations=tuple(operations),
        result=result,
        cache=tuple(cache_of(config, layer, window) for layer, window in windows.items()),
        states=layer_states(config) * len(config.state_layers),
    )


def cache_of(config: Stack, layer: int, window: int | None = None) -> CacheSpec:
    """What the cache holds of a layer."""
    shape = config.heads_of(layer)
    return CacheSpec(shape.kv_heads, shape.head_dim, shape.head_dim, window)


def buffer_widths(config: Stack) -> dict[str, int]:
    """Channels of the buffers that the layers read and write."""
    return {
        "x": config.hidden_size,  # the residual stream
        "normed": config.hidden_size,
        **{name: width for layer in range(config.num_hidden_layers) for name, width in head_widths(config, layer).items()},
        **({"conv_in": 3 * config.hidden_size, "convolved": config.hidden_size} if config.conv_layers else {}),
        **(delta_widths(config.delta_net) if config.delta_net else {}),
        **(ssd_widths(config.ssd) if config.ssd else {}),
        **({"mlp_normed": config.hidden_size} if config.parallel_blocks == "two_norms" else {}),
        **(expert_widths(config) if config.num_experts else mlp_widths(config)),
        **({"branch": config.hidden_size} if config.post_norms else {}),
        **(row_widths(config) if config.hidden_size_per_layer_input else {}),
    }


def row_widths(config: Stack) -> dict[str, int]:
    size = config.hidden_size_per_layer_input
    every = config.num_hidden_layers * size
    return {"layer_rows": every, "row_context": every, "row_gate": size, "row_inner": size}


def head_widths(config: Stack, layer: int) -> dict[str, int]:
    """The buffers of the heads of a layer: queries, keys and values, and what attention gives.

    What is read as a whole has no columns to spare, so layers of other shapes have buffers of their own.
    """
    shape, other = config.heads_of(layer), "" if config.heads_of(layer) == config.heads_of(0) else "global "
    width = shape.query_size * (2 if config.attention_gate else 1)
    if config.shares_cache(layer):
        return {f"{other}queries": width, f"{other}attended": shape.query_size}
    return {f"{other}qkv": width + 2 * shape.kv_size, f"{other}attended": shape.query_size}


def mlp_input(config: Stack, layer: int) -> str:
    """The buffer that the MLP reads."""
    if not config.norms_before(layer) or config.norms_stream(layer, mlp=True):
        return "x"
    return "mlp_normed" if config.parallel_blocks == "two_norms" else "normed"


def mlp_widths(config: Stack) -> dict[str, int]:
    widths = dict[str, int]()
    for layer in range(config.num_hidden_layers):
        inner, (gate_up, activated) = config.mlp_size(layer), mlp_buffers(config, layer)
        widths |= {gate_up: inner * (2 if config.gated else 1), activated: inner}
    return widths


def mlp_buffers(config: Stack, layer: int) -> tuple[str, str]:
    """The buffers of the inner channels of the MLP, before the activation and after it."""
    wide = "wide " if config.mlp_size(layer) != config.intermediate_size else ""
    return f"{wide}gate_up", f"{wide}inner"


def expert_widths(config: Stack) -> dict[str, int]:
    shared = config.shared_expert_intermediate_size
    of_shared = {"gate_up": (2 if config.gated else 1) * shared, "inner": shared, "branch": config.hidden_size}
    gate = {"shared_gate": 1} if config.shared_expert_gate else {}
    of_shared |= {"beside": config.hidden_size} if config.experts_beside_mlp else gate
    return {"router": config.num_experts, "routing": 2 * config.num_experts_per_tok, **(of_shared if shared else {})}


def embedding(metadata: Metadata) -> Iterator[Operation]:
    """x = norm(table[token] * multiplier) (+ positions[position]), or the feature of a picture that a row brings."""
    config, arrays, linears = metadata.config, metadata.arrays, metadata.linears
    yield Embed(-1, linears["head"] if config.tie_word_embeddings else linears.get("embedding") or arrays["embedding"], "x")
    if config.embedding_multiplier != 1:
        yield Scale(-1, "x", config.embedding_multiplier, "x")
    if config.embedding_norm:
        yield norm(metadata, config, -1, "x", "embedding_norm", "x")
    if config.vision is not None:
        yield InjectVectors(-1, "x")
    if config.hidden_size_per_layer_input:
        yield from layer_rows(metadata)
    if config.rope.kind == "learned":
        yield PositionAdd(-1, "x", arrays["positions"])


def layer_rows(metadata: Metadata) -> Iterator[Operation]:
    """row_context = norm(row_context(x)) + table[token] sqrt(size / 2), side by side for all layers.

    The gain has 1 / sqrt(2) in it.  What is normed is not divided by sqrt(hidden size): its epsilon is larger for it.
    """
    config, linears = metadata.config, metadata.linears
    size, gain = config.hidden_size_per_layer_input, metadata.arrays["row_context_norm"]
    yield Embed(-1, linears["layer_rows"], "layer_rows")
    yield Linear(-1, "x", linears["row_context"], "row_context")
    eps = config.rms_norm_eps * config.hidden_size
    yield HeadNorm(-1, "row_context", 0, config.num_hidden_layers, size, gain, eps)
    yield ScaleAdd(-1, "layer_rows", (size / 2) ** 0.5, "row_context")


def row_block(metadata: Metadata, config: Stack, layer: int) -> Iterator[Operation]:
    """x += norm(row_out(act(row_gate(x)) * the layer's part of row_context))."""
    linears, p, size = metadata.linears, layer_prefix(config, layer), config.hidden_size_per_layer_input
    yield Linear(layer, "x", linears[f"{p}row_gate"], "row_gate")
    yield Activate(layer, "row_gate", size, "row_inner", cast(Function, config.hidden_act), gated=False)
    yield Gate(layer, "row_inner", "row_context", layer * size, size, function=None)
    yield from residual(metadata, config, layer, "row_inner", f"{p}row_out", f"{p}row_norm")


def attention_block(
    metadata: Metadata,
    config: Stack,
    layer: int,
    context: int = 0,
    *,
    cache: int,
    span: int = -1,
    ahead: bool = False,
    goes_on: bool = False,
    select: bool = False,
) -> Iterator[Operation]:
    """x += o(attention(rope(norm(q)), rope(norm(k)), v)), with q, k, v = qkv(norm(x)); before o perhaps times sigmoid(gate).

    cache, span, ahead   as of Attention
    goes_on              rows come after those that have ranges
    select               once keys and values are in the cache, no later layer asks for the other rows

    Where blocks are parallel, what the MLP reads of x is kept beside it.  Beside a state that has read norm(x), it is there.
    """
    arrays, p, shape = metadata.arrays, layer_prefix(config, layer), config.heads_of(layer)
    heads, kv_heads, head_dim = shape
    k, v = shape.query_size, shape.query_size + shape.kv_size  # offsets in "qkv"
    qkv, attended = head_widths(config, layer)
    shared, normed = config.shares_cache(layer), "x" if config.norms_stream(layer) else "normed"
    if not config.norms_before(layer):
        normed = "x"
    elif layer not in config.state_layers:
        yield norm(metadata, config, layer, "x", f"{p}attention_norm", normed)
    if config.parallel_blocks == "two_norms":
        yield norm(metadata, config, layer, "x", f"{p}mlp_norm", mlp_input(config, layer))
    yield from projection(metadata, config, layer, normed, f"{p}q" if shared else f"{p}qkv", qkv)
    if config.clip_qkv is not None:
        yield Limit(layer, qkv, 0, v + shape.kv_size, -config.clip_qkv, config.clip_qkv, qkv)
    if config.value_norm and not shared:
        values = k if config.keys_are_values(layer) else v
        yield ValueNorm(layer, qkv, values, v, kv_heads, head_dim, config.rms_norm_eps)
    if config.qk_norm_kind != "rotated":
        yield from head_norms(metadata, config, layer)
    places = ((0, heads),) if shared else ((0, heads), (k, kv_heads))
    rope = config.layer_rope(layer)
    if rope is not None:
        frequencies, axes = rotation(rope, head_dim, context)
        for offset, count in places:
            yield RopeRotate(layer, qkv, offset, count, head_dim, frequencies, rope.attention_factor, axes)
    if config.qk_norm_kind == "rotated":
        yield from head_norms(metadata, config, layer)
    if f"{p}key_rotation" in arrays:
        matrix = arrays[f"{p}key_rotation"], arrays[f"{p}key_rotation_scale"]
        for offset, count in places:
            yield HeadRotate(layer, qkv, offset, count, head_dim, *matrix)
    if not shared:
        yield CacheWrite(layer, qkv, k, v, kv_heads, head_dim, cache)
    if select:
        rows = ("row_context",) if config.hidden_size_per_layer_input else ()
        yield Select(layer, ("x", qkv, *((mlp_input(config, layer),) if config.parallel else ()), *rows))
    scale, window = config.attention_scale(layer), config.window(layer) if span < 0 or goes_on else 0
    sinks, cap = arrays.get(f"{p}sinks"), config.attn_logit_softcapping
    scores = scale, window, cache, span, sinks, cap, ahead, config.slopes(layer)
    yield Attention(layer, qkv, 0, attended, heads, kv_heads, head_dim, *scores)
    if config.attention_gate:
        yield Gate(layer, attended, qkv, v + shape.kv_size, shape.query_size)
    yield from residual(metadata, config, layer, attended, f"{p}o", f"{p}post_attention_norm")


def head_norms(metadata: Metadata, config: Stack, layer: int) -> Iterator[Operation]:
    """The norms of queries and of the layer's own keys, each over a head or over all heads, where there are some."""
    if config.qk_norm:
        p, shape, (qkv, _) = layer_prefix(config, layer), config.heads_of(layer), head_widths(config, layer)
        sides = ("q",) if config.shares_cache(layer) else ("q", "k")
        widths, begins = (shape.query_size, shape.kv_size), (0, shape.query_size)
        for side, begin, width, size in zip(sides, begins, widths, shape.norm_sizes(config.qk_norm_kind), strict=False):
            gain = metadata.arrays[f"{p}{side}_norm"]
            yield HeadNorm(layer, qkv, begin, width // size, size, gain, config.rms_norm_eps)


def mlp_block(metadata: Metadata, config: Stack, layer: int) -> Iterator[Operation]:
    """x += down(act(gate) * up), with gate, up = gate_up(norm(x)); or, without a gate, x += down(act(up(norm(x))))."""
    p, x = layer_prefix(config, layer), mlp_input(config, layer)
    if config.norms_before(layer) and not config.parallel:
        yield norm(metadata, config, layer, "x", f"{p}mlp_norm", x)
    if config.num_experts:
        yield from experts(metadata, config, layer)
        return
    gate_up, inner = mlp_buffers(config, layer)
    yield from projection(metadata, config, layer, x, f"{p}gate_up" if config.gated else f"{p}up", gate_up)
    yield activation(config, layer, config.mlp_size(layer), gate_up, inner)
    yield from residual(metadata, config, layer, inner, f"{p}down", f"{p}post_mlp_norm")


def activation(config: Stack, layer: int, width: int, x: str = "gate_up", out: str = "inner") -> Operation:
    return Activate(layer, x, width, out, cast(Function, config.hidden_act), config.gated)


def experts(metadata: Metadata, config: Stack, layer: int) -> Iterator[Operation]:
    """x += sum of share * expert(normed) over the chosen experts, and + sigmoid(gate) * shared(normed) where there is one.

    The shared one may have no gate.
    """
    linears, arrays, p = metadata.linears, metadata.arrays, layer_prefix(config, layer)
    chosen, inner, shared = config.num_experts_per_tok, config.intermediate_size, config.shared_expert_intermediate_size
    parts, both = dict(fused_shapes(config, layer)), "gate_up" if config.gated else "up"
    projections, downs = [], []
    for owner in (f"{p}experts.{e}." for e in range(config.num_experts)):
        names = [f"{owner}{both}"] if f"{owner}{both}" in linears else list(parts[f"{owner}{both}"])
        projections.append(tuple(linears[name] for name in names))
        downs.append(linears[f"{owner}down"])
    of_experts = tuple(projections), tuple(downs), inner
    if config.experts_beside_mlp:
        yield from shared_expert(metadata, config, layer)
        eps = config.rms_norm_eps
        yield RmsNorm(layer, "branch", arrays[f"{p}shared_norm"], eps, "beside")
        yield RmsNorm(layer, "x", arrays[f"{p}router_norm"], eps, "normed")
        yield Linear(layer, "normed", linears[f"{p}router"], "router")
        yield Route(layer, "router", config.num_experts, chosen, config.norm_topk_prob, "routing")
        yield ShareScale(layer, "routing", chosen, arrays[f"{p}expert_scales"])
        yield RmsNorm(layer, "x", arrays[f"{p}experts_input_norm"], eps, "normed")
        # Zeros, to which the experts' results are added.
        yield Scale(layer, "branch", 0.0, "branch")
        function = cast(Function, config.hidden_act)
        yield Experts(layer, "normed", "routing", chosen, *of_experts, "branch", config.clamp, function)
        yield NormAdd(layer, "branch", arrays[f"{p}experts_norm"], eps, "beside")
        yield NormAdd(layer, "beside", arrays[f"{p}post_mlp_norm"], eps, "x")
        return
    yield Linear(layer, "normed", linears[f"{p}router"], "router")
    bias = arrays[f"{p}expert_biases"] if config.expert_scores == "sigmoid" else None
    factor = config.routed_scaling_factor
    yield Route(layer, "router", config.num_experts, chosen, config.norm_topk_prob, "routing", bias, factor)
    gated = shared and config.shared_expert_gate
    if gated:
        yield Linear(layer, "normed", linears[f"{p}shared_gate"], "shared_gate")
    if shared:
        yield from shared_expert(metadata, config, layer)
    function = cast(Function, config.hidden_act)
    yield Experts(layer, "normed", "routing", chosen, *of_experts, "x", config.clamp, function, config.gated)
    if shared and not gated:
        yield ScaleAdd(layer, "branch", 1.0, "x")
    if gated:
        yield GatedAdd(layer, "branch", "shared_gate", "x")


def shared_expert(metadata: Metadata, config: Stack, layer: int) -> Iterator[Operation]:
    """branch = down(act(gate) * up) of the one for all tokens, with gate, up = gate_up(normed), or down(act(up(normed)))."""
    p = layer_prefix(config, layer)
    yield from projection(metadata, config, layer, "normed", f"{p}shared.{'gate_up' if config.gated else 'up'}", "gate_up")
    yield activation(config, layer, config.shared_expert_intermediate_size)
    yield Linear(layer, "inner", metadata.linears[f"{p}shared.down"], "branch")
