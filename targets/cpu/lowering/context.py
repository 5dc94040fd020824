"""From operations over named buffers to the table that the threads walk.

What is fused here: the quantization of a layer's input into the operation that makes it; head norms, rotary positions and the
cache write of a layer into one; bias and residual into the product.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from edgeq.codec import ROWS
from edgeq.container import ModelFile
from edgeq.errors import UnsupportedError
from edgeq.records import ArrayRef
from edgeq.targets import graph as op
from edgeq.targets.cpu.isa import isa_index
from edgeq.targets.cpu.isa.isa import Isa
from edgeq.targets.cpu.jit.buffers import Memory, row_stride
from edgeq.targets.cpu.jit.compile import FUNCTION, address, is_kept
from edgeq.targets.cpu.jit.optable import (
    FINER,
    FLOAT_KINDS,
    PARTS,
    PARTS_A_THREAD,
    ROW_WORDS,
    Table,
    Variant,
    channel_parts,
    float_bits,
    kernel,
)
from edgeq.targets.cpu.kernels import elementwise, matmul
from edgeq.targets.cpu.kernels.quantize import ABSENT, Form
from edgeq.targets.cpu.lowering import attention, experts, layers, linear, requantize
from edgeq.targets.requantization import shared_inputs
from edgeq.targets.target import OnProgress, Options, Step


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
    selected_slots: int
    selected_tables: int
    counted: int
    sums: int


class Lowering:
    """Writes the two tables of a program: `one` for a run of one row, `many` for any number."""

    def __init__(
        self,
        graph: op.Graph,
        file: ModelFile,
        options: Options,
        isa: Isa,
        memory: Memory,
        arrays: RowArrays,
        source: requantize.Source = "file",
    ) -> None:
        self.source = source
        self.inputs = () if source == "file" else shared_inputs(graph)
        self.streams = source == "masters" and requantize.streams(self.inputs)
        self.input_of = {layer.name: i for i, each in enumerate(self.inputs) for layer in each.layers}
        self.graph, self.file, self.options, self.isa, self.memory, self.arrays = graph, file, options, isa, memory, arrays
        self.isa_index = isa_index(isa)
        self.big = isa.tiles[0]
        self.threads = max(options.threads, options.threads_prefill)
        self.parts = PARTS_A_THREAD * options.threads if options.threads > 1 else 1
        self.count, self.most = arrays.rows, options.max_rows
        self.slots, self.page_tables = arrays.slots, arrays.tables
        self.row_bytes = {name: row_stride(width) for name, width in graph.buffers.items()}
        self.buffers = {
            name: memory.shared(("buffer", name), max(options.max_rows, options.max_logits) * self.row_bytes[name])
            for name in graph.buffers
        }
        self.rows: list[list[int]] = []
        self.origins: list[op.Operation] = []
        self.functions: list[Variant] = []
        self.decode_functions: dict[int, Variant] = {}
        self.decode_parts: dict[int, int] = {}
        self.finer: list[int] = []
        self.reads_weights: set[int] = set()
        self.expert_stages: list[experts.Stages] = []
        self.forms: dict[str, list[Form]] = {}
        self.prepared: dict[str, dict[tuple[int, ...], str]] = {}
        self.open_slots: dict[str, tuple[int, int]] = {}
        self.position = 0
        self.gated: op.SwiGlu | None = None
        self.joins = True
        self.angles: dict[tuple[tuple[float, ...], float], tuple[int, int, int, int]] = {}
        self.head_changes: list[op.HeadNorm | op.RopeRotate | op.HeadRotate] = []
        self.scratch = memory.shared("scratch", self.threads * matmul.SCRATCH_BYTES)

    def tables(self, on_progress: OnProgress) -> tuple[Table, Table]:
        """The tables, with their kernels compiled; `on_progress` is told of each one that was not before, then of the end."""
        self.lower()
        of_experts = [each for stages in self.expert_stages for functions in stages.functions for each in functions]
        kernels = dict.fromkeys([*self.functions, *self.decode_functions.values(), *of_experts])
        missing = [each for each in kernels if not is_kept(each[0], *each[1])]
        for i, (factory, literals) in enumerate(missing):
            on_progress(i, len(missing), f"compiling {factory.__name__}")
            address(factory, *literals)
        if missing:
            on_progress(len(missing), len(missing), "compiled")
        addresses = {each: address(each[0], *each[1]) for each in kernels}
        for stages in self.expert_stages:
            for table, functions in zip(stages.tables, stages.functions, strict=True):
                table[:, FUNCTION] = [addresses[function] for function in functions]
        many = np.zeros((len(self.rows), ROW_WORDS), np.int64)
        for i, row in enumerate(self.rows):
            many[i, : len(row)] = row
        many[:, FUNCTION] = [addresses[function] for function in self.functions]
        one = many.copy()
        for i, function in self.decode_functions.items():
            one[i, FUNCTION] = addresses[function]
        one[:, PARTS] = [min(self.decode_parts[i], self.parts) for i in range(len(one))]
        many[:, PARTS] = PARTS_A_THREAD * self.options.threads_prefill
        many[self.finer, PARTS] *= FINER
        return one, many

    def lower(self) -> None:
        """Fill `rows` from the graph."""
        for position, operation in enumerate(self.graph.operations):
            self.position = position
            _LOWER[type(operation)](self, operation)
            self.origins += [operation] * (len(self.rows) - len(self.origins))

    def steps(self) -> list[Step]:
        """What each row of the tables does."""
        return [
            Step(operation, factory.__name__, i in self.reads_weights)
            for i, (operation, (factory, _)) in enumerate(zip(self.origins, self.functions, strict=True))
        ]

    def emit(self, function: Variant, *words: int, parts: int = 1) -> int:
        """Append an operation; with one row there is work for at most `parts` parts."""
        self.decode_parts[len(self.rows)] = parts
        self.functions.append(function)
        self.rows.append([0, self.count, *words])
        return len(self.rows) - 1

    def wrote(self, buffer: str, slot: tuple[int, int] | None = None) -> None:
        """`buffer` has new contents; `slot`: the table row and word where its maker takes a form."""
        for name in (buffer, *self.prepared.pop(buffer, {}).values()):
            self.forms.pop(name, None)
        self.open_slots.pop(buffer, None)
        if slot:
            self.open_slots[buffer] = slot

    def results(self, buffer: str) -> tuple[int, int, int]:
        """Where the operation at hand writes `buffer`: address, bytes from row to row, from thread to thread.

        Floats that are read in their quantized form alone are not kept: every thread has one row, which never leaves its cache.
        """
        stride = self.row_bytes[buffer]
        if linear.formed_only(self, buffer, self.position):
            return self.memory.shared(("row", stride), self.threads * stride), 0, stride
        return self.buffers[buffer], stride, 0

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
        *out, of_thread = self.results(o.out)
        words = [*x, self.memory.floats(o.gain), float_bits(o.eps), *out, *ABSENT.words(), of_thread]
        self.wrote(o.out, (self.emit(kernel(elementwise.norm, self.big), *words), 9))

    def swiglu(self, o: op.SwiGlu) -> None:
        if o.width % 16:
            raise UnsupportedError(f"intermediate_size {o.width} is not a multiple of 16; run with --target reference")
        x, (*out, of_thread) = (self.buffers[o.x], self.row_bytes[o.x]), self.results(o.out)
        words, parts = (*x, o.width, *out, *ABSENT.words(), of_thread), channel_parts(o.width)
        row = self.emit(kernel(elementwise.swiglu, self.big, int(self.gated is o)), *words, parts=parts)
        self.decode_functions[row] = kernel(elementwise.swiglu, self.big, 0)
        self.wrote(o.out, (row, 7))

    def select(self, o: op.Select) -> None:
        self.count, self.most = self.arrays.selected, self.options.max_logits
        self.slots, self.page_tables = self.arrays.selected_slots, self.arrays.selected_tables
        for name in o.writes():
            x, step = self.buffers[name], self.row_bytes[name]
            self.buffers[name] = self.memory.shared(("selected", name), self.most * step)
            words = (x, step, self.graph.buffers[name], self.buffers[name], step, self.arrays.selection)
            self.emit(kernel(elementwise.select), *words)
            self.wrote(name)


_LOWER: dict[type[op.Operation], Callable[..., None]] = {
    op.Embed: Lowering.embed,
    op.RmsNorm: Lowering.rms_norm,
    op.NormAdd: layers.norm_add,
    op.LayerNorm: layers.layer_norm,
    op.Scale: layers.scale,
    op.PositionAdd: layers.position_add,
    op.Linear: linear.linear,
    op.HeadNorm: attention.head_change,
    op.RopeRotate: attention.rope_rotate,
    op.HeadRotate: attention.head_change,
    op.CacheWrite: attention.cache_write,
    op.Attention: attention.attend,
    op.SwiGlu: Lowering.swiglu,
    op.Route: experts.route,
    op.Experts: experts.experts,
    op.GatedAdd: experts.gated_add,
    op.GeGlu: layers.activation,
    op.Relu: layers.activation,
    op.Select: Lowering.select,
}
