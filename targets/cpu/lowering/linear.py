"""A linear layer as operations of the table: its parts in the order in which they act, as few operations as they need.

input_order, transform      operations that write a prepared copy of the input, which layers of the same parts share
input_scale                 inside the quantization, whoever does that
activation, mode            the maker of a buffer also writes its quantized form; scales per token take their own operation
weights                     a product for each block, the second adds
low_rank                    two thin products
bias, residual              inside the first product
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgeq.codec import CHUNK, ROWS
from edgeq.quantization import MAX_ACTIVATION_BLOCK, activation_block, activation_limit
from edgeq.records import LinearSpec, Mode, Transform, Weight
from edgeq.targets import graph as op
from edgeq.targets.cpu.jit.buffers import padded, row_stride
from edgeq.targets.cpu.jit.compile import COUNT
from edgeq.targets.cpu.jit.optable import FLOAT_KINDS, channel_parts, float_bits, kernel
from edgeq.targets.cpu.kernels import hadamard, low_rank, matmul, quantize, swiglu_matmul, winograd
from edgeq.targets.cpu.kernels import microkernel_int as tile
from edgeq.targets.cpu.kernels.quantize import Form, Reading
from edgeq.targets.cpu.lowering import requantize

if TYPE_CHECKING:
    from edgeq.targets.cpu.lowering.context import Lowering

PAIRS = "pairs"
"""What the threads know of the weights that they multiply by pairs of channels."""
GROUP_BYTES = 256 << 10
"""Weights that stay in a core's second-level cache while the tokens of a chunk pass by."""
LEAST_PRODUCTS = 1 << 16
"""Of a dense transform's base that are worth a part of their own."""
A16_LIMIT = 32767
"""The largest integer of an activation block in mode a16."""
LARGEST_BYTE = 127


def linear(lowering: Lowering, o: op.Linear) -> None:
    layer, raw = requantize.layer(lowering, o), o.x
    x, first = prepared(lowering, layer, raw), 0
    forms = []
    for index, weight in enumerate(layer.weights):
        forms.append(form(lowering, x, reading(lowering, layer, index, first, op.mode_of(o, lowering.options.mode))))
        first += weight.columns
    y = (lowering.buffers[o.out] + 4 * o.offset, lowering.row_bytes[o.out])
    bias = lowering.memory.floats(layer.bias) if layer.bias else 0
    lowering.gated = joined_swiglu(lowering, o, layer)
    for index, (weight, read) in enumerate(zip(layer.weights, forms, strict=True)):
        product(lowering, weight, read, *y, 0 if index else bias, o.add or index > 0, lowering.gated is not None)
    if layer.low_rank:
        a, b = layer.low_rank.a, layer.low_rank.b
        width = 4 * padded(a.rows)
        inner = (lowering.memory.shared("low rank", lowering.most * width), width)
        thin_product(lowering, a, lowering.buffers[raw], lowering.row_bytes[raw], *inner, False)
        thin_product(lowering, b, *inner, *y, True)
    requantize.release(lowering, o)
    lowering.wrote(o.out)


def joined_swiglu(lowering: Lowering, o: op.Linear, layer: LinearSpec) -> op.SwiGlu | None:
    """The SwiGLU behind this layer if its product does that too: gate and up are all that it gives, from one block of integers,
    nothing stands between, and the result is read in its quantized form alone."""
    after, (weight, *more) = next(iter(lowering.graph.operations[lowering.position + 1 :]), None), layer.weights
    if more or weight.codec.kind != "int" or layer.bias or layer.low_rank or o.add or o.offset:
        return None
    if not isinstance(after, op.SwiGlu) or after.x != o.out or after.width % ROWS or weight.rows != 2 * after.width:
        return None
    return after if formed_only(lowering, after.out, lowering.position + 1) else None


def formed_only(lowering: Lowering, buffer: str, position: int) -> bool:
    """Whether what the operation at `position` writes to `buffer` is read in one quantized form, and in no other way."""
    if lowering.source == "masters" or not lowering.joins:
        return False
    readings = set[Reading]()
    for o in lowering.graph.operations[position + 1 :]:
        if isinstance(o, op.Linear) and o.x == buffer and o.out != buffer:
            layer = o.linear
            if len(layer.weights) > 1 or layer.input_order or layer.transform or layer.low_rank:
                return False
            readings.add(reading(lowering, layer, 0, 0, op.mode_of(o, lowering.options.mode)))
        elif isinstance(o, (op.RmsNorm, op.SwiGlu)) and o.out == buffer != o.x:
            break
        elif buffer in op.buffers(o):
            return False
    whole = lowering.graph.buffers[buffer]
    return len(readings) == 1 and all(each.scaling == quantize.BLOCK and each.columns == whole for each in readings)


def prepared(lowering: Lowering, layer: LinearSpec, buffer: str) -> str:
    """The buffer that holds x ordered and transformed: made unless another layer has done so since x was written."""
    order = lowering.file.array(layer.input_order) if layer.input_order else None
    indices = 0 if order is None else lowering.memory.copied(order)
    size, stride, base = 1, 1, 0
    if layer.transform:
        size, stride = layer.transform.size, layer.transform.stride
        base = lowering.memory.copied(lowering.file.array(layer.transform.base)) if layer.transform.base else 0
    if not layer.transform and order is None:
        return buffer
    known = lowering.prepared.setdefault(buffer, {})
    parts = (indices, size, stride, base)
    if parts not in known:
        name = f"{buffer} {len(known)}"
        lowering.row_bytes[name] = row_stride(layer.columns)
        x = (lowering.buffers[buffer], lowering.row_bytes[buffer])
        out = lowering.buffers[name] = place(lowering, name, layer.columns)
        if order is not None:
            # A transform does not end where it reads.
            x, source = (place(lowering, "ordered", layer.columns) if layer.transform else out, lowering.row_bytes[name]), x
            words = (*source, *x, layer.columns, indices)
            lowering.emit(kernel(hadamard.gather), *words, parts=channel_parts(layer.columns))
        if layer.transform:
            transformed(lowering, layer.transform, base, x, (out, lowering.row_bytes[name]), layer.columns)
        known[parts] = name
    return known[parts]


def place(lowering: Lowering, name: str, columns: int) -> int:
    return lowering.memory.shared(name, lowering.most * row_stride(columns))


def transformed(lowering: Lowering, t: Transform, base: int, x: tuple[int, int], out: tuple[int, int], columns: int) -> None:
    """x and out: address and bytes of a row."""
    power, factor = t.size // t.base_size, float_bits(t.size**-0.5)
    if power > 1 or not base:
        target = (place(lowering, "butterflies", columns), out[1]) if base else out
        shape = (columns, power, t.stride, float_bits(1.0) if base else factor)
        pieces = columns // (power * t.stride) * max(1, t.stride // ROWS)
        lowering.emit(kernel(hadamard.hadamard), *x, *target, *shape, parts=min(pieces, channel_parts(columns)))
        x = target
    if base:
        terms = (columns, t.base_size, power * t.stride, factor, base)
        lowering.emit(kernel(hadamard.mix), *x, *out, *terms, parts=-(-columns * t.base_size // LEAST_PRODUCTS))


def reading(lowering: Lowering, layer: LinearSpec, index: int, first: int, mode: Mode) -> Reading:
    """How block `index` of the weights reads its channels, which begin at `first`."""
    weight = layer.weights[index]
    factors = lowering.memory.copied(lowering.file.array(layer.input_scale)) + 4 * first if layer.input_scale else 0
    factors = factors or requantize.factors(lowering, layer)
    if weight.codec.kind != "int":
        return Reading(quantize.FLOAT, weight.columns, MAX_ACTIVATION_BLOCK, factors=factors, first=first)
    codec, block = weight.codec, activation_block(weight.codec)
    kind, scaling = quantize.A16 if mode == "a16" else quantize.A8, quantize.BLOCK
    limit = A16_LIMIT if mode == "a16" else activation_limit(codec, mode)
    if mode != "a16" and layer.activation:
        bits = layer.activation.high_bits if index else layer.activation.bits
        if layer.activation.symmetric:
            limit, scaling = (1 << (bits - 1)) - 1, quantize.TOKEN
        else:
            limit, scaling = (1 << bits) - 1, quantize.TOKEN_ZERO
        # Less their zero point, 8 bits are from -255 to 255.
        kind = quantize.A16 if limit > LARGEST_BYTE else quantize.A8
    by_pairs = (
        lowering.isa.pairs and kind == quantize.A8 and codec.bits == winograd.BITS and limit <= activation_limit(codec, "a8")
    )
    return Reading(kind, weight.columns, block, limit, scaling, factors, first, by_pairs and block >= CHUNK)


def form(lowering: Lowering, buffer: str, read: Reading) -> Form:
    """The quantized copy of `buffer`, written by its maker if that has room for one, else by an operation of its own."""
    known = lowering.forms.setdefault(buffer, [])
    for each in known:
        if each.reading == read:
            return each
    per_chunk = {quantize.FLOAT: 4 * CHUNK, quantize.A8: CHUNK, quantize.A16: 2 * CHUNK}[read.kind]
    row_bytes = padded(read.columns, CHUNK) // CHUNK * per_chunk
    sizes = (row_bytes, 4 * read.blocks, 4 * read.blocks, *([4 * read.blocks] if read.pairs else []))
    name = (buffer, len(known))
    # The last rows may have a tile of four to themselves.
    rows = padded(lowering.most, 4)
    places = [lowering.memory.shared((*name, part), rows * size) for part, size in enumerate(sizes)]
    made = Form(read, row_bytes, *places)
    whole = read.first == 0 and read.columns == lowering.graph.buffers.get(buffer)
    if whole and read.scaling == quantize.BLOCK and buffer in lowering.open_slots:
        row, word = lowering.open_slots.pop(buffer)
        lowering.rows[row][word : word + quantize.WORDS] = made.words()
    else:
        function = kernel(quantize.quantize, lowering.big)
        if read.scaling != quantize.BLOCK:
            function = kernel(quantize.quantize_tokens, lowering.big, int(read.scaling == quantize.TOKEN_ZERO))
        x = (lowering.buffers[buffer] + 4 * read.first, lowering.row_bytes[buffer])
        lowering.emit(function, *x, *made.words(), parts=channel_parts(read.columns))
    known.append(made)
    return made


def product(lowering: Lowering, weight: Weight, read: Form, y: int, row_bytes: int, bias: int, add: bool, gates: bool) -> None:
    """y = W x + bias, or added to y.  `gates`: of many rows the product does the SwiGLU behind it too."""
    codec, blocks, block = weight.codec, weight.q.shape[0], read.reading.block
    words = _words(lowering, weight, y, row_bytes, bias, add)
    words[tile.X : tile.X_BLOCKS + 1] = [
        read.data,
        read.row_bytes,
        read.scale,
        read.total,
        read.reading.blocks,
    ]
    one = None
    if codec.kind == "int":
        groups, grouped = codec.groups(weight.columns), int(codec.group_size > 0)
        scale = [lowering.memory.stored(weight.scale), 2 * ROWS * groups, 2 * ROWS * grouped]
        zero = [lowering.memory.stored(weight.zero), ROWS * groups, ROWS * grouped]
        words[tile.SCALE : tile.ZERO_STEP + 1] = scale + zero
        words[tile.CHUNKS], words[tile.PER_BLOCK] = -(-weight.columns // CHUNK), max(1, block // CHUNK)
        words[tile.STEP] = blocks // 2 if gates else 1
        mode16, together = int(read.reading.kind == quantize.A16), lowering.isa.together
        literals = (lowering.isa_index, codec.bits, mode16, int(not codec.symmetric), int(block < CHUNK))
        one = kernel(matmul.integer_matvec, *literals)
        many = kernel(swiglu_matmul.gated_matmul if gates else matmul.integer_matmul, *literals, lowering.big, together)
        if read.pair:
            most = together * swiglu_matmul.UNIT if gates else padded(words[tile.GROUP], together)
            room = most * winograd.CONSTANT_BYTES * read.reading.blocks
            words[tile.PAIR], words[tile.CONSTANTS] = (
                read.pair,
                lowering.memory.shared(PAIRS, lowering.threads * room),
            )
            function = winograd.gated_pair_matmul if gates else winograd.pair_matmul
            many = kernel(function, lowering.isa_index, int(not codec.symmetric), lowering.big, together)
    else:
        many = kernel(matmul.float_matmul, FLOAT_KINDS[codec.kind], lowering.big)
    row = lowering.emit(many, *words[COUNT + 1 :], parts=blocks)
    if one:
        lowering.decode_functions[row] = one


def thin_product(lowering: Lowering, weight: Weight, x: int, x_row: int, y: int, y_row: int, add: bool) -> None:
    """The same of a matrix of floats with few rows or few columns, from the rows of x themselves."""
    words = _words(lowering, weight, y, y_row, 0, add)
    words[tile.X], words[tile.X_ROW] = x, x_row
    function = kernel(low_rank.thin_matmul, FLOAT_KINDS[weight.codec.kind])
    parts = min(weight.q.shape[0], channel_parts(weight.rows))
    lowering.emit(function, *words[COUNT + 1 :], parts=parts)


def _words(lowering: Lowering, weight: Weight, y: int, y_row: int, bias: int, add: bool) -> list[int]:
    """The words of a product's table row that do not depend on the kind of weights."""
    words = [0] * tile.WORDS
    words[tile.W], words[tile.W_BLOCK] = (
        lowering.memory.stored(weight.q),
        weight.q.nbytes // weight.q.shape[0],
    )
    words[tile.CHUNKS], words[tile.ROWS] = weight.columns, weight.rows
    words[tile.GROUP] = max(1, min(GROUP_BYTES // words[tile.W_BLOCK], weight.q.shape[0]))
    words[tile.Y], words[tile.Y_ROW] = y, y_row
    words[tile.BIAS], words[tile.ADD], words[tile.SCRATCH] = bias, int(add), lowering.scratch
    return words
