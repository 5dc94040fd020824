"""How products quantize their input: by a kernel before them, or within a fused one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from edgeq.format.quantization import activation_block, input_rule
from edgeq.format.records import LinearSpec, Mode
from edgeq.targets.cuda.arguments.products import (
    QuantizedRowsArguments,
    QuantizeInputArguments,
    QuantizeInputStaticArguments,
    QuantizeInputTokenArguments,
)
from edgeq.targets.cuda.arguments.record import Arguments
from edgeq.targets.cuda.arguments.weights import QuantizedInputArguments
from edgeq.targets.cuda.lowering.context import Input, Lowering
from edgeq.targets.cuda.supply.pack import Variant
from edgeq.targets.layers import linears

FORM_BLOCK = 128
"""Channels that a warp quantizes at once, and of which a quantized input holds a multiple."""


@dataclass(frozen=True)
class InputQuantizer:
    """The kernel that quantizes an input, and the numbers of its rule (arguments/products.py).

    rule      "group", "token" or "static"
    integer   whether the result is bytes, else f16
    """

    rule: Literal["group", "token", "static"]
    integer: bool
    group: int
    limit: int
    symmetric: bool = False
    scales: int = 0
    kinds: int = 0
    modality: int = 0

    @property
    def variant(self) -> Variant:
        if self.rule == "static":
            return Variant("quantize_input_static", (self.group,))
        return Variant("quantize_input_token" if self.rule == "token" else "quantize_input", (self.integer, self.group))

    def arguments(self, x: Input, columns: int, data: int, quantized: QuantizedInputArguments) -> Arguments:
        """The record of its kernel, for rows of `x`."""
        rows = QuantizedRowsArguments(x=x.address, width=x.width, columns=columns, data=data, quantized=quantized)
        if self.rule == "group":
            return QuantizeInputArguments(rows=rows, limit=self.limit)
        if self.rule == "token":
            return QuantizeInputTokenArguments(rows=rows, symmetric=int(self.symmetric), levels=self.limit)
        return QuantizeInputStaticArguments(
            rows=rows, scales=self.scales, kinds=self.kinds, modality=self.modality, limit=self.limit
        )


def input_quantizer(lowering: Lowering, layer: LinearSpec, place: int, mode: Mode) -> InputQuantizer:
    """How the input of weight block `place` is quantized."""
    group, rule = activation_block(layer.weights[place].codec), input_rule(layer, place, mode)
    if rule is None:
        return InputQuantizer("group", False, group, 0)
    if rule.kind == "block":
        return InputQuantizer("group", True, group, rule.limit)
    if rule.scales is not None:
        return InputQuantizer(
            "static", True, group, rule.limit, scales=lowering.storage.floats(rule.scales), kinds=rule.scales.shape[0],
            modality=lowering.sent("modality"),
        )  # fmt: skip
    symmetric = rule.kind == "token"
    return InputQuantizer("token", symmetric or rule.bits < 8, group, rule.limit, symmetric)


def input_memory(lowering: Lowering, padded: int, groups: int) -> tuple[int, QuantizedInputArguments]:
    """Room for the widest quantized input in any kind: f16 is the larger one, and a group has at least 16 channels."""
    channels = -(-widest_input(lowering) // FORM_BLOCK) * FORM_BLOCK * padded
    data, xs, xn = (
        lowering.storage.named(("quantize_input", name), nbytes)
        for name, nbytes in (("data", channels * 2), ("xs", channels // 16 * 4), ("xn", channels // 16 * 4))
    )
    return data, QuantizedInputArguments(xs=xs, xn=xn, groups=groups, padded=padded)


def widest_input(lowering: Lowering) -> int:
    return max(layer.columns for op in lowering.graph.operations for layer in linears(op))
