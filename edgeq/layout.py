"""Which layers and arrays a model of a given configuration must have, and their shapes.

Converter, file and runtime agree here.
"""

from __future__ import annotations

from edgeq.config import ModelConfig
from edgeq.errors import FormatError
from edgeq.linear import LinearSpec, Metadata

Shape = tuple[int, int]


def fused_shapes(config: ModelConfig, layer: int) -> list[tuple[str, dict[str, Shape]]]:
    """Per fused linear layer of a decoder layer, in execution order: its name and the (rows, columns) of what is fused."""
    hidden, inner, p = config.hidden_size, config.intermediate_size, f"layers.{layer}."
    q, kv = config.query_size, config.kv_size
    return [
        (f"{p}qkv", {f"{p}q": (q, hidden), f"{p}k": (kv, hidden), f"{p}v": (kv, hidden)}),
        (f"{p}o", {f"{p}o": (hidden, q)}),
        (f"{p}gate_up", {f"{p}gate": (inner, hidden), f"{p}up": (inner, hidden)}),
        (f"{p}down", {f"{p}down": (hidden, inner)}),
    ]


def array_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Norm gains and the untied embedding."""
    shapes: dict[str, tuple[int, ...]] = {}
    if not config.tie_word_embeddings:
        shapes["embedding"] = (config.vocab_size, config.hidden_size)
    for i in range(config.num_hidden_layers):
        shapes[f"layers.{i}.attention_norm"] = (config.hidden_size,)
        if config.qk_norm:
            shapes[f"layers.{i}.q_norm"] = (config.head_dim,)
            shapes[f"layers.{i}.k_norm"] = (config.head_dim,)
        shapes[f"layers.{i}.mlp_norm"] = (config.hidden_size,)
    shapes["norm"] = (config.hidden_size,)
    return shapes


def check(metadata: Metadata) -> None:
    """FormatError unless layers and arrays are exactly those of the configuration, in shape and in storage."""
    config, expected = metadata.config, dict[str, Shape]()
    for layer in range(config.num_hidden_layers):
        for fused, parts in fused_shapes(config, layer):
            if fused in metadata.linears:
                rows = sum(rows for rows, _ in parts.values())
                expected[fused] = (rows, next(iter(parts.values()))[1])
            else:
                expected.update(parts)
    expected["head"] = (config.vocab_size, config.hidden_size)
    _same_names("linear layers", set(expected), set(metadata.linears))
    for name, shape in expected.items():
        linear = metadata.linears[name]
        if (linear.rows, linear.columns) != shape:
            raise FormatError(f"{name} is {linear.rows} x {linear.columns}; its configuration says {shape[0]} x {shape[1]}")
        _check_parts(linear)
    arrays = array_shapes(config)
    _same_names("arrays", set(arrays), set(metadata.arrays))
    for name, wanted in arrays.items():
        array = metadata.arrays[name]
        if array.shape != wanted or array.dtype not in ("f32", "f16", "bf16"):
            raise FormatError(f"{name} is {array.dtype} {array.shape}; its configuration says a float array {wanted}")


def _check_parts(linear: LinearSpec) -> None:
    for weight in linear.weights:
        expected = weight.codec.parts(weight.rows, weight.columns)
        stored = {"q": weight.q, "scale": weight.scale, "zero": weight.zero}
        for part, array in stored.items():
            want = expected.get(part)
            if (want is None) != (array is None):
                raise FormatError(f"{linear.name}: codec {weight.codec.name} and part {part!r} do not agree")
            if want is None or array is None:
                continue
            dtype = {"float32": "f32", "float16": "f16", "uint8": "u8", "uint16": weight.codec.kind}[want.dtype]
            if (array.dtype, array.shape) != (dtype, want.shape):
                raise FormatError(
                    f"{linear.name}: {part} is {array.dtype} {array.shape}; codec {weight.codec.name} says {dtype} {want.shape}"
                )
    if linear.bias and (linear.bias.shape != (linear.rows,) or linear.bias.dtype not in ("f32", "f16", "bf16")):
        raise FormatError(f"{linear.name}: bias is {linear.bias.dtype} {linear.bias.shape}; expected floats ({linear.rows},)")


def _same_names(what: str, expected: set[str], found: set[str]) -> None:
    if expected != found:
        missing, extra = sorted(expected - found)[:3], sorted(found - expected)[:3]
        raise FormatError(f"the file's {what} do not fit its configuration: missing {missing}, unexpected {extra}")
