"""Argument records that several kernels share; a kernel's own record lies beside it (jit/args.py has how they work).

Strides are bytes from one token row to the next, blocks are 16 output channels (edgeq/format/codec.py), and 0 is no address.
"""

from __future__ import annotations

from edgeq.targets.cpu.jit.args import Args, nbytes, number, pointer

NONE, FLOAT, A8, A16, A16_PAIRS = range(5)
"""Kinds of quantized activations: none, float32 as it is, int8, 16 bits as two bytes apart, int16 for pairs of channels."""
BLOCK, TOKEN, TOKEN_ZERO, STATIC = 0, 1, 2, 3
"""What a scale is for: a block of channels, symmetric; a token row, symmetric or with a zero point; all rows of a modality."""

CHUNKS, HALF_CHUNK, WHOLE, ONE_CHUNK = range(4)
"""Integers that a product adds up before it multiplies with scales: of an activation block of whole chunks, of one of half a
chunk; of the whole row, where neither weights nor activations have a scale inside it and all its blocks have the same; or of an
activation block of one chunk, whose sums no loop has to keep."""

F16_KIND, BF16_KIND, F32_KIND = 2, 3, 4
"""Kinds of float weights and of stored vectors."""
FLOAT_KINDS = {"f32": F32_KIND, "f16": F16_KIND, "bf16": BF16_KIND}


class QuantizedArgs(Args, part=True):
    """Where the maker of a buffer writes its quantized activations, and how they are rounded (quantize.py).

    kind            NONE, FLOAT, A8, A16 or A16_PAIRS
    columns, block  channels of a row, and how many of them share a scale in store
    stride          bytes of a row of the tiles at `data`
    scales, sums    f32 and int32 per row and block
    limit           the largest integer
    factors         f32 per channel that x is multiplied by first, or 0
    winograd_sums   int32 per row and block for products by Winograd's method, or 0
    constants       constant scales: inverse and scale, two f32 for each modality; 0: the scale is taken from x
    modality        u8 per row
    flat_from       in a run of so many rows or more every row lies by itself, not in tiles, and of A16 all low bytes before all
                    high ones; 0: in no run
    """

    kind = number(NONE)
    columns = number(0)
    block = number(16)
    stride = nbytes(0)
    data = pointer(0)
    scales = pointer(0)
    sums = pointer(0)
    limit = number(0)
    factors = pointer(0)
    winograd_sums = pointer(0)
    constants = pointer(0)
    modality = pointer(0)
    flat_from = number(0)


NOT_QUANTIZED = QuantizedArgs()


class ProductArgs(Args):
    """A product y = W x + bias.

    x                 quantized activations: data, bytes of a row, scales, sums, activation blocks of a row.  Of `thin_matmul`
                      rows of float32
    weights           in file order; scales: address, bytes from one block of output channels to the next, and from one
                      activation block to the next; zeros: zero points or offsets, in the same order, or tables, i8 per block of
                      output channels and index
    super_scales      and super_offsets, of two levels: addresses, bytes from one block of output channels to the next
    columns           of floats: input channels
    chunks            of integers: chunks of 32 input channels in a row, and in what is added up before it is scaled
    group_blocks      blocks that stay in the cache while tokens pass
    bias              f32 or 0
    add               1: the product is added to y
    scratch           SCRATCH_BYTES of every thread
    winograd_sums     of the activations, int32 per row and block, or 0
    room              of every thread, for what a product makes of the weights, and how much;  numbers_bytes: of what it makes
                      of the rows before that, on a matrix unit
    block_step        of tiles of several blocks: from one block to the next
    prefetch_bytes    how far ahead weights are asked for, where the instruction set does that
    """

    x = pointer()
    x_stride = nbytes()
    x_scales = pointer(0)
    x_sums = pointer(0)
    x_blocks = number(0)
    weights = pointer()
    weights_block = nbytes()
    scales = pointer(0)
    scales_block = nbytes(0)
    scales_step = nbytes(0)
    zeros = pointer(0)
    super_scales = pointer(0)
    super_offsets = pointer(0)
    super_block = nbytes(0)
    chunks = number()
    chunks_per_block = number(0)
    output_channels = number()
    group_blocks = number()
    y = pointer()
    y_stride = nbytes()
    bias = pointer(0)
    add = number(0)
    scratch = pointer()
    winograd_sums = pointer(0)
    room = pointer(0)
    room_bytes = nbytes(0)
    numbers_bytes = nbytes(0)
    block_step = number(1)
    prefetch_bytes = nbytes(0)


class StateArgs(Args):
    """What every kernel of a state reads (lowering/context.py, RowArrays).  A work item is a session and some channels.

    sessions                 their number, int64
    order, begins            of the rows in it, by session and slot
    slots                    int32 per row
    states, snapshots        of each session
    offset, snapshot_offset  bytes to this layer's
    """

    sessions = pointer()
    order = pointer()
    begins = pointer()
    slots = pointer()
    states = pointer()
    snapshots = pointer()
    offset = nbytes()
    snapshot_offset = nbytes()


class CacheArgs(Args):
    """What every kernel of the key/value cache reads.

    x             rows of queries, keys and values
    padded_dim    head_dim padded to 16
    slots         int32 per row: its place in the cache of its session
    page_tables   int64 per row: the address of an array of page addresses
    layer_offset  bytes from the start of a page to this layer
    high          dimensions of a head in 8 bits, of an int4 cache
    """

    x = pointer()
    x_stride = nbytes()
    heads = number()
    kv_heads = number()
    head_dim = number()
    padded_dim = number()
    slots = pointer()
    page_tables = pointer()
    layer_offset = nbytes()
    high = number()
