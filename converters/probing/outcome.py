"""The divergence of a finished file from its source, on a few rows of the calibration text: what the prediction is held to."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from edgeq.converters.calibration.forward import BlockForward, WholeReader
from edgeq.converters.calibration.head import head_slabs, last_norm
from edgeq.converters.checkpoint.slabs import Tensors
from edgeq.converters.families import EMBEDDING
from edgeq.converters.planning.plan import ConversionPlan
from edgeq.converters.probing.divergence import HeadVariant, Rounded, divergences

SPAN = 1024
"""Rows of an embedding that are changed at a time."""


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
def divergence_of_file(
    plan: ConversionPlan, rows: Tensor, stored: WholeReader, head: Rounded, table: Rounded, on_share: Callable[[float], None]
) -> float:
    """Mean KL divergence in nats over token rows [rows, length].

    stored   tensors of the decoder layers as the file has them;  head, table   rows of head and embedding as the file has them
    on_share is called with the share of the layers' work that is done
    """
    config = plan.method.config
    tensors: Tensors = ChangedTable(plan.checkpoint, config.vocab_size, table)
    exact = BlockForward(plan.checkpoint, plan.method.family, config, rows, compute=plan.compute)
    changed = BlockForward(plan.checkpoint, plan.method.family, config, rows, tensors, plan.compute)
    for index in range(config.num_hidden_layers):
        on_share(index / config.num_hidden_layers)
        for forward, read in ((exact, None), (changed, stored)):
            layer = forward.load(index, read)
            if read:
                plan.method.install(index, layer)
            forward.advance(index, layer)
            forward.unload(layer)
    (found,) = divergences_through(plan, exact.hidden, [(changed.hidden, head)])
    return found


def divergences_through(plan: ConversionPlan, exact: Tensor, ends: Sequence[tuple[Tensor, Rounded]]) -> list[float]:
    """Divergences from `exact`, the outputs of the last layer [rows, length, hidden], of others, each with what becomes of the
    head."""
    config, tensors = plan.method.config, plan.checkpoint
    norm = last_norm(config, tensors)
    variants = [HeadVariant(norm(end).flatten(0, 1), rounded) for end, rounded in ends]
    inputs = plan.compute.put(norm(exact).flatten(0, 1))
    return divergences(head_slabs(tensors.rows, config, len(inputs)), inputs, variants)
