"""What codecs cost beside their bytes: instructions that a warp issues for weights, counted in machine code."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from edgeq.format.codec import ROWS, Codec
from edgeq.system.devices import DEVICES
from edgeq.tools.lab.gpu_roofline.prediction import CLOCKS

WEIGHTS = 2048
"""Those of a turn of the inner loop of a warp: a group of 128 input channels of 16 output channels."""
ISSUED = 4
"""Instructions of a clock that a multiprocessor issues."""
BOARDS = ("jetson-orin-nano-8gb", "jetson-agx-orin-64gb", "rtx-4060-laptop", "rtx-4090", "h100")


@dataclass(frozen=True)
class Instructions:
    """A turn of the inner loop of a product: loads of weights and of the input, what decodes them, mma, scales."""

    a16: int
    a8: int


COUNTED: Mapping[str, Instructions] = {
    "i4 g128": Instructions(171, 111),
    "i3 g128": Instructions(257, 199),
    "i2 g128": Instructions(194, 137),
    "i4 g128 half s4": Instructions(194, 137),
    "i2 g128 half": Instructions(243, 142),
    "i2 g128 half s4": Instructions(253, 148),
    "n4 g128": Instructions(272, 213),
    "n3 g128": Instructions(286, 228),
    "n2 g128": Instructions(232, 174),
    "t3 g128 s4": Instructions(415, 356),
    "t2 g128 s4": Instructions(312, 253),
    "t1 g128 s4": Instructions(311, 250),
}
"""By nvdisasm in what NVRTC 12.6 makes of `matvec` for sm_87."""
FUSED = Instructions(39, 28)
"""For 512 weights of `fused_rows`, i4 g128 (tests/cuda/supply/test_machine_code.py); counted once for sm_80 and sm_89 too."""


def codecs_section() -> Iterator[str]:
    """Lines of the page."""
    needs = ", ".join(f"{name} {DEVICES[name].bandwidth / DEVICES[name].multiprocessors / CLOCKS[name]:.1f}" for name in BOARDS)
    yield f"""
## Other codecs

Instructions that a warp of `matvec` issues for 512 weights in groups of 128, all of the inner loop with loads, mma and scales,
*counted* in the machine code for sm_87; and the bytes, scales included, and the weights that a multiprocessor gets through in
a clock where nothing but instructions bounds it, {ISSUED} in a clock. To keep its memory busy it must get through, in bytes a
clock: {needs}.
Where a codec has fewer, a product for one token takes the ratio of the two longer than its bytes do. Fused products, which
decode a token, issue fewer: {FUSED.a16} instructions in a16 and {FUSED.a8} in a8 for 512 weights of i4 g128, with what sums
groups and asks for lines of L2; on sm_80 and sm_89 as many as on sm_87.

| codec | bytes of 512 weights | instructions, a16 | a8 | bytes a clock, a16 | a8 | weights a clock, a16 | a8 |
|---|---|---|---|---|---|---|---|"""
    for name, counted in COUNTED.items():
        codec = Codec.named(name)
        parts = codec.parts(ROWS, WEIGHTS // ROWS)
        nbytes = sum(part.nbytes for key, part in parts.items() if key in ("q", "scale"))
        both = (counted.a16, counted.a8)
        instructions, rates, weights = (
            [format(value, form) for value in values]
            for values, form in (
                ([each * 512 / WEIGHTS for each in both], ".0f"),
                ([ISSUED * nbytes / each for each in both], ".1f"),
                ([ISSUED * WEIGHTS / each for each in both], ".0f"),
            )
        )
        yield f"| {name} | {nbytes * 512 // WEIGHTS} | {' | '.join((*instructions, *rates, *weights))} |"
