"""The layers and arrays that a configuration implies, with their shapes.

Converters, the reader and the runtime all use this list.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from edgeq.errors import FormatError
from edgeq.format.metadata import Metadata
from edgeq.format.records import ArrayRef, LinearSpec, Weight
from edgeq.network.config import ModelConfig, VisionConfig
from edgeq.network.draft_stack import DraftStack
from edgeq.network.policy_stack import PolicyStack
from edgeq.network.stack import Stack

Shape = tuple[int, int]
MODALITIES = 2
"""Text and vision: kinds of rows that can have activation scales of their own."""
FLOAT_PARTS = ("router", "shared_gate", "delta_rates", "ssd_dt", "row_context", "state_in", "action_in", "action_out")
"""Linear layers that converters keep in floats: a rounding error in them sends a token to another expert, adds up in a state
from token to token, or is one of actions."""

StackContents = dict[str, dict[str, Shape] | tuple[int, ...]]
"""Name of an array -> its shape;  name of a fused linear layer -> names and (rows, columns) of the layers fused in it."""


def layer_contents(config: Stack, layer: int) -> StackContents:
    """The contents of a layer of a decoder or of a tower, in execution order."""
    hidden, p, (mixes, has_mlp) = config.hidden_size, layer_prefix(config, layer), config.blocks(layer)
    contents: StackContents = dict(_norm(config, f"{p}attention_norm")) if mixes and config.norms_before(layer) else {}
    if layer in config.conv_layers:
        contents[f"{p}conv_in"] = {f"{p}conv_in": (3 * hidden, hidden)}
        contents[f"{p}conv"] = (hidden, config.conv_taps)
        contents[f"{p}conv_out"] = {f"{p}conv_out": (hidden, hidden)}
    elif layer in config.delta_layers:
        contents |= _delta_net(config, p)
    elif layer in config.ssd_layers:
        contents |= _state_space(config, p)
    contents |= _attention(config, layer) if config.attends(layer) else {}
    contents |= _norm(config, f"{p}post_attention_norm") if config.norms_after(layer) else {}
    if not has_mlp:
        return contents
    own_norm = config.norms_before(layer) and config.parallel_blocks != "one_norm"
    contents |= _norm(config, f"{p}mlp_norm") if own_norm else {}
    if config.num_experts:
        if beside := config.experts_beside_mlp:
            contents |= {name: (hidden,) for name in (f"{p}shared_norm", f"{p}router_norm")}
        contents[f"{p}router"] = {f"{p}router": (config.num_experts, hidden)}
        contents |= {f"{p}expert_biases": (config.num_experts,)} if config.expert_scores == "sigmoid" else {}
        if beside:
            contents |= {f"{p}expert_scales": (config.num_experts,), f"{p}experts_input_norm": (hidden,)}
            contents[f"{p}experts_norm"] = (hidden,)
        for expert in range(config.num_experts):
            contents |= _mlp(config, f"{p}experts.{expert}.", config.intermediate_size)
        if config.shared_expert_intermediate_size:
            gated = config.shared_expert_gate and not beside
            contents |= {f"{p}shared_gate": {f"{p}shared_gate": (1, hidden)}} if gated else {}
            contents |= _mlp(config, f"{p}shared.", config.shared_expert_intermediate_size)
    else:
        contents |= _mlp(config, p, config.mlp_size(layer))
    contents |= _norm(config, f"{p}post_mlp_norm") if config.norms_after(layer) else {}
    if size := config.hidden_size_per_layer_input:
        contents |= {f"{p}row_gate": {f"{p}row_gate": (size, hidden)}, f"{p}row_out": {f"{p}row_out": (hidden, size)}}
        contents |= _norm(config, f"{p}row_norm")
    return contents | ({f"{p}layer_scalar": (1,)} if config.layer_scalars else {})


def _attention(config: Stack, layer: int) -> StackContents:
    """Keys and values are those of another layer, or the values are the keys, where the configuration says so."""
    hidden, p, shape = config.hidden_size, layer_prefix(config, layer), config.heads_of(layer)
    q, kv, shared = shape.query_size, shape.kv_size, config.shares_cache(layer)
    parts: dict[str, Shape] = {f"{p}q": (q, hidden)}
    if not shared:
        parts[f"{p}k"] = (kv, hidden)
        parts |= {} if config.keys_are_values(layer) else {f"{p}v": (kv, hidden)}
    parts |= {f"{p}attention_gate": (q, hidden)} if config.attention_gate else {}
    contents: StackContents = {f"{p}q" if shared else f"{p}qkv": parts}
    if config.qk_norm:
        of_queries, of_keys = shape.norm_sizes(config.qk_norm_kind)
        contents |= {f"{p}q_norm": (of_queries,)} | ({} if shared else {f"{p}k_norm": (of_keys,)})
    contents |= {f"{p}sinks": (config.num_attention_heads,)} if config.attention_sinks else {}
    return contents | {f"{p}o": {f"{p}o": (hidden, q)}}


def layer_prefix(config: Stack, layer: int) -> str:
    """What the names of a layer begin with."""
    return f"{config.prefix}layers.{layer}."


def patch_contents(config: VisionConfig) -> StackContents:
    """What a tower has before its layers."""
    contents: StackContents = {"vision.patch": {"vision.patch": (config.hidden_size, config.patch_width)}}
    if config.position_rows:
        contents["vision.positions"] = (config.position_rows, config.hidden_size)
    return contents | (_norm(config, "vision.pre_norm") if config.pre_norm else {})


def projector_contents(config: VisionConfig) -> StackContents:
    """What a tower has after its layers, in execution order."""
    joined, eps, contents = config.token_size, config.project_eps > 0, dict[str, dict[str, Shape] | tuple[int, ...]]()
    for p, norm in projectors(config):
        if norm != "none":
            contents |= _norm(config, f"{p}norm", joined if norm == "joined" else config.hidden_size, eps and norm == "joined")
        contents |= _norm(config, "vision.joined_norm", joined, True) if eps and norm == "patch" else {}
        contents |= dict.fromkeys(config.mean_arrays, (joined,))
        if config.project_size:
            contents[f"{p}project.0"] = {f"{p}project.0": (config.project_size, joined)}
        contents[f"{p}project.1"] = {f"{p}project.1": (config.out_hidden_size, config.project_size or joined)}
    return contents


def draft_input(config: DraftStack) -> StackContents:
    """What a layer that drafts has before it: norms of the token and of the state, and what joins both."""
    hidden, p = config.hidden_size, config.prefix
    norms: StackContents = {f"{p}embedding_norm": (hidden,), f"{p}hidden_norm": (hidden,)}
    return norms | {name: {name: (hidden, hidden)} for name in (f"{p}embedding", f"{p}hidden")}


def draft_output(config: DraftStack) -> StackContents:
    """What it has after it."""
    return {f"{config.prefix}norm": (config.hidden_size,)}


def policy_input(config: PolicyStack) -> StackContents:
    """What an expert has before its layers: what reads the state, and what joins actions and time."""
    hidden, p = config.hidden_size, config.prefix
    shapes = {"state_in": (hidden, config.state_size), "action_in": (hidden, config.action_size)}
    shapes |= dict.fromkeys(("time_action", "time_in", "time_out"), (hidden, hidden))
    return {f"{p}{name}": {f"{p}{name}": shape} for name, shape in shapes.items()}


def policy_output(config: PolicyStack) -> StackContents:
    """What it has after them."""
    name = f"{config.prefix}action_out"
    return {f"{config.prefix}norm": (config.hidden_size,), name: {name: (config.action_size, config.hidden_size)}}


def projectors(config: VisionConfig) -> Iterator[tuple[str, str]]:
    """What the names of each projector begin with, and over what its norm is: that of the last layer, those of the taps."""
    yield config.prefix, config.project_norm
    for index in range(len(config.tap_layers)):
        yield f"{config.prefix}taps.{index}.", "joined"


def _norm(config: Stack, name: str, width: int = 0, biased: bool = False) -> dict[str, tuple[int, ...]]:
    names = (name, f"{name}_bias") if config.layer_norm or biased else (name,)
    return {each: (width or config.hidden_size,) for each in names}


def _delta_net(config: Stack, p: str) -> StackContents:
    net, hidden = config.delta_net, config.hidden_size
    assert net is not None
    return {
        f"{p}delta_in": {f"{p}delta_qkv": (net.channels, hidden), f"{p}delta_gate": (net.value_size, hidden)},
        f"{p}delta_rates": {f"{p}delta_b": (net.value_heads, hidden), f"{p}delta_a": (net.value_heads, hidden)},
        f"{p}delta_conv": (net.channels, net.taps),
        f"{p}decay_log": (net.value_heads,),
        f"{p}dt_bias": (net.value_heads,),
        f"{p}delta_norm": (net.value_dim,),
        f"{p}delta_out": {f"{p}delta_out": (hidden, net.value_size)},
    }


def _state_space(config: Stack, p: str) -> StackContents:
    net, hidden = config.ssd, config.hidden_size
    assert net is not None
    norm: StackContents = {} if net.norm == "none" else {f"{p}ssd_norm": (net.inner_size,)}
    return {
        f"{p}ssd_in": {f"{p}ssd_in": (net.channels + net.inner_size, hidden)},
        f"{p}ssd_dt": {f"{p}ssd_dt": (net.heads, hidden)},
        f"{p}ssd_conv": (net.channels, net.taps),
        f"{p}ssd_conv_bias": (net.channels,),
        f"{p}decay_log": (net.heads,),
        f"{p}dt_bias": (net.heads,),
        f"{p}skip": (net.heads,),
        **norm,
        f"{p}ssd_out": {f"{p}ssd_out": (hidden, net.inner_size)},
    }


def _mlp(config: Stack, p: str, inner: int) -> dict[str, dict[str, Shape]]:
    hidden = config.hidden_size
    gate: dict[str, Shape] = {f"{p}gate": (inner, hidden)} if config.gated else {}
    return {
        f"{p}gate_up" if config.gated else f"{p}up": gate | {f"{p}up": (inner, hidden)},
        f"{p}down": {f"{p}down": (hidden, inner)},
    }


def fused_shapes(config: Stack, layer: int) -> list[tuple[str, dict[str, Shape]]]:
    """The fused linear layers of a layer, in execution order: name, and (rows, columns) of each layer fused in it."""
    return [(name, part) for name, part in layer_contents(config, layer).items() if isinstance(part, dict)]


def array_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of all arrays but key rotations: an untied embedding, learned positions, gains and biases of norms.

    The embedding may also be a linear layer.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    if not config.tie_word_embeddings:
        shapes["embedding"] = (config.vocab_size, config.hidden_size)
    if config.rope.kind == "learned":
        shapes["positions"] = (config.segments * config.max_position_embeddings, config.hidden_size)
    if config.hidden_size_per_layer_input:
        shapes["row_context_norm"] = (config.hidden_size_per_layer_input,)
    shapes |= embedding_norm_shapes(config) | dense_shapes(config)
    for part in _parts(config):
        shapes.update({name: shape for name, shape in part.items() if isinstance(shape, tuple)})
    return shapes | _norm(config, "norm")


def embedding_norm_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of the arrays of the norm that token embeddings go through; none: there is no such norm."""
    return _norm(config, "embedding_norm") if config.embedding_norm else {}


def dense_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of the dense layers that vectors of texts go through, of their biases and norms."""
    return config.pooling.arrays(config.hidden_size) if config.pooling else {}


def table_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Linear layers of the rows that layers have for tokens, side by side: their table, and what makes some of embeddings."""
    width = config.num_hidden_layers * config.hidden_size_per_layer_input
    return {"layer_rows": (config.vocab_size, width), "row_context": (width, config.hidden_size)} if width else {}


def _parts(config: ModelConfig) -> Iterator[StackContents]:
    """The contents of the tower, where there is one, of all layers, and of the one that drafts."""
    if vision := config.vision:
        yield patch_contents(vision)
        yield from (layer_contents(vision, layer) for layer in range(vision.num_hidden_layers))
        yield projector_contents(vision)
    yield from (layer_contents(config, layer) for layer in range(config.num_hidden_layers))
    if draft := config.draft:
        yield draft_input(draft) | layer_contents(draft, 0) | draft_output(draft)
    if policy := config.policy:
        yield policy_input(policy)
        yield from (layer_contents(policy, layer) for layer in range(policy.num_hidden_layers))
        yield policy_output(policy)


def rotation_shapes(config: ModelConfig, layer: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Arrays of a layer whose queries and keys are rotated after RoPE: name -> dtype, shape.  All layers have them, or none."""
    size, p = config.head_dim, f"layers.{layer}."
    return {f"{p}key_rotation": ("i8", (size, size)), f"{p}key_rotation_scale": ("f32", (1,))}


def check(metadata: Metadata) -> None:
    """FormatError unless layers and arrays are exactly those of the configuration, in shape and in storage."""
    config, expected = metadata.config, dict[str, Shape]()
    for contents in _parts(config):
        for fused, parts in contents.items():
            if isinstance(parts, tuple):
                continue
            if fused in metadata.linears:
                rows = sum(rows for rows, _ in parts.values())
                expected[fused] = (rows, next(iter(parts.values()))[1])
            else:
                expected.update(parts)
    if config.pooling is None:
        expected["head"] = (config.vocab_size, config.hidden_size)
    expected |= table_shapes(config)
    quantized_table = not config.tie_word_embeddings and "embedding" in metadata.linears
    if quantized_table:
        expected["embedding"] = (config.vocab_size, config.hidden_size)
    _same_names("linear layers", set(expected), set(metadata.linears))
    if config.vision is not None:
        _check_bounds(config.vision, metadata.linears)
    for name, shape in expected.items():
        linear = metadata.linears[name]
        if (linear.rows, linear.columns) != shape:
            raise FormatError(f"{name} is {linear.rows} x {linear.columns}; its configuration implies {shape[0]} x {shape[1]}")
        _check_parts(linear)
    if quantized_table or config.tie_word_embeddings:
        table = metadata.linears["embedding" if quantized_table else "head"]
        if config.tie_word_embeddings and _changes_its_input(table):
            raise FormatError("a head that is also the embedding can have one weight block and no part that changes its input")
        if quantized_table and not _is_one_block(table):
            raise FormatError("a quantized embedding can have one weight block and nothing else")
    if (rows_of_layers := metadata.linears.get("layer_rows")) and not _is_one_block(rows_of_layers):
        raise FormatError("layer_rows can have one weight block and nothing else")
    if config.pooling is not None and any(linear.master for linear in metadata.linears.values()):
        raise FormatError("a model that embeds has masters; weights are requantized for a prompt that is then continued")
    if config.draft_layers and any(linear.master for linear in metadata.linears.values()):
        raise FormatError("a model with draft_layers has masters; drafts are not made with requantized weights")
    arrays = array_shapes(config)
    if quantized_table:
        del arrays["embedding"]
    rotated = config.num_hidden_layers if "layers.0.key_rotation" in metadata.arrays else 0
    if rotated and not config.alike:
        raise FormatError("a key_rotation in a model whose layers differ in their heads, or share keys and values")
    rotations = {name: part for i in range(rotated) for name, part in rotation_shapes(config, i).items()}
    _same_names("arrays", {*arrays, *rotations}, set(metadata.arrays))
    for name, part in rotations.items():
        if (metadata.arrays[name].dtype, metadata.arrays[name].shape) != part:
            raise FormatError(f"{name} is {metadata.arrays[name].dtype} {metadata.arrays[name].shape}; expected {part}")
    kv = metadata.kv
    if kv.high and (kv.kind != "int4" or kv.high > config.head_dim or not config.alike):
        raise FormatError(f"a {kv.kind} cache with {kv.high} dimensions in 8 bits; heads have {config.head_dim}")
    if not 2 <= kv.bits <= 4 or (kv.kind != "int4" and kv.bits != 4):
        raise FormatError(f"a {kv.kind} cache with codes of {kv.bits} bits; an int4 cache has 2 to 4")
    for name, wanted in arrays.items():
        array = metadata.arrays[name]
        if array.shape != wanted or array.dtype not in ("f32", "f16", "bf16"):
            raise FormatError(f"{name} is {array.dtype} {array.shape}; its configuration implies a float array {wanted}")


def _changes_its_input(linear: LinearSpec) -> bool:
    """Whether a table's rows would not be its weights: a second block, or a part that acts before them or beside them."""
    parts = (linear.input_order, linear.transform, linear.input_scale, linear.low_rank, linear.split_row)
    return len(linear.weights) > 1 or any(part is not None for part in parts)


def _is_one_block(linear: LinearSpec) -> bool:
    return not _changes_its_input(linear) and linear.bias is None and linear.activation is None and linear.master is None


def _check_bounds(config: VisionConfig, linears: Mapping[str, LinearSpec]) -> None:
    """FormatError: one layer of parts that read its input within other bounds."""
    for layer in range(config.num_hidden_layers) if config.clips else ():
        for fused, parts in fused_shapes(config, layer):
            if fused in linears and config.read_apart(layer, parts):
                raise FormatError(f"{fused} is one layer whose parts have other bounds; expected {', '.join(parts)}")


def _check_parts(linear: LinearSpec) -> None:
    """FormatError unless all parts of a layer fit each other; nothing after this checks them again."""
    name, rows, columns = linear.name, linear.rows, linear.columns
    _check_weights(name, linear.weights)
    if any(weight.rows != rows for weight in linear.weights):
        raise FormatError(f"{name}: its weight blocks differ in rows")
    _check_vector(name, "bias", linear.bias, rows, ("f32", "f16", "bf16"))
    _check_vector(name, "input_scale", linear.input_scale, columns, ("f32",))
    _check_vector(name, "input_order", linear.input_order, columns, ("i32",))
    if linear.transform:
        linear.transform.check(name, columns)
    if linear.activation:
        bits, high = linear.activation.bits, linear.activation.high_bits
        if not 2 <= bits <= 8 or (not 2 <= high <= 8 if len(linear.weights) > 1 else high != 0):
            raise FormatError(f"{name}: {bits} and {high} activation bits for {len(linear.weights)} weight blocks")
        _check_scales(linear)
    if linear.split_row:
        _check_vector(name, "split_row", linear.split_row.row, rows, ("f32", "f16", "bf16"))
        if linear.split_row.index >= linear.weights[0].columns or linear.input_scale or linear.master:
            raise FormatError(
                f"{name}: a split row {linear.split_row.index} of {linear.weights[0].columns} columns; it must be one of them, "
                "without an input_scale and a master"
            )
    if linear.low_rank:
        a, b = linear.low_rank.a, linear.low_rank.b
        _check_weights(name, (a, b))
        if (b.rows, a.columns) != (rows, columns) or b.columns != a.rows or a.codec.integer or b.codec.integer:
            raise FormatError(f"{name}: low-rank parts {b.rows} x {b.columns} and {a.rows} x {a.columns} of {rows} x {columns}")
    if linear.master:
        _check_weights(name, (linear.master,))
        if (linear.master.rows, linear.master.columns) != (rows, columns) or len(linear.weights) != 1:
            raise FormatError(f"{name}: its master is {linear.master.rows} x {linear.master.columns}, not {rows} x {columns}")


def _check_scales(linear: LinearSpec) -> None:
    activation, name = linear.activation, linear.name
    scales = activation.scales if activation else None
    if activation is None or scales is None:
        return
    if scales.dtype != "f32" or scales.shape not in ((1,), (MODALITIES,)):
        raise FormatError(f"{name}: activation scales are {scales.dtype} {scales.shape}; expected f32 (1,) or ({MODALITIES},)")
    if not activation.symmetric or len(linear.weights) > 1 or linear.master or ".experts." in name:
        raise FormatError(f"{name}: activation scales need symmetric integers and one weight block, no master and no experts")


def _check_vector(name: str, part: str, array: ArrayRef | None, length: int, dtypes: tuple[str, ...]) -> None:
    if array and (array.shape != (length,) or array.dtype not in dtypes):
        raise FormatError(f"{name}: {part} is {array.dtype} {array.shape}; expected {' or '.join(dtypes)} ({length},)")


def _check_weights(name: str, weights: tuple[Weight, ...]) -> None:
    for weight in weights:
        expected = weight.codec.parts(weight.rows, weight.columns)
        for part in sorted(expected.keys() ^ weight.arrays.keys()):
            raise FormatError(f"{name}: codec {weight.codec.name} and array {part!r} do not agree")
        for part, want in expected.items():
            array = weight.arrays[part]
            if (array.dtype, array.shape) != (want.stored, want.shape):
                implied = f"codec {weight.codec.name} implies {want.stored} {want.shape}"
                raise FormatError(f"{name}: {part} is {array.dtype} {array.shape}; {implied}")


def _same_names(what: str, expected: set[str], stored: set[str]) -> None:
    if expected != stored:
        missing, extra = sorted(expected - stored)[:3], sorted(stored - expected)[:3]
        raise FormatError(f"the file's {what} do not match its configuration: missing {missing}, unexpected {extra}")
