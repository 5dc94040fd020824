"""The logits of a checkpoint, computed one decoder layer and one slab of the head at a time, in float32.

Weights are read in the type in which they are stored; neither the model nor its logits are ever whole in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from edgeq.converters.calibration.compute import BATCH_ROWS
from edgeq.converters.calibration.forward import BlockForward, token_activations
from edgeq.converters.calibration.head import capped, last_norm, vectors
from edgeq.converters.checkpoint.checkpoint import Checkpoint
from edgeq.converters.checkpoint.download import HubAccess
from edgeq.converters.checkpoint.sentence_transformers import embedding_settings
from edgeq.converters.checkpoint.slabs import BASELINE, SLAB_BYTES, Tensors, slabs
from edgeq.converters.families import EMBEDDING, HEAD, Family
from edgeq.converters.families.network import described, open_tensors
from edgeq.converters.importers import open_source
from edgeq.network.config import ModelConfig
from edgeq.system.machine import available_bytes

Collect = Callable[[int, int, NDArray[np.float32]], None]
"""Called with a part of the logits, float32 [positions, entries]: its first position and its first entry of the vocabulary.

Positions are those that have a next token, [windows, length - 1] one after another.
"""
POSITIONS = 512
"""Positions whose logits are in memory at a time."""


@dataclass(frozen=True)
class Network:
    """A checkpoint, opened and checked, and the network that it holds."""

    checkpoint: Checkpoint
    family: Family
    config: ModelConfig

    @classmethod
    def open(cls, source: str, pooling: str | None = None) -> Network:
        """A folder or a hub id; `pooling`: it embeds texts so, where it does not say that itself.

        Errors: as `edgeq.converters.planning.preflight.preflight` for what it says of the checkpoint.
        """
        opened = open_source(source, HubAccess())
        embeds = embedding_settings(opened, pooling)
        family, config = described(opened, embeds.pooling if embeds else None)
        return cls(open_tensors(opened, family), family, config)

    @property
    def head(self) -> str:
        """The tensor whose rows are the output channels of the head."""
        return EMBEDDING if self.config.tie_word_embeddings else HEAD

    def memory_bytes(self, windows: int, length: int) -> int:
        """The promise of `stream_logits`: anonymous memory beside what `Collect` keeps."""
        c = self.config
        parts = [4 * math.prod(shape) for _, shape in self.family.largest_layer().values()]
        hidden = 3 * 4 * windows * length * c.hidden_size
        batch = 4 * min(BATCH_ROWS, windows) * length * (3 * c.num_attention_heads * length + token_activations(c))
        return BASELINE + 6 * SLAB_BYTES + sum(parts) + 2 * max(parts) + hidden + batch

    def windows_that_fit(self, length: int) -> int:
        """The most windows whose promise the memory of this machine keeps; 0: not even one."""
        free = available_bytes()
        least, most = 0, 1 << 24
        while least < most:
            middle = (least + most + 1) // 2
            least, most = (middle, most) if self.memory_bytes(middle, length) <= free else (least, middle - 1)
        return least


@torch.no_grad()
def stream_logits(
    network: Network,
    tokens: NDArray[np.int64],
    collect: Collect,
    on_progress: Callable[[float, float, str], None],
    tensors: Tensors | None = None,
) -> None:
    """Run windows of tokens [windows, length], each from an empty cache, through the model; its logits go to `collect`.

    tensors       of the model; None: the checkpoint's own
    on_progress   as edgeq.converters.running.stages.OnProgress, in weights
    CheckpointError: a weight is NaN or infinite, or a file changed while it was read.
    """
    config, name = network.config, network.checkpoint.name
    tensors, layers, weights = tensors or network.checkpoint, config.num_hidden_layers, _layer_weights(network)
    total = layers * weights + config.vocab_size * config.hidden_size
    states = _states(network, tokens, tensors, lambda done, label: on_progress(done, total, label))
    windows, predicted = tokens.shape[0], tokens.shape[1] - 1
    entry = 0
    for rows in slabs(((network.head, config.vocab_size),), config.hidden_size, tensors.rows):
        on_progress(layers * weights + entry * config.hidden_size, total, f"{name}: head")
        weight = torch.from_numpy(rows)
        for window in range(windows):
            for start in range(0, predicted, POSITIONS):
                inputs = states[window, start : min(start + POSITIONS, predicted)]
                collect(window * predicted + start, entry, capped(inputs @ weight.T, config).numpy())
        entry += len(rows)


@torch.no_grad()
def pooled_vectors(
    network: Network, tokens: NDArray[np.int64], on_progress: Callable[[float, float, str], None]
) -> NDArray[np.float32]:
    """Vectors of windows of tokens [windows, length] by a model that embeds texts, float32 [windows, channels], not normalized.

    Arguments and errors are those of `stream_logits`.
    """
    total = network.config.num_hidden_layers * _layer_weights(network)
    states = _states(network, tokens, network.checkpoint, lambda done, label: on_progress(done, total, label))
    found: NDArray[np.float32] = vectors(states, network.config, network.checkpoint)[:, -1].numpy()
    return found


def _layer_weights(network: Network) -> int:
    return sum(math.prod(shape) for _, shape in network.family.largest_layer().values())


def _states(
    network: Network, tokens: NDArray[np.int64], tensors: Tensors, on_layer: Callable[[float, str], None]
) -> torch.Tensor:
    """What comes out of the last norm, float32 [windows, length, hidden]; `on_layer` takes weights done, and a label."""
    config, name, layers = network.config, network.checkpoint.name, network.config.num_hidden_layers
    forward = BlockForward(network.checkpoint, network.family, config, torch.from_numpy(tokens), tensors)
    for index in range(layers):
        on_layer(index * _layer_weights(network), f"{name}: layer {index + 1} of {layers}")
        layer = forward.load(index)
        forward.advance(index, layer)
        forward.unload(layer)
    norm = last_norm(config, tensors)
    for window in forward.hidden:
        window.copy_(norm(window))
    return forward.hidden
