"""KL divergence at the logits between the model as it was and variants of it, from their outputs of the last layer.

The head is read in slabs of the vocabulary, once for all variants; no logits of the whole vocabulary are in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from edgeq.converters.calibration.head import LogSumExp, Rounded, capped, head_slabs, last_norm, unchanged
from edgeq.converters.planning.plan import ConversionPlan
from edgeq.network.config import ModelConfig


@dataclass(frozen=True)
class HeadVariant:
    """`inputs` of the head, float32 [tokens, hidden], and what becomes of its rows."""

    inputs: Tensor
    head: Rounded = unchanged


@torch.no_grad()
def divergences(
    config: ModelConfig, head: Iterator[NDArray[np.float32]], exact: Tensor, variants: Sequence[HeadVariant]
) -> list[float]:
    """Mean KL(p || q) in nats over the tokens, of every variant q from `exact` [tokens, hidden] through the `head` as it is.

    Computed on the device of `exact`; the variants are brought there.

    KL(p || q) = sum p (l - m) - log sum exp l + log sum exp m for logits l and m, summed slab by slab of the vocabulary.
    """
    device, everything = exact.device, LogSumExp.of(len(exact))
    totals = [LogSumExp.of(len(exact)) for _ in variants]
    gaps = [torch.zeros(len(exact), dtype=torch.float64) for _ in variants]
    first = 0
    for rows in head:
        weight = torch.from_numpy(rows)
        logits = capped(exact @ weight.to(device).T, config)
        share, inside = everything.add(logits), logits.softmax(1)
        for variant, total, gap in zip(variants, totals, gaps, strict=True):
            changed = capped(variant.inputs.to(device) @ variant.head(weight, first).to(device).T, config)
            total.add(changed)
            here = inside.mul(logits - changed).sum(1).cpu().double()
            gap += share * (here - gap)
        first += len(weight)
    return [max(float((gap - everything.value + total.value).mean()), 0.0) for gap, total in zip(gaps, totals, strict=True)]


def divergences_through(plan: ConversionPlan, exact: Tensor, ends: Sequence[tuple[Tensor, Rounded]]) -> list[float]:
    """Divergences from `exact`, the outputs of the last layer [rows, length, hidden], of others, each with what becomes of the
    head."""
    config, tensors = plan.method.stored_config, plan.model
    norm = last_norm(config, tensors)
    variants = [HeadVariant(norm(end).flatten(0, 1), rounded) for end, rounded in ends]
    inputs = plan.compute.put(norm(exact).flatten(0, 1))
    return divergences(config, head_slabs(tensors.rows, config, len(inputs)), inputs, variants)
