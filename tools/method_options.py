"""Options of `edgeq convert` that only some methods, or only models that see, have a use for.

The names that an option takes are written here, for importing what defines them would make `edgeq --help` slow; a test holds
them to their definitions.
"""

from __future__ import annotations

from edgeq.tools.help_sections import decorated, section
from edgeq.tools.params import OneOf, VisionBits

MASTERS = ("i8", "bf16")
ACTIVATIONS = ("token", "static")
single = section("Options of single methods")
VISION_BITS = section("Quantization")(
    "--vision-bits",
    type=VisionBits(),
    metavar="W[/A]",
    help="Bits of the weights and activations of a vision tower: 2 to 8, or 16 for as they are; activations 8 or 16.  "
    "[default: 8/8]",
)
SINGLE_METHODS = decorated(
    single(
        "--act-order/--no-act-order",
        "act_order",
        default=None,
        help="gptq: quantize columns with large activations first.  [default: no]",
    ),
    single("--gptq/--no-gptq", "gptq", default=None, help="quarot, resq: round by gptq.  [default: round to nearest]"),
    single(
        "--split-row/--no-split-row",
        "split_row",
        default=None,
        help="quarot: keep the column that holds the means of the down projection's weights apart in 16 bits.  [default: no]",
    ),
    single("--rank", type=int, metavar="N", help="ttq: rank of the 16-bit correction; 0: none.  [default: 16]"),
    single(
        "--master", type=OneOf(*MASTERS), help="ttq: type of the master weights that the device rounds from.  [default: i8]"
    ),
    single(
        "--alpha",
        type=float,
        metavar="0..1",
        help="smoothquant: share of the range of activations that moves into the weights.  [default: 0.5]",
    ),
    single(
        "--high-fraction", type=float, metavar="0..0.5", help="resq: share of the channels kept in 8 bits.  [default: 0.125]"
    ),
    single(
        "--activations",
        type=OneOf(*ACTIVATIONS),
        help="smoothquant: a scale for every token, or constant ones, measured on the calibration text.  [default: token]",
    ),
)
