"""A model in another basis that its weights absorb, for methods that round the weights as they then are (`--rotate`).

What QuaRot (Ashkboos et al. 2024, arXiv 2404.00456) absorbs, without what it does online: diag(+-1) H on the residual stream, H
of head_dim on every head's values.  Sums of many weights are nearer to a Gaussian than single ones, which is what grids of few
levels are made for, and an outlier is spread over all channels.  The gains of the norms move into the linear layers after them;
the last one's into the head, which therefore is no longer the embedding: where it was, the file has both.  The runtime has
nothing to do for it.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from edgeq.converters.checkpoint.slabs import SLAB_BYTES, Tensors
from edgeq.converters.families import Family
from edgeq.converters.method import Method, Study
from edgeq.converters.planning.options import ConvertOptions
from edgeq.converters.rotation.fuse import READERS, WRITERS, LayerRotation, Rotation, role
from edgeq.converters.rotation.hadamard import hadamard
from edgeq.converters.rotation.model import RotatedModel
from edgeq.converters.rotation.orthogonal import generator, signs
from edgeq.errors import UnsupportedError
from edgeq.format.manifest import FLOAT_PARTS
from edgeq.network.config import ModelConfig
from edgeq.network.stack import Stack

SIGNS_SEED = 0
TABLE_BITS = 8
"""Bits of an embedding that was the head: rounding it costs next to nothing, and it is read a row at a time."""
UNTOUCHED = ("q_norm", "k_norm")
"""Parts of a layer that a rotation of the residual stream and of the values leaves as they are."""


class FoldedRotation(Method):
    """Base of methods that round the weights of a rotated model where the options say so."""

    def __init__(self, options: ConvertOptions, family: Family, stack: Stack) -> None:
        super().__init__(options, family, stack)
        # "auto" is not decided yet (probing/rotation_choice.py).
        self.rotated = options.rotate is True
        if not self.rotated:
            return
        # Refused here, not after the first layer.
        if reason := obstacle(family, self.config):
            raise UnsupportedError(f"--rotate cannot rotate a {self.config.model_type}: it has {reason}; leave it out")
        self.keeps_channels = False
        if self.config.tie_word_embeddings:
            self.table_bits = TABLE_BITS

    @property
    def stored_config(self) -> ModelConfig:
        return replace(self.config, tie_word_embeddings=False) if self.rotated else self.config

    def dtype(self, part: str, stored: str) -> str:
        # A rotated bias or router is no longer a value of its old type, and small.
        return "f32" if self.rotated and (part.endswith(".bias") or part in FLOAT_PARTS) else super().dtype(part, stored)

    @property
    def details(self) -> dict[str, object]:
        return super().details | ({"seeds": {"signs": SIGNS_SEED}} if self.rotated else {})

    def memory_bytes(self, tokens: int) -> int:
        return super().memory_bytes(tokens) + (rotating_bytes(self.config.hidden_size, self.widest) if self.rotated else 0)

    def tensors(self, source: Tensors, study: Study) -> Tensors:
        if not self.rotated:
            return source
        config, residual = self.config, signed_hadamard(self.config.hidden_size)
        rotation = LayerRotation(residual, [hadamard(config.head_dim)] * config.num_key_value_heads)
        return RotatedModel(source, self.family, config, residual, lambda layer: rotation, {})


def signed_hadamard(size: int) -> Rotation:
    """x -> x diag(+-1) H, signs random and the same in every conversion."""
    sign, full = signs(size, generator(SIGNS_SEED)), hadamard(size)

    def rotate(x: Tensor) -> Tensor:
        return full(x * sign)

    return rotate


def rotating_bytes(hidden: int, widest: int) -> int:
    """Memory that rotating takes: one matrix and the rows of a slab, each in float64 too."""
    return 24 * hidden * widest + 24 * hidden**2 + 8 * SLAB_BYTES


def obstacle(family: Family, config: ModelConfig) -> str | None:
    """What keeps a model from being rotated; None: nothing."""
    if config.pooling:
        return "states of texts and no head"
    if reason := unrotatable(family, config):
        return reason
    for size in (config.hidden_size, config.head_dim):
        try:
            hadamard(size)
        except UnsupportedError:
            return f"{size} channels, for which there is no fast orthogonal transform"
    return None


def unrotatable(family: Family, config: ModelConfig) -> str | None:
    """What the network has between its linear layers that a rotation cannot pass, or that has no place here; None: nothing."""
    if config.post_norms:
        return "norms after attention and MLP, whose gains stand between the last linear layer and the residual stream"
    if config.attention_sinks or config.swiglu_limit is not None:
        return "attention sinks or experts with biases and a clamped SwiGLU"
    if config.embedding_norm:
        return "a norm of token embeddings"
    if config.clip_qkv is not None:
        return "limits of queries, keys and values (clip_qkv)"
    if config.layer_norm:
        return "LayerNorm with a bias"
    if config.parallel:
        return "an MLP that reads the norm of attention"
    known = {*READERS, *READERS.values(), *WRITERS, *UNTOUCHED}
    for layer in range(config.num_hidden_layers):
        for part in family.layer_parts(layer):
            if role(part).removesuffix(".bias") not in known:
                return f"{part} in layer {layer}, through which no rotation passes"
    return None
