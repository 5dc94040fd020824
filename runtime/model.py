"""The decoder, once, as a flat list of operations.  Read from the top it is the forward pass."""

from __future__ import annotations

from collections.abc import Iterator

from edgeq.config import ModelConfig
from edgeq.layout import fused_shapes
from edgeq.linear import Metadata
from edgeq.runtime.rope import frequencies
from edgeq.targets.operations import (
    Attention,
    CacheWrite,
    Embed,
    Graph,
    HeadNorm,
    Linear,
    Operation,
    RmsNorm,
    RopeRotate,
    Select,
    SwiGlu,
)


def decoder(metadata: Metadata) -> Graph:
    """The graph of a decoder of the Llama line: embedding, layers, final norm and head."""
    config, arrays, linears = metadata.config, metadata.arrays, metadata.linears
    table = linears["head"] if config.tie_word_embeddings else arrays["embedding"]
    rotation = frequencies(config.rope, config.head_dim)
    operations: list[Operation] = [Embed(-1, table, "x")]
    for layer in range(config.num_hidden_layers):
        operations += attention_block(metadata, layer, rotation)
        operations += mlp_block(metadata, layer)
    operations += [
        Select(-1, "x", "last"),
        RmsNorm(-1, "last", arrays["norm"], config.rms_norm_eps, "last_normed"),
        Linear(-1, "last_normed", linears["head"], "logits"),
    ]
    return Graph(
        buffers=buffer_widths(config),
        operations=tuple(operations),
        logits="logits",
        layers=config.num_hidden_layers,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
    )


def buffer_widths(config: ModelConfig) -> dict[str, int]:
    return {
        "x": config.hidden_size,  # the residual stream
        "normed": config.hidden_size,
        "qkv": config.query_size + 2 * config.kv_size,
        "attended": config.query_size,
        "gate_up": 2 * config.intermediate_size,
        "inner": config.intermediate_size,
        "last": config.hidden_size,
        "last_normed": config.hidden_size,
        "logits": config.vocab_size,
    }


def attention_block(metadata: Metadata, layer: int, rotation: tuple[float, ...]) -> Iterator[Operation]:
    """x += o(attention(rope(norm(q)), rope(norm(k)), v)), with q, k, v = qkv(norm(x))."""
    config, arrays, p = metadata.config, metadata.arrays, f"layers.{layer}."
    heads, kv_heads, head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    eps = config.rms_norm_eps
    k, v = config.query_size, config.query_size + config.kv_size  # offsets in "qkv"
    yield RmsNorm(layer, "x", arrays[f"{p}attention_norm"], eps, "normed")
    yield from projection(metadata, layer, "normed", f"{p}qkv", "qkv")
    if config.qk_norm:
        yield HeadNorm(layer, "qkv", 0, heads, head_dim, arrays[f"{p}q_norm"], eps)
        yield HeadNorm(layer, "qkv", k, kv_heads, head_dim, arrays[f"{p}k_norm"], eps)
    yield RopeRotate(layer, "qkv", 0, heads, head_dim, rotation)
    yield RopeRotate(layer, "qkv", k, kv_heads, head_dim, rotation)
    yield CacheWrite(layer, "qkv", k, v, kv_heads, head_dim)
    yield Attention(layer, "qkv", 0, "attended", heads, kv_heads, head_dim, head_dim**-0.5, config.window(layer))
    yield Linear(layer, "attended", metadata.linears[f"{p}o"], "x", add=True)


def mlp_block(metadata: Metadata, layer: int) -> Iterator[Operation]:
    """x += down(silu(gate) * up), with gate, up = gate_up(norm(x))."""
    config, p = metadata.config, f"layers.{layer}."
    yield RmsNorm(layer, "x", metadata.arrays[f"{p}mlp_norm"], config.rms_norm_eps, "normed")
    yield from projection(metadata, layer, "normed", f"{p}gate_up", "gate_up")
    yield SwiGlu(layer, "gate_up", config.intermediate_size, "inner")
    yield Linear(layer, "inner", metadata.linears[f"{p}down"], "x", add=True)


def projection(metadata: Metadata, layer: int, x: str, fused: str, out: str) -> Iterator[Operation]:
    """The fused layer if the file has it, else its parts side by side in the same buffer."""
    if fused in metadata.linears:
        yield Linear(layer, x, metadata.linears[fused], out)
        return
    offset = 0
    for name, (rows, _) in dict(fused_shapes(metadata.config, layer))[fused].items():
        yield Linear(layer, x, metadata.linears[name], out, offset)
        offset += rows
