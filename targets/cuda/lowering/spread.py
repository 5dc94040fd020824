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
from edgeq.targets.cuda.run.storage import Storage
from edgeq.targets.cuda.supply.pack import Variant
from edgeq.targets.graph import Linear

WARPS = 4
"""Warps of a block of threads."""
ROWS, TILES = 16, 2
"""Output channels of a block of the file; tiles of 8 token rows of a run of few."""
MAX_SUM_BYTES = 64 << 20
"""Bytes that the shares of a product may leave: one that would leave more is not shared."""
GATED = 1
"""Which literal of `fused_activate` says that there is a gate."""
PROLOGUE = 2
"""What a block of threads does before it multiplies, norm and quantized input, in blocks of 16 output channels: by the SASS of
i4 g128 about 3,000 clocks for a round of input channels, of which the product with a block takes 1,100 to 1,700."""


def spread(
    launches: Iterable[Lowered], tuning: Tuning, storage: Storage, blocks_held: Callable[[Variant], int]
) -> list[Lowered]:
    """The launches with their fused products spread.  blocks_held(variant): blocks of threads that a multiprocessor holds"""
    return [_spread(each, tuning, storage, blocks_held) if isinstance(each, Launch) else each for each in launches]


def _spread(launch: Launch, tuning: Tuning, storage: Storage, blocks_held: Callable[[Variant], int]) -> Launch:
    arguments, op = launch.arguments, launch.operation
    if not isinstance(arguments, FusedArguments) or not isinstance(op, Linear):
        return launch
    resident = max(1, min(tuning.resident, blocks_held(launch.variant)))
    factors = 2 if launch.variant.kernel == "fused_activate" and launch.variant.literals[GATED] else 1
    made, multiprocessors, rounds = arguments.spread, storage.device.multiprocessors, rounds_of(op.linear)
    if not made.each:
        made = divided(made.most, factors, tuning.per_block, multiprocessors * resident)
    if arguments.second is None:
        # Room for it does not depend on what is held, which is not known where the memory of a model is predicted.
        room, fewest = left(arguments, made.most * factors), made.most // (arguments.spread.each or 1)
        if shared(fewest, rounds, multiprocessors * tuning.resident) > 1 and room <= MAX_SUM_BYTES:
            made = replace(
                made,
                shares=shared(made.ctas, rounds, multiprocessors * resident),
                sums=storage.named(("sums of shares", room), room),
                arrived=storage.named("shares that arrived", TILES * multiprocessors * tuning.resident * 4),
            )
    mine = made.each * factors * -(-rounds // made.shares)
    first = ahead(op.linear, mine, tuning.in_flight, min(resident, made.ctas * made.shares / multiprocessors))
    return replace(launch, arguments=replace(arguments, spread=replace(made, ahead=first)))


def rounds_of(layer: LinearSpec) -> int:
    """Rounds of input channels of a layer, of two weight blocks those of the first."""
    weight = layer.weights[0]
    return -(-weight.columns // occupancy.channels_of_round(activation_block(weight.codec), WARPS))


def shared(ctas: int, rounds: int, places: int) -> int:
    """How many blocks of threads share the rounds of input channels of one, so that all of them have a place."""
    each = -(-rounds // max(1, min(rounds, places // ctas)))
    return -(-rounds // each)


def left(arguments: FusedArguments, blocks: int) -> int:
    """Bytes of what the shares of so many blocks of 16 output channels leave, as a power of two: products of several sizes use
    the same."""
    return 1 << (TILES * 8 * blocks * ROWS * arguments.block.groups * 4 - 1).bit_length()


def divided(blocks: int, factors: int, most: int, places: int) -> SpreadArguments:
    """So many blocks of the file for a block of threads that all have ended soonest, of at most `most`.

    Those that have no place wait for others to end: in waves, each as long as a block of threads takes.

    factors   2: as many blocks again for the gate's other factor
    places    blocks of threads that the GPU runs side by side
    """

    def taken(count: int) -> int:
        return -(-blocks // (count * places)) * (count * factors + PROLOGUE)

    each = min(range(1, max(1, most // factors) + 1), key=lambda count: (taken(count), -count))
    return SpreadArguments(ctas=-(-blocks // each), each=each, most=blocks)


def ahead(layer: LinearSpec, rounds: int, wanted: int, resident: float) -> int:
    """How many of the rounds of a block of threads, of all its output blocks, are asked for before they are multiplied, so that
    a multiprocessor has `wanted` bytes in flight, and the L2 cache no more than that; where there are too few blocks of threads
    for that, all.

    resident   blocks of threads of a multiprocessor, a mean
    """
    weight = layer.weights[0]
    codec, group = weight.codec, activation_block(weight.codec)
    enough = (n for n in range(1, rounds) if resident * occupancy.asked(codec.bits, group, WARPS, n, weight.columns) >= wanted)
    return next(enough, rounds)
