"""The contract of a target: it compiles a Graph into a Program, and a Program runs rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from edgeq.format.container import ModelFile
from edgeq.format.kernel_pack import KernelSet
from edgeq.format.records import KvCodec, Mode
from edgeq.system.devices import DeviceSpec
from edgeq.targets.graph import Graph
from edgeq.targets.hardware import Gpu, Hardware
from edgeq.targets.rows import Page, Rows
from edgeq.targets.times import RecordedRun


@dataclass(frozen=True)
class Options:
    """What a program is compiled for.

    threads           of a run of one row; 0: the target chooses
    threads_prefill   of a run of several rows; 0: the target chooses
    isa               instruction set; None: the best this machine has
    max_rows          rows of one run, which is the prefill chunk; 0: the target chooses
    max_logits        rows whose results one run can return
    kv                how keys and values are cached
    requantize        runs that sum inputs and runs with requantized weights will follow: compile for them too
    graphs            a target may record the launches of a run and start them together (CUDA graphs)
    cache_bytes       of the cache that memory is kept for beside the program; 0: unknown

    `Program.options` has the numbers that the target chose.
    """

    mode: Mode
    threads: int = 0
    isa: str | None = None
    max_rows: int = 0
    max_logits: int = 1
    threads_prefill: int = 0
    kv: KvCodec = KvCodec()
    requantize: bool = False
    graphs: bool = True
    cache_bytes: int = 0


@dataclass(frozen=True)
class Beside:
    """What another program is compiled of, which runs beside a first one of the same file.

    own_bytes   of weights that the first one does not have, and of pages that it keeps for itself
    shares      whether it runs over the pages and states of the first one
    """

    graph: Graph
    options: Options
    own_bytes: int
    shares: bool = True


OnProgress = Callable[[int, int, str], None]
"""Progress callback: (steps done, total steps, label).  A total of 0 means unknown."""


def no_progress(done: int, total: int, label: str) -> None:
    """A progress callback that does nothing."""


@dataclass(frozen=True)
class ProgramFacts:
    """What a program runs on, for records of measurements; bytes, and bytes per second.

    isa                  instruction set that was chosen for it; None: the target has none to choose
    device               name of what runs it beside the processor; None: the processor does
    device_bytes         of its memory that the program holds
    copy_bandwidth       read and written by a copy on it, both counted; None: not measured yet
    timed_apart          recorded runs go operation by operation, of which others fuse some
    launches_per_token   that a token takes
    """

    isa: str | None = None
    device: str | None = None
    device_bytes: int | None = None
    copy_bandwidth: float | None = None
    timed_apart: bool = False
    launches_per_token: int | None = None


class Program(Protocol):
    """A compiled graph with its buffers.  One caller at a time, from any thread.

    tile           rows that the kernels multiply together: prefill chunks of a multiple of it waste nothing
    most_largest   numbers of a row of the result that FindsLargest finds, at most; 0: it is no FindsLargest, or finds none
    window         as Graph.window
    snapshot_pages  pages between the snapshots that a session keeps of its states, as `states.snapshot_pages`; 0: the graph has
                   no states, else it is a HoldsStates

    Any method raises DeviceError once the device has failed: the program is unusable from then on.  To drop it and its pages
    raises nothing.
    """

    options: Options
    threads: int
    tile: int
    most_largest: int
    window: int
    snapshot_pages: int

    @property
    def description(self) -> str:
        """What runs where, for people: target, instruction set, threads, mode."""
        ...

    def facts(self) -> ProgramFacts:
        """What runs where, for records."""
        ...

    def prepare(self, mode: Mode, on_progress: OnProgress = no_progress) -> None:
        """Compile for `mode` ahead of its first run."""
        ...

    def new_page(self) -> Page:
        """A cache page of `Graph.page_bytes(kv)` bytes.  ResourceError: there is no memory for it."""
        ...

    def copy_page(self, page: Page) -> Page:
        """A page of its own with the same contents."""
        ...

    def save_page(self, page: Page) -> bytes:
        """The contents of a page for `load_page` of the same target, model and cache codec: always as many bytes, and as many
        fewer where layers with a window are dropped."""
        ...

    def page_memory(self, windowed: bool = True) -> NDArray[np.uint8]:
        """Memory for the contents of a page, with or without layers that have a window, for `load_page`; may be called beside
        other methods."""
        ...

    def load_page(self, data: NDArray[np.uint8]) -> Page:
        """A page with contents that `save_page` gave, in memory that `page_memory` gave: it may be the page's from then on.

        ValueError: another number of bytes.
        """
        ...

    def read_bandwidth(self, refresh: bool = False) -> float | None:
        """Bytes per second that this program's threads read from memory, measured unless known; None: not measured here."""
        ...

    def run(self, rows: Rows, mode: Mode | None = None) -> NDArray[np.float32]:
        """The rows of the graph's result, float32 [wanted, width], valid until the next run.

        Where a session's rows come to the end of a page that has a snapshot, its states are copied there.

        ValueError: rows that are not the next ones of their session's states.

        mode     None: the mode of the options; another one runs over the same weights and cache, as a cheap draft of an exact
                 run, and is compiled when it first runs

        The arithmetic of a row does not depend on which rows run with it.
        """
        ...

    def record(self, on: bool) -> None:
        """From the next run on: whether the times of the steps of runs are noted for `recorded`."""
        ...

    def recorded(self) -> list[RecordedRun]:
        """The runs that were recorded since the last call, in order, without those that were interrupted."""
        ...


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes of memory that a program may take, and bytes that it needs without its cache pages.

    saving   how it can be compiled to need less, as the end of a message; empty: it cannot
    """

    available: int
    needed: int
    saving: str = ""


class KernelPack(NamedTuple):
    """Kernels that were compiled elsewhere, beside or inside a model file: machine code.

    name        for messages;  digest: of all its bytes
    refused     why nothing of it is used here; None if it may be
    kernels     how many;  archs: for each architecture those that it has machine code of
    versions    of the programs that made it
    """

    name: str
    digest: str
    refused: str | None
    kernels: int
    archs: Mapping[str, int]
    versions: Mapping[str, str]


@dataclass(frozen=True)
class Workload:
    """What kernels are compiled ahead for: a graph of a file with these options, in each of these modes.

    optional   the model runs without it too: a target that has not all of it leaves it out and says so
    """

    graph: Graph
    file: ModelFile
    options: Options
    modes: Sequence[Mode]
    optional: bool = False


@dataclass(frozen=True)
class Goal:
    """What kernels are compiled for: an architecture, and the device of that name where one was named."""

    arch: str
    device: DeviceSpec | None = None


class BuiltKernel(NamedTuple):
    """A kernel that was compiled ahead.

    goal     name of the device, else the architecture
    nbytes   of its machine code
    facts    what the compiler states of it and what follows from that, by name
    """

    name: str
    goal: str
    arch: str
    nbytes: int
    facts: Mapping[str, int | None]


class BuiltKernels(NamedTuple):
    """What a KernelBuilder made: sets for a pack, and a line for each kernel and goal.

    compiled   how many kernels were not kept from earlier
    left_out   why an optional workload was
    """

    sets: Sequence[KernelSet]
    kernels: Sequence[BuiltKernel]
    compiled: int
    left_out: Sequence[str] = ()


class KernelBuilder(Protocol):
    """Compiles kernels for machines other than this one.

    architectures   that it compiles for
    """

    architectures: Sequence[str]

    def refusal(self) -> str | None:
        """Why nothing can be compiled here; None: it can."""
        ...

    def arch_for(self, isa: str) -> str | None:
        """Which of `architectures` a device of this instruction set takes; None: it is none of this target's."""
        ...

    def outdated(self, made: KernelSet) -> str | None:
        """Why kernels are of no use to this edgeq, as the end of a message; None: they are."""
        ...

    def build(
        self, workloads: Sequence[Workload], goals: Sequence[Goal], on_progress: OnProgress = no_progress
    ) -> BuiltKernels:
        """UnsupportedError: a graph has something that the target does not, or a kernel does not compile."""
        ...


class Absence(str):
    """A refusal because this machine has nothing of the kind: told only to who asked for that target."""


class Target(Protocol):
    """shares_weights   programs of one file hold its weights together: a second one takes its buffers alone."""

    name: str
    shares_weights: bool

    def refusal(self, file: ModelFile | None = None) -> str | None:
        """Why this target cannot be used on this machine, or not for `file`; None if it can."""
        ...

    def room(self, graph: Graph, file: ModelFile, options: Options, beside: Sequence[Beside] = ()) -> MemoryNeed:
        """The memory that the program of these arguments may take and needs, with all that run beside it; nothing is
        allocated."""
        ...

    def compile(
        self,
        graph: Graph,
        file: ModelFile,
        options: Options,
        on_progress: OnProgress = no_progress,
        beside: Program | None = None,
    ) -> Program:
        """`on_progress` is told of measurements and of each kernel that is compiled, which takes seconds the first time.

        beside   a program of this target and file, whose pages, states and arrays the new one uses, and those of the one that
                 it was compiled beside; its graph has the same pages and states
        """
        ...

    def gpus(self) -> Sequence[Gpu]:
        """The GPUs that this target's driver shows, those that cannot be used too."""
        ...

    def hardware(self) -> Hardware:
        """What the processor has for a target that `refusal` finds nothing against, and how fast it is."""
        ...

    def packs(self, file: ModelFile) -> Sequence[KernelPack]:
        """The kernels beside and inside a file, which it may have for this target."""
        ...

    def builder(self) -> KernelBuilder | None:
        """What compiles its kernels ahead, for machines other than this one; None: it has none to compile."""
        ...
