"""Input channels that several blocks of threads share, and the sums that keep their order.

Where a product has fewer blocks of threads than a GPU has places, each gets a share of the rounds of input channels.  The sum
of an output channel adds the products of groups one after another, so no share can add its own first: each leaves its products,
and the last one to end adds all of them in the order of the groups, to the bits of one block of threads.  For a token and 16
output channels they are 64 bytes for each group, beside the 1,024 that it has of weights in i4 g128.
"""

from tvm.script import tirx as T

from edgeq.targets.cuda.kernels.prologue import TOKENS
from edgeq.targets.cuda.kernels.rows import THREADS


def first_of(share, shares, rounds):
    """The first round of a share."""
    return share * T.ceildiv(rounds, shares)


def end_of(share, shares, rounds):
    """The round after the last one of a share."""
    return T.min(rounds, (share + 1) * T.ceildiv(rounds, shares))


@T.inline
def leave_products(sums, start, first, part, held, count, tid):
    """Those of `held` groups from `first` on: part[group][16 channels][8 tokens] as sums[group][count tokens][16]."""
    for i in T.serial(T.ceildiv(held * count * 16, THREADS)):
        n: T.let = i * THREADS + tid
        if n < held * count * 16:
            sums[start + first * count * 16 + n] = part[n // (count * 16) * 128 + n % 16 * 8 + n // 16 % count]


@T.inline
def arrive(before, arrived, place, tid):
    """before[0]: how many shares had left their products.  After a barrier of those who wrote them."""
    if tid == 0:
        T.cuda.thread_fence()  # after the barrier, so of what all threads wrote (PTX memory model, cumulativity)
        before[0] = T.cuda.atomic_add(arrived.ptr_to([place]), 1)
    T.cuda.cta_sync()


@T.inline
def begin_to_read(arrived, place, tid):
    T.cuda.thread_fence()
    if tid == 0:
        arrived[place] = 0


@T.inline
def add_products(total, sums, start, part, groups, ROOM, count, tid):
    """total[0]: the sum over all groups, of token tid % 8 and output channel tid // 8.

    ROOM   groups of 8 tokens that `part` holds: it takes as many of fewer tokens as it can, so that a thread asks for ROOM
           numbers before it needs one
    """
    together: T.let = ROOM * TOKENS // count
    total[0] = T.float32(0)
    for p in T.serial(T.ceildiv(groups, together)):
        at: T.let = start + p * together * count * 16
        held: T.let = T.min(together, groups - p * together)
        for i in T.unroll(ROOM):
            if i * THREADS + tid < held * count * 16:
                part[i * THREADS + tid] = sums[at + i * THREADS + tid]
        T.cuda.cta_sync()
        if tid % 8 < count:
            for i in T.serial(held):
                T.ptx.add.rn.f32(total[0], total[0], part[(i * count + tid % 8) * 16 + tid // 8])
        T.cuda.cta_sync()
