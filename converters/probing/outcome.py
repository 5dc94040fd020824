"""The divergence of a finished file from its source, on a few rows of the calibration text: what the prediction is held to."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from edgeq.converters.calibration.forward import BlockForward, WholeReader
from edgeq.converters.calibration.head import ChangedTable, Rounded
from edgeq.converters.checkpoint.slabs import Tensors
from edgeq.converters.planning.plan import ConversionPlan
from edgeq.converters.probing.divergence import divergences_through


@torch.no_grad()
def divergence_of_file(
    plan: ConversionPlan, rows: Tensor, stored: WholeReader, head: Rounded, table: Rounded, on_share: Callable[[float], None]
) -> float:
    """Mean KL divergence in nats over token rows [rows, length].

    stored   tensors of the decoder layers as the file has them;  head, table   rows of head and embedding as the file has them
    on_share is called with the share of the layers' work that is done
    """
    config = plan.method.config
    model = plan.model
    tensors: Tensors = ChangedTable(model, config.vocab_size, table)
    exact = BlockForward(plan.checkpoint, plan.method.family, config, rows, model, plan.compute)
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
