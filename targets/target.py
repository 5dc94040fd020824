"""The contract of a target: it compiles a Graph into a Program, and a Program runs rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from edgeq.container import ModelFile
from edgeq.records import KvCodec, Mode
from edgeq.targets.graph import Graph, Operation
from edgeq.targets.requantization import InputSums, Weights
from edgeq.targets.rows import Page, Rows


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
    context           positions that memory is kept for beside the program; 0: unknown

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
    context: int = 0


OnProgress = Callable[[int, int, str], None]
"""Progress callback: (steps done, total steps, label).  A total of 0 means unknown."""


def no_progress(done: int, total: int, label: str) -> None:
    """A progress callback that does nothing."""


class Step(NamedTuple):
    """One executed step: the operation (for fused steps, the main one) and the name of the kernel that ran.

    One operation can take several steps, such as the quantization of what a product reads.  `reads_weights`: this step of a
    Linear reads the layer's weights, or one of its column blocks.
    """

    operation: Operation
    kernel: str
    reads_weights: bool = False


class RunTimes(NamedTuple):
    """When a run and its steps ran; `began`, `ended` and `inside` in seconds of perf_counter.

    threads   float64 [threads, steps, 3]: when each thread came to a step, by perf_counter; the seconds that it worked on it,
              and the seconds that it then waited for work items that others had taken.  NaN: the thread was not there
    began     right before what the target runs was started, threads or kernels;  ended: right after
    inside    seconds of that in which the steps ran: what a target that times them by another clock is checked against
    """

    threads: NDArray[np.float64]
    began: float
    ended: float
    inside: float


class StepTimes(NamedTuple):
    """The steps of a run, in order, and when they ran.

    work_out   gives of `noted` the times; called when they are asked for, since it can take longer than a small run.  Who asks
               more than once keeps them
    """

    steps: Sequence[Step]
    work_out: Callable[[Any], RunTimes]
    noted: Any

    @property
    def run(self) -> RunTimes:
        """The times, worked out."""
        return self.work_out(self.noted)

    @property
    def seconds(self) -> NDArray[np.float64]:
        """float64 [steps, 2]: the seconds that the calling thread worked on each step, and that it waited."""
        return self.run.threads[0, :, 1:]


def in_turn(steps: Sequence[Step], clock: Sequence[float]) -> StepTimes:
    """Times of steps that one thread ran one after another: `clock` has the beginning of each, then the end of the last."""
    return StepTimes(steps, _in_turn, clock)


def _in_turn(clock: Sequence[float]) -> RunTimes:
    began = np.array(clock[:-1])
    threads = np.stack([began, np.diff(clock), np.zeros_like(began)], 1)[None]
    return RunTimes(threads, clock[0], clock[-1], clock[-1] - clock[0])


class RanRows(NamedTuple):
    """Of the `Rows` of a run what tells how much it read."""

    slots: NDArray[np.int32]
    sessions: NDArray[np.int32]
    spans: NDArray[np.int32] | None
    wanted: NDArray[np.int32]

    @classmethod
    def of(cls, rows: Rows) -> RanRows:
        return cls(rows.slots, rows.sessions, rows.spans, rows.wanted)


class Recorded(NamedTuple):
    """A run, the mode that it ran in and its rows."""

    times: StepTimes
    mode: Mode
    rows: RanRows


class TellsTimes:
    """`record` and `recorded` of a program whose runs tell their times when they end."""

    def __init__(self) -> None:
        self._recording, self._recorded = False, list[Recorded]()

    def record(self, on: bool) -> None:
        self._recording = on

    def recorded(self) -> list[Recorded]:
        found, self._recorded = self._recorded, []
        return found

    def _note(self, times: StepTimes, mode: Mode, rows: Rows) -> None:
        self._recorded.append(Recorded(times, mode, RanRows.of(rows)))


class Program(Protocol):
    """A compiled graph with its buffers.  One caller at a time, from any thread.

    tile   rows that the kernels multiply together: prefill chunks of a multiple of it waste nothing

    Any method raises DeviceError once the device has failed: the program is unusable from then on.  To drop it and its pages
    raises nothing.
    """

    options: Options
    threads: int
    tile: int

    @property
    def description(self) -> str:
        """What runs where, for people: target, instruction set, threads, mode."""
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
        """The contents of a page, always as many bytes, for `load_page` of the same target, model and cache codec."""
        ...

    def page_memory(self) -> NDArray[np.uint8]:
        """Memory for the contents of a page, for `load_page`; may be called beside other methods."""
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

        mode     None: the mode of the options; another one runs over the same weights and cache, as a cheap draft of an exact
                 run, and is compiled when it first runs

        The arithmetic of a row does not depend on which rows run with it.
        """
        ...

    def record(self, on: bool) -> None:
        """From the next run on: whether the times of the steps of runs are noted for `recorded`."""
        ...

    def recorded(self) -> list[Recorded]:
        """The runs that were recorded since the last call, in order, without those that were interrupted."""
        ...


@runtime_checkable
class Requantizable(Program, Protocol):
    """A Program whose target can also requantize weights for a prompt (requantization.py)."""

    def new_sums(self) -> InputSums:
        """Zeros, for `run_summing`."""
        ...

    def new_weights(self) -> Weights:
        """Room for the requantized weights of all layers with a master."""
        ...

    def requantize(self, weights: Weights, scales: Sequence[NDArray[np.float32]]) -> None:
        """Fill `weights` from the masters: W diag(s) rounded in the codec of the layer's own weights, and 1/s for its input.

        scales   s float32 [columns] of every shared input, in the order of `InputSums.inputs`

        No more than one layer's master stays in memory.  UnsupportedError: a master that cannot be read.
        """
        ...

    def run_requantized(self, rows: Rows, weights: Weights, mode: Mode | None = None) -> NDArray[np.float32]:
        """`Program.run` with requantized weights instead of the file's."""
        ...

    def run_summing(self, rows: Rows, sums: InputSums, mode: Mode | None = None) -> NDArray[np.float32]:
        """`Program.run` in which layers with a master use it, and the squares of their inputs are added to `sums`.

        They are added in the order of the rows.
        """
        ...


@dataclass(frozen=True)
class Largest:
    """The largest numbers of rows of a result, in order, equals in the order of their ids.

    ids      int32 [rows, count];  values: float32 [rows, count]
    finite   bool [rows]: all numbers of the row are; where one is not, its ids and values mean nothing
    """

    ids: NDArray[np.int32]
    values: NDArray[np.float32]
    finite: NDArray[np.bool_]


@runtime_checkable
class FindsLargest(Program, Protocol):
    """A Program whose device finds the largest numbers of its result, so that the host need not have all of it.

    most_largest   that can be asked for; 0: none
    largest_rows   of a result, at most
    """

    most_largest: int
    largest_rows: int

    def run_largest(self, rows: Rows, count: int, mode: Mode | None = None, weights: Weights | None = None) -> Largest:
        """The `count` largest numbers of each row of what `run` gives, with requantized weights if there are some.

        Valid until the next run.  ValueError: more than `most_largest`, or none, or of more than `largest_rows` rows.
        """
        ...


@dataclass(frozen=True)
class Room:
    """Bytes of memory that a program may take, and bytes that it needs without its cache pages.

    saving   how it can be compiled to need less, as the end of a message; empty: it cannot
    """

    available: int
    needed: int
    saving: str = ""


class Absence(str):
    """A refusal because this machine has nothing of the kind: told only to who asked for that target."""


class Target(Protocol):
    """shares_weights   programs of one file hold its weights together: a second one takes its buffers alone."""

    name: str
    shares_weights: bool

    def refusal(self, file: ModelFile | None = None) -> str | None:
        """Why this target cannot be used on this machine, or not for `file`; None if it can."""
        ...

    def room(self, graph: Graph, file: ModelFile, options: Options) -> Room:
        """The memory that the program of these arguments may take and needs; nothing is allocated."""
        ...

    def compile(self, graph: Graph, file: ModelFile, options: Options, on_progress: OnProgress = no_progress) -> Program:
        """`on_progress` is told of measurements and of each kernel that is compiled, which takes seconds the first time."""
        ...
