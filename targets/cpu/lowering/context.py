"""What the lowering of a table knows, and what it has written so far."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from edgeq.format.codec import Codec
from edgeq.format.container import ModelFile
from edgeq.format.records import Mode
from edgeq.targets import graph as op
from edgeq.targets.cpu.isa import isa_index
from edgeq.targets.cpu.isa.isa import Isa
from edgeq.targets.cpu.jit.args import Args
from edgeq.targets.cpu.jit.buffers import Buffers, row_stride
from edgeq.targets.cpu.jit.simd import LANES
from edgeq.targets.cpu.kernels.products import matmul
from edgeq.targets.cpu.lowering.layout import Layout, QuantizedActivation
from edgeq.targets.cpu.lowering.lifetimes import Buffer, lives, places
from edgeq.targets.cpu.threads.optable import PARTS_A_THREAD, ExpertStage, Variant
from edgeq.targets.layers import mode_of
from edgeq.targets.requantization import SharedInput, WeightSource, input_indices
from edgeq.targets.state_layout import StatePlace
from edgeq.targets.target import Options
from edgeq.targets.times import Step

T = TypeVar("T")


@dataclass(frozen=True)
class RowArrays:
    """Addresses of what changes from run to run.

    Of graphs with states (state_layout.py), beside those of rows: state_sessions has the number of sessions, int64; state_order
    int32 [rows] and state_begins int32 [sessions + 1] are as in StateRows; states has the address of each session's state, and
    snapshots that of the addresses of its snapshots, one for each page, 0 for none.
    """

    rows: int
    selected: int
    tokens: int
    positions: int
    slots: int
    page_tables: int
    spans: int
    vectors: int
    selection: int
    selected_slots: int
    selected_page_tables: int
    selected_spans: int
    selected_vectors: int
    modality: int
    selected_modality: int
    selected_positions: int
    counted: int
    sums: int
    state_sessions: int = 0
    state_order: int = 0
    state_begins: int = 0
    states: int = 0
    snapshots: int = 0


@dataclass(frozen=True)
class Masters:
    """The layers that have a master, if the table does not read their weights in the file.

    released   their pages leave the memory after each product
    """

    inputs: tuple[SharedInput, ...] = ()
    released: bool = False

    @cached_property
    def indices(self) -> dict[str, int]:
        """Layer name -> index of the shared input that it reads."""
        return input_indices(self.inputs)


class BufferRows(NamedTuple):
    """The rows of a buffer: address and bytes from one to the next."""

    address: int
    stride: int


@dataclass(frozen=True)
class OpRecord:
    """One operation of the table.

    prefill, decode   the kernel for runs of several rows, and of one
    decode_parts      into how many work items one row is worth cutting
    parts_a_thread    work items per thread in runs of several rows
    origin            the graph's operation, of several that run as one the main one
    reads_weights     of a layer: it is the product
    """

    prefill: Variant
    decode: Variant
    args: Args
    decode_parts: int
    parts_a_thread: int
    origin: op.Operation
    reads_weights: bool


class Context:
    """The lowering of one table: where everything lies, and the op records so far."""

    def __init__(
        self,
        graph: op.Graph,
        file: ModelFile,
        options: Options,
        isa: Isa,
        memory: Buffers,
        arrays: RowArrays,
        *,
        source: WeightSource = "file",
        masters: Masters = Masters(),  # noqa: B008
        stage_of_expert: bool = False,
        prefetch_bytes: Mapping[Codec, int] = MappingProxyType({}),  # noqa: B008
        features: frozenset[str] = frozenset(),
        state_places: Sequence[StatePlace] = (),
    ) -> None:
        """`stage_of_expert`: the op records will not follow one another in a table, nor will the rows be those of a thread.
        `prefetch_bytes`: how far ahead products ask for weights, by their codec (isa.py).
        `features`: of the processor that will run this, which may be a device's.
        `state_places`: where the graph's states lie.
        """
        self.graph, self.file, self.options, self.isa, self.memory, self.arrays = graph, file, options, isa, memory, arrays
        self.source, self.masters, self.stage_of_expert = source, masters, stage_of_expert
        self.isa_index, self.max_tile = isa_index(isa), isa.tiles[0]
        self.prefetch_bytes, self.features, self.state_places = prefetch_bytes, features, state_places
        self.threads = max(options.threads, options.threads_prefill)
        self.scratch = memory.shared("scratch", self.threads * matmul.SCRATCH_BYTES)
        self.records: list[OpRecord] = []
        self.expert_stages: list[ExpertStage] = []
        self._origin: op.Operation | None = None
        self._rows, self._max_rows = arrays.rows, options.max_rows
        self._slots, self._page_tables, self._positions = arrays.slots, arrays.page_tables, arrays.positions
        self._spans, self._vectors, self._modality = arrays.spans, arrays.vectors, arrays.modality
        self._strides = {name: row_stride(width) for name, width in graph.buffers.items()}
        self._places = self._placed()
        self._addresses = {name: self._places[Buffer(name)] for name in graph.buffers}
        self._quantized: dict[str, list[QuantizedActivation]] = {}
        self._prepared: dict[str, dict[Any, str]] = {}
        self._made: dict[Any, Any] = {}

    def _placed(self) -> dict[Buffer, int]:
        """The addresses of the graph's buffers.

        Some have memory of their own: those of an expert, of which its rows are a part (experts.py); the result, which is read
        after the run; and those whose rows end within a vector, the rest of which must stay 0.
        """
        graph, options = self.graph, self.options
        needed = lives(graph)
        rows = max(options.max_rows, options.max_logits)
        sizes = {buffer: (options.max_logits if buffer.selected else rows) * self._strides[buffer.name]
                 for buffer in (*map(Buffer, graph.buffers), *(each for each in needed if each.selected))}  # fmt: skip
        apart = {each for each in sizes
                 if self.stage_of_expert or each.name == graph.result or graph.buffers[each.name] % LANES}  # fmt: skip
        shared = places({each: size for each, size in sizes.items() if each not in apart}, needed)
        start = self.memory.shared("buffers", shared.nbytes)
        return {each: start + offset for each, offset in shared.offsets.items()} | {
            each: self.memory.shared(("buffer", *each), sizes[each]) for each in apart
        }

    # What is known.

    @property
    def max_rows(self) -> int:
        """Rows of one run, at most, at this point of the list."""
        return self._max_rows

    @property
    def slots(self) -> int:
        """Address of the cache slots of the rows at this point of the list."""
        return self._slots

    @property
    def positions(self) -> int:
        """Address of the positions of the rows at this point of the list, int32 [axes, max_rows]."""
        return self._positions

    def page_tables(self, windowed: bool) -> int:
        """Address of the addresses of the page tables of the rows, for layers without a window or with one."""
        return self._page_tables + 8 * self._max_rows * windowed

    @property
    def vectors(self) -> int:
        """Address of the addresses of the vectors that the rows bring."""
        return self._vectors

    @property
    def span_stride(self) -> int:
        """Bytes from the begins of a kind of visible range to its ends, and from those to the next kind."""
        return 4 * self._max_rows

    def spans(self, kind: int) -> int:
        """Address of the begins of a kind of visible range, int32 per row, with its ends after them; 0: causal."""
        return self._spans + 2 * self.span_stride * kind if kind >= 0 else 0

    def place(self, buffer: str) -> BufferRows:
        return BufferRows(self._addresses[buffer], self._strides[buffer])

    def width(self, buffer: str) -> int:
        return self.graph.buffers[buffer]

    def mode(self, o: op.Operation) -> Mode:
        return mode_of(o, self.options.mode)

    def state_args(self, index: int) -> dict[str, int]:
        """The arguments that every kernel of state `index` of the graph has (kernels/args.py, StateArgs)."""
        arrays, place = self.arrays, self.state_places[index]
        return {
            "sessions": arrays.state_sessions, "order": arrays.state_order, "begins": arrays.state_begins,
            "slots": arrays.slots, "states": arrays.states, "snapshots": arrays.snapshots,
            "offset": 4 * place.state, "snapshot_offset": 4 * place.snapshot,
        }  # fmt: skip

    def temporary(self, name: str, columns: int) -> BufferRows:
        """Rows of so many channels that are valid until the next operation that asks by this name."""
        stride = row_stride(columns)
        return BufferRows(self.memory.shared(name, self._max_rows * stride), stride)

    def steps(self) -> list[Step]:
        """What each op record does."""
        return [Step(each.origin, each.prefill[0].__name__, each.reads_weights) for each in self.records]

    # What is written.

    def begin(self, o: op.Operation) -> None:
        """Op records that follow belong to `o`."""
        self._origin = o

    def emit(
        self,
        function: Variant,
        args: Args,
        *,
        parts: int = 1,
        parts_a_thread: int = PARTS_A_THREAD,
        decode: Variant | None = None,
        reads_weights: bool = False,
    ) -> None:
        """Append an op record; its `rows` are those at this point of the list, unless `args` names others.

        With one row there is work for at most `parts` threads, and the kernel `decode` instead of `function` if there is one.
        """
        assert self._origin is not None
        args = args if args.rows else args.replaced(rows=self._rows)
        self.records.append(OpRecord(function, decode or function, args, parts, parts_a_thread, self._origin, reads_weights))

    def once(self, key: Any, make: Callable[[], T]) -> T:
        """What `make` gives the first time; it may emit op records."""
        if key not in self._made:
            self._made[key] = make()
        made: T = self._made[key]
        return made

    def invalidate(self, buffer: str) -> None:
        """The buffer was overwritten: drop what was made of its former contents."""
        for name in (buffer, *self._prepared.pop(buffer, {}).values()):
            self._quantized.pop(name, None)

    def quantized(self, buffer: str, layout: Layout) -> QuantizedActivation | None:
        """The quantized activations of a buffer if it has them in this layout."""
        return next((each for each in self._quantized.get(buffer, []) if each.layout == layout), None)

    def add_quantized(self, buffer: str, layout: Layout) -> QuantizedActivation:
        """Room for quantized activations of a buffer, valid until it is overwritten.  The caller emits what fills it."""
        known = self._quantized.setdefault(buffer, [])
        known.append(QuantizedActivation.allocated(layout, self._max_rows, self._modality, (buffer, len(known)), self.memory))
        return known[-1]

    def prepared(self, buffer: str, key: Any) -> str | None:
        """The buffer that holds `buffer` reordered and transformed as `key` says, if it was made since that was written."""
        return self._prepared.get(buffer, {}).get(key)

    def add_prepared(self, buffer: str, key: Any, columns: int) -> str:
        """A new buffer for that."""
        known = self._prepared.setdefault(buffer, {})
        known[key] = f"{buffer} {len(known)}"
        self._addresses[known[key]], self._strides[known[key]] = self.temporary(known[key], columns)
        return known[key]

    def select(self, buffers: Iterable[str]) -> None:
        """From here on the rows are those of the result; `buffers` have places of their own."""
        self._rows, self._max_rows = self.arrays.selected, self.options.max_logits
        self._slots, self._page_tables = self.arrays.selected_slots, self.arrays.selected_page_tables
        self._spans, self._vectors = self.arrays.selected_spans, self.arrays.selected_vectors
        self._modality, self._positions = self.arrays.selected_modality, self.arrays.selected_positions
        for name in buffers:
            self._addresses[name] = self._places[Buffer(name, True)]
            self.invalidate(name)

    def of_expert(self, graph: op.Graph, memory: Buffers, rows: int, max_rows: int) -> Context:
        """The context of one expert of a layer: `max_rows` rows in `memory`, their number at address `rows`."""
        options = replace(self.options, max_rows=max_rows, max_logits=1)
        arrays = replace(self.arrays, rows=rows)
        return Context(
            graph, self.file, options, self.isa, memory, arrays,
            stage_of_expert=True, prefetch_bytes=self.prefetch_bytes, features=self.features,
        )  # fmt: skip
