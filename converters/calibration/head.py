"""The end of a model that runs over calibration text: the last norm, the head in slabs of the vocabulary, and GPTQ of it.

The inputs of the head, outputs of the last layer as stored, are at hand when all layers are written.  A head may be the
embedding too: `ChangedTable` has that with other rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from edgeq.converters.calibration.compute import LOGIT_BYTES, Compute
from edgeq.converters.calibration.forward import stored_norm
from edgeq.converters.calibration.moments import Moments
from edgeq.converters.calibration.torch_decoder import Norm
from edgeq.converters.checkpoint.slabs import RowReader, Tensors, slabs
from edgeq.converters.families import EMBEDDING, HEAD, NORM
from edgeq.converters.rounding.columns import factorize, quantize_matrix
from edgeq.converters.rounding.linears import Recipe, RoundRows
from edgeq.converters.rounding.presets import MIN_MAX_ZERO_WEIGHED
from edgeq.converters.rounding.quantizer import Quantized, quantize
from edgeq.format.codec import Codec
from edgeq.network.config import ModelConfig

EMBEDDING_SHARE = 0.3
"""Mean square of what an embedding is taken to be multiplied by, over that of the head's inputs: of 0, 0.3, 1, 3 and 10 it
loses least on the demo model in 3 and in 4 bits (docs/quality.md)."""
SPAN = 1024
"""Rows of an embedding that are changed at a time."""
Rounded = Callable[[Tensor, int], Tensor]
"""Rows of a matrix, float32 [rows, columns], and the index of the first one -> the same rows after rounding."""


DENSE_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "gelu": nn.functional.gelu,
}


def unchanged(rows: Tensor, first: int) -> Tensor:
    """`Rounded` of a head that stays as it is."""
    return rows


@dataclass
class LogSumExp:
    """Log-sum-exp of logits that pass by in slabs of the vocabulary; float64 [tokens], on the CPU."""

    value: Tensor

    @classmethod
    def of(cls, tokens: int) -> LogSumExp:
        return cls(torch.full((tokens,), -math.inf, dtype=torch.float64))

    def add(self, logits: Tensor) -> Tensor:
        """Logits float32 [tokens, slab], on any device; returns the share of what was added so far, this slab included."""
        part = logits.logsumexp(1).cpu().double()
        self.value = torch.logaddexp(self.value, part)
        return (part - self.value).exp()


def capped(logits: Tensor, config: ModelConfig) -> Tensor:
    """What the softmax reads of products of the head."""
    cap = config.final_logit_softcapping
    return logits if cap is None else cap * torch.tanh(logits / cap)


def last_norm(config: ModelConfig, tensors: Tensors) -> Norm:
    """The norm before the head."""
    return stored_norm(tensors, config, NORM.removesuffix(".weight"))


def beginnings(states: Tensor, pooling: str) -> Tensor:
    """The vector of every beginning of a row, from its states float32 [rows, tokens, hidden]; of the same shape."""
    return states if pooling == "last" else states.cumsum(1) / torch.arange(1, states.shape[1] + 1)[:, None]


def vectors(states: Tensor, config: ModelConfig, tensors: Tensors) -> Tensor:
    """The vectors of all beginnings of rows, or where tokens see both ways of whole rows alone, [rows, beginnings, channels].

    states   float32 [rows, tokens, hidden]

    They are not normalized.
    """
    pooling = config.pooling
    assert pooling is not None
    x = states[:, :1] if pooling.kind == "cls" else beginnings(states, pooling.kind)
    x = x[:, -1:] if config.bidirectional else x
    for index, layer in enumerate(pooling.dense):
        bias = torch.from_numpy(tensors.whole(f"dense.{index}.bias")) if layer.bias else None
        x = nn.functional.linear(x, torch.from_numpy(tensors.whole(f"dense.{index}.weight")), bias)
        x = DENSE_ACTIVATIONS[layer.activation](x)
        if layer.norm:
            gain = torch.from_numpy(tensors.whole(f"dense.{index}.norm.weight"))
            x = nn.functional.layer_norm(x, gain.shape, gain, eps=config.rms_norm_eps)
    return x


def head_slabs(read: RowReader, config: ModelConfig, tokens: int) -> Iterator[NDArray[np.float32]]:
    """The rows of the head, so many at a time that the logits of `tokens` for them have at most LOGIT_BYTES."""
    name = EMBEDDING if config.tie_word_embeddings else HEAD
    return slabs(((name, config.vocab_size),), config.hidden_size, read, max(1, LOGIT_BYTES // (4 * max(tokens, 1))))


class ChangedTable:
    """The tensors of a model, the rows of the embedding changed: a span at a time, since single rows cost nearly as much."""

    def __init__(self, source: Tensors, height: int, changed: Rounded) -> None:
        self._source, self._height, self._changed = source, height, changed
        self._first, self._span = 0, np.empty((0, 0), np.float32)

    def rows(self, name: str, start: int, stop: int) -> NDArray[np.float32]:
        if name != EMBEDDING:
            return self._source.rows(name, start, stop)
        if not self._first <= start <= stop <= self._first + len(self._span):
            self._first = start // SPAN * SPAN
            last = min(max(self._first + SPAN, stop), self._height)
            rows = torch.from_numpy(self._source.rows(name, self._first, last))
            self._span = self._changed(rows, self._first).numpy()
        return self._span[start - self._first : stop - self._first]

    def whole(self, name: str) -> NDArray[np.float32]:
        return self._source.whole(name)


@torch.no_grad()
def gptq_rounding(states: Sequence[Tensor], norm: Norm, compute: Compute | None = None, *, tied: bool = False) -> RoundRows:
    """Rounding of rows of the head over these outputs of the last layer, each [rows, tokens, hidden]; `norm`: the last one.

    tied   the head is the embedding too: not only its products with these outputs have to stay what they are

    All but what is computed is on the CPU.  Output channels do not depend on each other: rows may come in slabs of any size.
    """
    compute = compute or Compute()
    moments = Moments(states[0].shape[-1], compute.device)
    for batch in states:
        moments.add(compute.put(norm(batch)).flatten(0, -2))
    if tied:
        moments.matrix.diagonal().add_(EMBEDDING_SHARE * moments.matrix.diagonal().mean())
    factor = factorize(moments.matrix, Recipe(Codec("int", 8)), act_order=False)

    def round_rows(weight: Tensor, codec: Codec, title: str) -> Quantized:
        if factor is None:
            return quantize(weight, codec, title)
        return quantize_matrix(compute.put(weight), factor, Recipe(codec, MIN_MAX_ZERO_WEIGHED), title)[0][0]

    return round_rows
