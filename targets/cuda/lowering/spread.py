"""How fused products are spread over a GPU, once their kernels are loaded; results have the same bits by any spread.

Lowering leaves open what depends on how many blocks of threads of a kernel a multiprocessor holds: the driver says that of a
kernel that is loaded, by its registers and the shared memory of its blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from edgeq.format.quantization import activation_block
from edgeq.format.records import LinearSpec
from edgeq.targets.cuda.arguments.products import FusedArguments, SpreadArguments
from edgeq.targets.cuda.device import occupancy
from edgeq.targets.cuda.lowering.context import Launch, Lowered, Tuning
from edgeq.targets.cuda.supply.pack import Variant
from edgeq.targets.graph import Linear

WARPS = 4
"""Warps of a block of threads."""
GATED = 1
"""Which literal of `fused_activate` says that there is a gate."""
PROLOGUE = 2
"""What a block of threads does before it multiplies, norm and quantized input, in blocks of 16 output channels: by the SASS of
i4 g128 about 3,000 clocks for a round of input channels, of which the product with a block takes 1,100 to 1,700."""


def spread(launches: Iterable[Lowered], tuning: Tuning, multiprocessors: int, held: Callable[[Variant], int]) -> list[Lowered]:
    """The launches with their fused products spread.  held(variant): blocks of threads that a multiprocessor holds of it"""
    return [_spread(each, tuning, multiprocessors, held) if isinstance(each, Launch) else each for each in launches]


def _spread(launch: Launch, tuning: Tuning, multiprocessors: int, held: Callable[[Variant], int]) -> Launch:
    arguments, op = launch.arguments, launch.operation
    if not isinstance(arguments, FusedArguments) or not isinstance(op, Linear):
        return launch
    resident = max(1, min(tuning.resident, held(launch.variant)))
    factors = 2 if launch.variant.kernel == "fused_activate" and launch.variant.literals[GATED] else 1
    made = arguments.spread
    if not made.each:
        made = divided(made.most, factors, tuning.per_block, multiprocessors * resident)
    first = ahead(op.linear, made.ctas, made.each * factors, tuning.in_flight, min(resident, made.ctas / multiprocessors))
    return replace(launch, arguments=replace(arguments, spread=replace(made, ahead=first)))


def divided(blocks: int, factors: int, most: int, places: int) -> SpreadArguments:
    """So many blocks of the file for a block of threads that all have ended soonest, of at most `most`.

    Those that have no place wait for others to end: in waves, each as long as a block of threads takes.

    factors   2: as many blocks again for the gate's other factor
    places    blocks of threads that the GPU runs side by side
    """

    def taken(each: int) -> int:
        return -(-blocks // (each * places)) * (each * factors + PROLOGUE)

    each = min(range(1, max(1, most // factors) + 1), key=lambda each: (taken(each), -each))
    return SpreadArguments(ctas=-(-blocks // each), each=each, most=blocks)


def ahead(layer: LinearSpec, ctas: int, blocks: int, wanted: int, held: float) -> int:
    """How many rounds of the `blocks` of a block of threads are asked for before they are multiplied, so that a multiprocessor
    has `wanted` bytes in flight, and the L2 cache no more than that; where there are too few blocks of threads for that, all.

    held   blocks of threads of a multiprocessor, a mean
    """
    weight = layer.weights[0]
    codec, group = weight.codec, activation_block(weight.codec)
    rounds = blocks * -(-weight.columns // occupancy.channels_of_round(group, WARPS))
    enough = (n for n in range(1, rounds) if held * occupancy.asked(codec.bits, group, WARPS, n, weight.columns) >= wanted)
    return next(enough, rounds)
