"""Launches as data, and the state while a graph is lowered.

Two stages: rows of the run, and after a Select the selected ones; their buffers lie apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NoReturn

from edgeq.errors import UnsupportedError
from edgeq.format.records import ArrayRef, LinearSpec, Mode, Weight
from edgeq.targets.cuda.arguments import RECORDS
from edgeq.targets.cuda.arguments.record import Arguments
from edgeq.targets.cuda.run.storage import Storage
from edgeq.targets.cuda.supply.pack import Variant
from edgeq.targets.graph import Embed, Experts, Graph, InjectVectors, LayerNorm, Operation, RmsNorm
from edgeq.targets.layers import mode_of
from edgeq.targets.requantization import SharedInput, WeightSource, input_indices
from edgeq.targets.state_layout import StateLayout, StatePlace
from edgeq.targets.target import Options

FACTORS = "factors"
FEW_ROWS = 16
"""Rows up to which products use a kernel for few, which reads the weights once for every 8 of them."""


@dataclass(frozen=True)
class Tuning:
    """How fused products are spread over a GPU; the results have the same bits by any.

    resident    blocks of threads that a multiprocessor runs side by side, where it holds as many: so many are started, if there
                is work for them
    in_flight   bytes of weights that a multiprocessor is to have asked for: half as much again as one of an H200 needs to keep
                its share of the memory busy (docs/cuda-speed.md); of the devices that edgeq knows none needs more
    per_block   blocks of 16 output channels that a block of threads takes at most
    """

    resident: int = 4
    in_flight: int = 44 << 10
    per_block: int = 8


@dataclass(frozen=True)
class Input:
    """Rows f32 at `address`, `width` apart; `made` says of which buffer, and how, they were made."""

    address: int
    width: int
    made: tuple[object, ...]


@dataclass(frozen=True)
class Output:
    """Rows f32 at `address`, `width` apart; with `add` a result is added to what is there."""

    address: int
    width: int
    add: bool


@dataclass(frozen=True)
class Launch:
    """One kernel over the rows of its stage.

    matmul     the kernel for more than `few_rows` rows, where it is another one;  of_many: fewer rows go without the launch
    arguments  its record
    rows_per_token  rows of the kernel for one of the stage, where several are joined
    moved      names of addresses that belong to the requantized weights of a run, with the array that each replaces, or
               (FACTORS, index of the shared input)

    TypeError: a kernel has another record, or an address that is moved is not in it.
    """

    operation: Operation
    stage: int
    variant: Variant
    arguments: Arguments
    matmul: Variant | None = None
    reads_weights: bool = False
    moved: Mapping[str, ArrayRef | tuple[str, int]] = field(default_factory=dict)
    rows_per_token: int = 1
    few_rows: int = FEW_ROWS
    of_many: bool = False

    def __post_init__(self) -> None:
        for variant in self.variants:
            if RECORDS[variant.kernel] is not type(self.arguments):
                raise TypeError(f"{variant.kernel} takes no {type(self.arguments).__name__}")
        if unknown := self.moved.keys() - self.arguments.by_name.keys():
            raise TypeError(f"{type(self.arguments).__name__} has no {', '.join(sorted(unknown))}")

    @property
    def variants(self) -> tuple[Variant, ...]:
        return (self.variant,) if self.matmul is None else (self.variant, self.matmul)


@dataclass(frozen=True)
class Gather:
    """Rows of a table that stays in the file, by token, written to a buffer by the host."""

    operation: Embed
    table: ArrayRef | Weight
    address: int
    stage: int = 0
    variants: tuple[Variant, ...] = ()


@dataclass(frozen=True)
class Bring:
    """Arrays of the file that the next launches read, brought to the device for them."""

    operation: Operation
    arrays: tuple[ArrayRef, ...]
    stage: int
    variants: tuple[Variant, ...] = ()


@dataclass(frozen=True)
class Routed:
    """The launches of every expert over the rows that chose it, which the host reads from `routing`, [rows][2 * chosen].

    rows, places   memory i32 [rows of an expert]: the rows that chose it, and where its results go, row * chosen + rank
    combine        adds the results of all
    """

    operation: Experts
    routing: int
    rows: int
    places: int
    launches: tuple[tuple[Launch, ...], ...]
    combine: Launch
    stage: int

    @property
    def variants(self) -> tuple[Variant, ...]:
        every = (*(launch for expert in self.launches for launch in expert), self.combine)
        return tuple(variant for launch in every for variant in launch.variants)


Lowered = Launch | Gather | Bring | Routed


@dataclass
class Lowering:
    """The state while a graph is lowered.

    by_operation   the launches so far, operation by operation
    fused     those of runs of few rows (fused.py); empty: the same
    norms     by the buffer of its result, a norm that those who read it compute
    contents  what memory of a use holds, by use: buffer, and how it was made of it
    """

    graph: Graph
    storage: Storage
    options: Options
    source: WeightSource
    inputs: tuple[SharedInput, ...]
    stage: int = 0
    by_operation: list[Lowered] = field(default_factory=list)
    fused: list[Lowered] = field(default_factory=list)
    norms: dict[str, RmsNorm | LayerNorm] = field(default_factory=dict)
    contents: dict[str, tuple[object, ...]] = field(default_factory=dict)

    def launches(self, rows: Sequence[int], fused: bool = True) -> Iterator[Lowered]:
        """The launches of a run of so many rows in each stage, without a stage that has none."""
        for stage, count in enumerate(rows):
            for each in self.fused if fused and self.fused and count <= FEW_ROWS else self.by_operation:
                if count and each.stage == stage and not (isinstance(each, Launch) and each.of_many and count <= each.few_rows):
                    yield each

    def rows(self, stage: int) -> int:
        return self.options.max_logits if stage else self.options.max_rows

    @property
    def most_rows(self) -> int:
        """Rows of any stage: memory that both use is as large."""
        return max(self.options.max_rows, self.options.max_logits)

    def mode_of(self, operation: Operation) -> Mode:
        return mode_of(operation, self.options.mode)

    def buffer(self, name: str, stage: int | None = None) -> int:
        stage = self.stage if stage is None else stage
        return self.storage.named((name, stage), self.rows(stage) * self.graph.buffers[name] * 4)

    def sent(self, name: str, row_bytes: int = 4) -> int:
        """The address of what a run sends for the rows of this stage."""
        return self.storage.named((name, "sent", self.stage), self.rows(self.stage) * row_bytes)

    @property
    def vector_width(self) -> int:
        """Channels of the vectors that rows bring, as far as the graph reads them."""
        injected = (op for op in self.graph.operations if isinstance(op, InjectVectors))
        return max((op.offset + self.graph.buffers[op.out] for op in injected), default=0)

    def holds(self, use: str, what: tuple[object, ...]) -> bool:
        """Whether memory of `use` already holds `what`, whose first entry is a buffer; from now on it does."""
        found = self.contents.get(use) == what
        self.contents[use] = what
        return found

    def changed(self, buffers: Iterable[str]) -> None:
        """These buffers have other contents now."""
        names = set(buffers)
        self.contents = {use: what for use, what in self.contents.items() if what[0] not in names}

    @cached_property
    def state_places(self) -> Sequence[StatePlace]:
        """Where the states of the graph lie."""
        return StateLayout(self.graph.states).places

    def shared_input(self, layer: LinearSpec) -> int | None:
        """The index of the shared input of a layer that runs with its master or with requantized weights."""
        return self.indices.get(layer.name)

    @cached_property
    def indices(self) -> dict[str, int]:
        return input_indices(self.inputs)


def refuse(what: str) -> NoReturn:
    raise UnsupportedError(f"the cuda target does not have {what} yet; run with --target cpu")
