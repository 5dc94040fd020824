"""GPTQ of the head: its inputs, the outputs of the last layer as stored, are at hand when all layers are written."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from edgeq.converters.calibration.compute import Compute
from edgeq.converters.calibration.moments import Moments
from edgeq.converters.calibration.torch_decoder import Norm
from edgeq.converters.rounding.columns import factorize, quantize_matrix
from edgeq.converters.rounding.linears import Recipe, RoundRows
from edgeq.converters.rounding.presets import MIN_MAX_ZERO_WEIGHED
from edgeq.converters.rounding.quantizer import Quantized, quantize
from edgeq.format.codec import Codec


@torch.no_grad()
def gptq_rounding(states: Sequence[Tensor], norm: Norm, compute: Compute | None = None) -> RoundRows:
    """Rounding of rows of the head over these outputs of the last layer, each [rows, tokens, hidden]; `norm`: the last one.

    All but what is computed is on the CPU.  Output channels do not depend on each other: rows may come in slabs of any size.
    """
    compute = compute or Compute()
    moments = Moments(states[0].shape[-1], compute.device)
    for batch in states:
        moments.add(compute.put(norm(batch)).flatten(0, -2))
    factor = factorize(moments.matrix, Recipe(Codec("int", 8)), act_order=False)

    def round_rows(weight: Tensor, codec: Codec, title: str) -> Quantized:
        if factor is None:
            return quantize(weight, codec, title)
        return quantize_matrix(compute.put(weight), factor, Recipe(codec, MIN_MAX_ZERO_WEIGHED), title)[0][0]

    return round_rows
