"""Sources of tensors that a checkpoint has under other names, in another order, or without a factor of the network.

Also the keys of config.json that say so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from edgeq.converters.checkpoint.checkpoint import TensorSource
from edgeq.converters.families.family import NORM, NORM_BIAS, Values, linear_module
from edgeq.errors import FormatError
from edgeq.network.config import ModelConfig

Sources = dict[str, TensorSource]
MAX_MULTIPLIER = 1e6


def flag(values: Values, key: str) -> bool:
    """A key of config.json that decides how tensors lie or which there are."""
    if type(values[key]) is not bool:
        raise FormatError(f"{key} is {values[key]!r:.80}; expected true or false")
    return bool(values[key])


def multiplier(values: Values, key: str) -> float:
    """A key of config.json that is a factor of weights."""
    found = values[key]
    if type(found) not in (int, float) or not 1 / MAX_MULTIPLIER <= found <= MAX_MULTIPLIER:
        raise FormatError(f"{key} is {found!r:.80}; expected a number from {1 / MAX_MULTIPLIER:g} to {MAX_MULTIPLIER:g}")
    return float(found)


def layer_norms(config: ModelConfig, names: Mapping[str, str]) -> Sources:
    """Norms over the residual stream that are called otherwise: module of torch_decoder.py -> that of the checkpoint."""
    size = (config.hidden_size,)
    kinds = ("weight", "bias") if config.layer_norm else ("weight",)
    layers = [f"model.layers.{layer}." for layer in range(config.num_hidden_layers)]
    return {
        f"{p}{ours}.{kind}": TensorSource(f"{p}{theirs}.{kind}", size, size)
        for p in layers
        for ours, theirs in names.items()
        for kind in kinds
    }


def pairs_apart(heads: int, head_dim: int, rotated: int) -> tuple[int, ...]:
    """The order of the rows of heads in which channels i and rotated / 2 + i are turned against each other, of those in which
    2 i and 2 i + 1 are; the rest of a head stays as it is."""
    of_head = (*range(0, rotated, 2), *range(1, rotated, 2), *range(rotated, head_dim))
    return tuple(head * head_dim + i for head in range(heads) for i in of_head)


def from_pairs(config: ModelConfig, biases: Iterable[str]) -> Sources:
    """Queries and keys of a checkpoint whose rope turns neighbouring channels, and those of `biases` that they have."""
    sources: Sources = {}
    rotated = config.rope.rotary_size(config.head_dim)
    for part, heads in (("q", config.num_attention_heads), ("k", config.num_key_value_heads)):
        order, rows = pairs_apart(heads, config.head_dim, rotated), heads * config.head_dim
        for layer in range(config.num_hidden_layers):
            name = f"model.layers.{layer}.{linear_module(part)}"
            matrix = (rows, config.hidden_size)
            sources[f"{name}.weight"] = TensorSource(f"{name}.weight", matrix, matrix, order=order)
            if part in biases:
                sources[f"{name}.bias"] = TensorSource(f"{name}.bias", (rows,), (rows,), order=order)
    return sources


def fused_gate_up(config: ModelConfig) -> Sources:
    """Rows of gate and up that lie one below the other in one matrix."""
    inner, hidden, sources = config.intermediate_size, config.hidden_size, Sources()
    for layer in range(config.num_hidden_layers):
        p, stored = f"model.layers.{layer}.mlp.", (2 * inner, hidden)
        for part, row in (("gate", 0), ("up", inner)):
            sources[f"{p}{part}_proj.weight"] = TensorSource(f"{p}gate_up_proj.weight", stored, (inner, hidden), row)
    return sources


def convolution(name: str, shape: tuple[int, int]) -> TensorSource:
    """Taps of channels [channels, taps]: in GGUF files a matrix, in checkpoints with one input channel of each between them."""
    channels, taps = shape
    return TensorSource(name, shape, shape, otherwise=TensorSource(name, (channels, 1, taps), shape))


def scaled_logits(config: ModelConfig, factor: float) -> Sources:
    """The norm before a head whose logits the network multiplies by a factor; states that are pooled stay as they are."""
    size = (config.hidden_size,)
    return {} if config.pooling is not None else {NORM: TensorSource(NORM, size, size, factor=factor)}


def norms_without_biases(config: ModelConfig, modules: Iterable[str]) -> Sources:
    """Zeros for the biases of the last norm and of `modules` of every layer."""
    size = (config.hidden_size,)
    names = (f"model.layers.{layer}.{module}.bias" for layer in range(config.num_hidden_layers) for module in modules)
    return {name: TensorSource("", (), size) for name in (NORM_BIAS, *names)}
