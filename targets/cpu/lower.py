"""From operations over named buffers to the table that the threads walk.

What is fused here: the quantization of a layer's input into the operation that makes it; head norms, rotary positions and the
cache write of a layer into one; bias and residual into the product.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgeq.codec import CHUNK, ROWS, Codec
from edgeq.container import ModelFile
from edgeq.errors import UnsupportedError
from edgeq.linear import ArrayRef
from edgeq.targets import Options, Report
from edgeq.targets import operations as op
from edgeq.targets.cpu import attention, elementwise, matmul, pages, quantize, rotary, tile
from edgeq.targets.cpu.compiled import COUNT, FUNCTION, address
from edgeq.targets.cpu.isa import Isa, all_isas
from edgeq.targets.cpu.memory import Memory, padded
from edgeq.targets.cpu.quantize import ABSENT, Form

ROW_WORDS = 25
PARTS = ROW_WORDS - 1
"""The last word of a row: into how many parts the operation is cut."""
PARTS_A_THREAD = 4
"""Enough that a thread that is held up leaves little behind, few enough that taking them costs nothing."""
LEAST_CHANNELS = 2048
"""Of a row that are worth a part of their own."""
LARGEST_BLOCK = 128
"""Channels of an activation block at most: what an int32 sum of 8-bit by 16-bit products holds."""
GROUP_BYTES = 256 << 10
"""Weights that stay in a core's second-level cache while the tokens of a chunk pass by."""
FLOAT_KINDS = {"f32": tile.F32_KIND, "f16": tile.F16_KIND, "bf16": tile.BF16_KIND}


Table = NDArray[np.int64]
Kernel = tuple[Callable[..., matmul.Kernel], tuple[int, ...]]
"""A factory of kernels and the numbers that become constants of its machine code."""


def kernel(factory: Callable[..., matmul.Kernel], *literals: int) -> Kernel:
    return factory, literals


def float_bits(value: float) -> int:
    return int(struct.unpack("<i", struct.pack("<f", value))[0])


@dataclass
class RowArrays:
    """Addresses of what changes from run to run."""

    rows: int
    selected: int
    tokens: int
    positions: int
    slots: int
    tables: int
    selection: int


class Lowering:
    """Writes the two tables of a program: `one` for a run of one row, `many` for any number."""

    def __init__(self, graph: op.Graph, file: ModelFile, options: Options, isa: Isa, memory: Memory, arrays: RowArrays) -> None:
        self.graph, self.file, self.options, self.isa, self.memory, self.arrays = graph, file, options, isa, memory, arrays
        self.isa_index = [i.name for i in all_isas()].index(isa.name)
        self.big = isa.tiles[0]
        self.threads = max(options.threads, options.threads_prefill)
        self.parts = PARTS_A_THREAD * options.threads if options.threads > 1 else 1
        self.count, self.most = arrays.rows, options.max_rows
        self.row_bytes = {name: 4 * padded(width) for name, width in graph.buffers.items()}
        self.buffers = {
            name: memory.reserve(max(options.max_rows, options.max_logits) * self.row_bytes[name]) for name in graph.buffers
        }
        self.rows: list[list[int]] = []
        self.functions: list[Kernel] = []
        self.decode_functions: dict[int, Kernel] = {}
        self.decode_parts: dict[int, int] = {}
        self.forms: dict[str, Form] = {}
        self.open_slots: dict[str, tuple[int, int]] = {}
        self.angles: dict[tuple[float, ...], tuple[int, int, int]] = {}
        self.head_norms: list[op.HeadNorm] = []
        self.rotations: list[op.RopeRotate] = []
        self.scratch = memory.reserve(self.threads * matmul.SCRATCH_BYTES)
        self.states: dict[tuple[int, int], int] = {}

    def tables(self, report: Report) -> tuple[Table, Table]:
        """The tables, with their kernels compiled; `report` hears of each one before it is."""
        for operation in self.graph.operations:
            _LOWER[type(operation)](self, operation)
        kernels = dict.fromkeys([*self.functions, *self.decode_functions.values()])
        addresses = dict[Kernel, int]()
        for factory, literals in kernels:
            report(len(addresses), len(kernels), f"kernel {factory.__name__}")
            addresses[factory, literals] = address(factory, *literals)
        many = np.zeros((len(self.rows), ROW_WORDS), np.int64)
        for i, row in enumerate(self.rows):
            many[i, : len(row)] = row
        many[:, FUNCTION] = [addresses[function] for function in self.functions]
        one = many.copy()
        for i, function in self.decode_functions.items():
            one[i, FUNCTION] = addresses[function]
        one[:, PARTS] = [min(self.decode_parts[i], self.parts) for i in range(len(one))]
        many[:, PARTS] = PARTS_A_THREAD * self.options.threads_prefill
        return one, many

    def emit(self, function: Kernel, *words: int, parts: int = 1) -> int:
        """Append an operation; with one row there is work for at most `parts` parts."""
        self.decode_parts[len(self.rows)] = parts
        self.functions.append(function)
        self.rows.append([0, self.count, *words])
        return len(self.rows) - 1

    def wrote(self, buffer: str, slot: tuple[int, int] | None = None) -> None:
        """`buffer` has new contents; `slot`: the table row and word where its maker takes a form."""
        self.forms.pop(buffer, None)
        self.open_slots.pop(buffer, None)
        if slot:
            self.open_slots[buffer] = slot

    # Operations, in the order of the network.

    def embed(self, o: op.Embed) -> None:
        out = (self.buffers[o.out], self.row_bytes[o.out])
        if isinstance(o.table, ArrayRef):
            function = kernel(elementwise.embed_plain, FLOAT_KINDS[o.table.dtype])
            self.emit(function, self.arrays.tokens, self.memory.stored(o.table), o.table.shape[1], *out)
        else:
            weight = o.table.weights[0]
            codec, blocks = weight.codec, weight.q.shape[0]
            words = [self.arrays.tokens, self.memory.stored(weight.q), weight.columns, *out, weight.q.nbytes // blocks]
            if codec.kind == "int":
                groups, zero = codec.groups(weight.columns), self.memory.stored(weight.zero)
                words += [self.memory.stored(weight.scale), 2 * ROWS * groups, zero, ROWS * groups, weight.columns // groups]
                function = kernel(elementwise.embed_integer_tile, codec.bits, int(not codec.symmetric))
            else:
                function = kernel(elementwise.embed_float_tile, FLOAT_KINDS[codec.kind])
            self.emit(function, *words)
        self.wrote(o.out)

    def rms_norm(self, o: op.RmsNorm) -> None:
        x = (self.buffers[o.x], self.row_bytes[o.x], self.graph.buffers[o.x])
        out = (self.buffers[o.out], self.row_bytes[o.out])
        words = [*x, self.memory.floats(o.gain), float_bits(o.eps), *out, *ABSENT.words()]
        self.wrote(o.out, (self.emit(kernel(elementwise.norm, self.big), *words), 9))

    def linear(self, o: op.Linear) -> None:
        weight = o.linear.weights[0]
        codec, blocks = weight.codec, weight.q.shape[0]
        block = activation_block(codec)
        form = self.form(o.x, self.kind(codec), weight.columns, block)
        words = [0] * tile.WORDS
        words[tile.X : tile.X_BLOCKS + 1] = [form.data, form.row_bytes, form.scale, form.total, form.blocks]
        words[tile.W], words[tile.W_BLOCK] = self.memory.stored(weight.q), weight.q.nbytes // blocks
        literals: tuple[int, ...]
        factory: Callable[..., matmul.Kernel]
        one: Callable[..., matmul.Kernel] | None = None
        if codec.kind == "int":
            groups, grouped = codec.groups(weight.columns), int(codec.group_size > 0)
            scale = [self.memory.stored(weight.scale), 2 * ROWS * groups, 2 * ROWS * grouped]
            zero = [self.memory.stored(weight.zero), ROWS * groups, ROWS * grouped]
            words[tile.SCALE : tile.ZERO_STEP + 1] = scale + zero
            words[tile.CHUNKS], words[tile.PER_BLOCK] = -(-weight.columns // CHUNK), max(1, block // CHUNK)
            mode16 = int(self.options.mode == "a16")
            literals = (self.isa_index, codec.bits, mode16, int(not codec.symmetric), int(block < CHUNK))
            one, factory = matmul.integer_matvec, matmul.integer_matmul
        else:
            words[tile.CHUNKS] = weight.columns
            literals, factory = (FLOAT_KINDS[codec.kind],), matmul.float_matmul
        words[tile.ROWS], words[tile.GROUP] = weight.rows, max(1, GROUP_BYTES // words[tile.W_BLOCK])
        words[tile.Y], words[tile.Y_ROW] = self.buffers[o.out] + 4 * o.offset, self.row_bytes[o.out]
        words[tile.BIAS] = self.memory.floats(o.linear.bias) if o.linear.bias else 0
        words[tile.ADD], words[tile.SCRATCH] = int(o.add), self.scratch
        row = self.emit(kernel(factory, *literals, self.big), *words[COUNT + 1 :], parts=blocks)
        if one:
            self.decode_functions[row] = kernel(one, *literals)
        self.wrote(o.out)

    def kind(self, codec: Codec) -> int:
        if codec.kind != "int":
            return quantize.FLOAT
        return quantize.A16 if self.options.mode == "a16" else quantize.A8

    def form(self, buffer: str, kind: int, columns: int, block: int) -> Form:
        """The quantized copy of `buffer`, written by its maker if that has room for one, else by an operation of its own."""
        known = self.forms.get(buffer)
        if known and (known.kind, known.columns, known.block) == (kind, columns, block):
            return known
        per_chunk = {quantize.FLOAT: 4 * CHUNK, quantize.A8: CHUNK, quantize.A16: 2 * CHUNK}[kind]
        row_bytes = padded(columns, CHUNK) // CHUNK * per_chunk
        numbers = 4 * self.most * -(-columns // block)
        places = (self.memory.reserve(self.most * row_bytes), self.memory.reserve(numbers), self.memory.reserve(numbers))
        form = Form(kind, columns, block, row_bytes, *places)
        if buffer in self.open_slots:
            row, word = self.open_slots.pop(buffer)
            self.rows[row][word : word + quantize.WORDS] = form.words()
        else:
            x = (self.buffers[buffer], self.row_bytes[buffer])
            self.emit(kernel(quantize.quantize, self.big), *x, *form.words(), parts=-(-columns // LEAST_CHANNELS))
        self.forms[buffer] = form
        return form

    def head_norm(self, o: op.HeadNorm) -> None:
        self.head_norms.append(o)

    def rope_rotate(self, o: op.RopeRotate) -> None:
        if o.frequencies not in self.angles:
            count = len(o.frequencies)
            values, stored = self.memory.array(count, np.float64)
            values[:] = o.frequencies
            width = 4 * padded(count)
            cosines, sines = (self.memory.reserve(self.options.max_rows * width) for _ in range(2))
            self.emit(kernel(elementwise.angles), self.arrays.positions, stored, count, cosines, sines, width)
            self.angles[o.frequencies] = (cosines, sines, width)
        self.rotations.append(o)

    def cache_write(self, o: op.CacheWrite) -> None:
        """Ends what head norms and rotations of the same layer began: one pass over the heads of a row."""
        query = next(r for r in self.rotations if r.offset != o.k_offset)
        gains = {norm.offset: self.memory.floats(norm.gain) for norm in self.head_norms}
        epsilon = self.head_norms[0].eps if self.head_norms else 0.0
        words = [
            *self._cached(o.x, query.heads, o.kv_heads, o.head_dim, o.layer),
            4 * query.offset, 4 * o.k_offset, 4 * o.v_offset, *self.angles[query.frequencies],
            gains.get(query.offset, 0), gains.get(o.k_offset, 0), float_bits(epsilon),
        ]  # fmt: skip
        self.emit(kernel(rotary.rotate, pages.KV_CODES[self.options.kv]), *words, parts=self.options.threads)
        self.rotations, self.head_norms = [], []
        self.wrote(o.x)

    def _cached(self, x: str, heads: int, kv_heads: int, head_dim: int, layer: int) -> list[int]:
        """The words that `rotate` and `attend` share."""
        width = padded(head_dim)
        offset = layer * pages.layer_bytes(self.graph, self.options.kv)
        rows = (self.buffers[x], self.row_bytes[x], heads, kv_heads, head_dim, width)
        return [*rows, self.arrays.slots, self.arrays.tables, offset]

    def attend(self, o: op.Attention) -> None:
        size = (o.heads // o.kv_heads, padded(o.head_dim))
        if size not in self.states:
            self.states[size] = self.memory.reserve(self.threads * attention.scratch_bytes(*size))
        words = [
            *self._cached(o.x, o.heads, o.kv_heads, o.head_dim, o.layer),
            4 * o.q_offset, self.buffers[o.out], self.row_bytes[o.out], o.window, float_bits(o.scale), self.states[size],
        ]  # fmt: skip
        # What the registers hold: 4 x 4 vectors of AVX-512, 2 x 2 pairs of narrower ones.
        tile = 4 if self.isa.lanes == 16 and self.isa.needs else 2
        self.emit(kernel(attention.attend, pages.KV_CODES[self.options.kv], tile, tile), *words, parts=o.kv_heads)
        self.wrote(o.out)

    def swiglu(self, o: op.SwiGlu) -> None:
        if o.width % 16:
            raise UnsupportedError(f"intermediate_size {o.width} is not a multiple of 16; run with --target reference")
        x, out = (self.buffers[o.x], self.row_bytes[o.x]), (self.buffers[o.out], self.row_bytes[o.out])
        parts = -(-o.width // LEAST_CHANNELS)
        row = self.emit(kernel(elementwise.swiglu, self.big), *x, o.width, *out, *ABSENT.words(), parts=parts)
        self.wrote(o.out, (row, 7))

    def select(self, o: op.Select) -> None:
        self.count, self.most = self.arrays.selected, self.options.max_logits
        x, out = (self.buffers[o.x], self.row_bytes[o.x]), (self.buffers[o.out], self.row_bytes[o.out])
        self.emit(kernel(elementwise.select), *x, self.graph.buffers[o.x], *out, self.arrays.selection)
        self.wrote(o.out)


def activation_block(codec: Codec) -> int:
    """Channels of an activation that share a scale: the weight's group, at most 128."""
    return min(codec.group_size or LARGEST_BLOCK, LARGEST_BLOCK)


_LOWER: dict[type[op.Operation], Callable[..., None]] = {
    op.Embed: Lowering.embed,
    op.RmsNorm: Lowering.rms_norm,
    op.Linear: Lowering.linear,
    op.HeadNorm: Lowering.head_norm,
    op.RopeRotate: Lowering.rope_rotate,
    op.CacheWrite: Lowering.cache_write,
    op.Attention: Lowering.attend,
    op.SwiGlu: Lowering.swiglu,
    op.Select: Lowering.select,
}
