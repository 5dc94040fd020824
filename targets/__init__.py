"""Where a model runs.  A Target compiles a Graph into a Program; a Program runs rows."""

if __name__ != "edgeq.targets":
    raise ImportError("import edgeq.targets, not targets")

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from edgeq.container import ModelFile
from edgeq.errors import UnsupportedError
from edgeq.records import KvCodec, Mode
from edgeq.targets.graph import Graph, Operation, Page, Rows
from edgeq.targets.requantization import InputSums, Weights

TARGETS = ("cpu", "reference")
"""In order of preference."""
CHUNK_ROWS = 516
"""Of a run, at most, if nothing is asked for: a prompt of 512 tokens in one, and a multiple of the 12 tokens of a tile."""


@dataclass(frozen=True)
class Options:
    """What a user may force.

    threads           of a run of one row; 0: the target chooses
    threads_prefill   of a run of several rows; 0: the target chooses
    isa               instruction set; None: the best this machine has
    max_rows          rows of one run: the prefill chunk
    max_logits        rows whose logits one run can return
    kv                how keys and values are cached
    copies            runs with masters and with copies of the weights are to come: compile for them too
    """

    mode: Mode
    threads: int = 0
    isa: str | None = None
    max_rows: int = CHUNK_ROWS
    max_logits: int = 1
    threads_prefill: int = 0
    kv: KvCodec = KvCodec()
    copies: bool = False


Report = Callable[[int, int, str], None]
"""Hears (steps done, steps in all, what comes next); 0 steps in all: nobody knows how many."""


def silent(done: int, total: int, what: str) -> None:
    """For nobody."""


Step = tuple[Operation, str]
"""What was run, of several operations that run as one the main one; and its kernel, the target's function: one operation can
need several, such as the quantization of what a product reads."""


@dataclass(frozen=True)
class StepTimes:
    """What a run did, in order, and float64 [steps, 2]: the seconds that the calling thread worked on each step, and then
    waited for the parts of it that other threads had taken.
    """

    steps: Sequence[Step]
    seconds: NDArray[np.float64]


class Program(Protocol):
    """A compiled graph with its buffers.  One caller at a time."""

    options: Options
    threads: int

    @property
    def description(self) -> str:
        """What runs where, for people: target, instruction set, threads, mode."""
        ...

    def prepare(self, mode: Mode, report: Report = silent) -> None:
        """Make what runs in another mode need, which else the first of them does."""
        ...

    def new_page(self) -> Page:
        """A cache page of `Graph.page_bytes(kv)` bytes."""
        ...

    def new_sums(self) -> InputSums:
        """Zeros, for `run`."""
        ...

    def new_weights(self) -> Weights:
        """Room for a copy of the weights of all layers with a master."""
        ...

    def requantize(self, weights: Weights, scales: Sequence[NDArray[np.float32]]) -> None:
        """Fill `weights` from the masters: W diag(s) rounded in the codec of the layer's own weights, and 1/s for its input.

        scales   s float32 [columns] of every shared input, in the order of `InputSums.inputs`

        Of the file no more than one layer's master stays in memory.  UnsupportedError: a master that cannot be read.
        """
        ...

    def run(
        self,
        rows: Rows,
        mode: Mode | None = None,
        *,
        times: list[StepTimes] | None = None,
        weights: Weights | None = None,
        sums: InputSums | None = None,
    ) -> NDArray[np.float32]:
        """Logits float32 [len(rows.logits), vocab], valid until the next run.

        mode     another than the options say, over the same weights and cache (a cheap draft of an exact run); the first run
                 in it makes its table
        times    the time of every step is appended to it
        weights  a copy to use instead of the file's weights
        sums     layers with a master use that, and the squares of their inputs are added here; not together with `weights`

        The arithmetic of a row does not depend on which rows run with it, and sums are added in the order of the rows.
        """
        ...


class Target(Protocol):
    name: str

    def refusal(self) -> str | None:
        """Why this target cannot be used on this machine, or None."""
        ...

    def compile(self, graph: Graph, file: ModelFile, options: Options, report: Report = silent) -> Program:
        """`report` hears of measurements and how far the compilation is: the first time they can take many seconds."""
        ...


@dataclass(frozen=True)
class Choice:
    """The chosen target and why the ones before it were refused."""

    target: Target
    refused: Sequence[tuple[str, str]]


def load(name: str) -> Target:
    """The target of that name; importing it costs nothing before it is asked for."""
    if name == "cpu":
        from edgeq.targets.cpu import CpuTarget

        return CpuTarget()
    if name == "reference":
        from edgeq.targets.reference.program import ReferenceTarget

        return ReferenceTarget()
    raise UnsupportedError(f"target {name!r} is not known; supported: {', '.join(TARGETS)}")


def pick(name: str | None = None) -> Choice:
    """The named target, or the first of TARGETS that this machine can use.

    UnsupportedError: the named target is unknown or refused, with its reason.
    """
    refused: list[tuple[str, str]] = []
    for candidate in (name,) if name else TARGETS:
        target = load(candidate)
        reason = target.refusal()
        if reason is None:
            return Choice(target, refused)
        refused.append((candidate, reason))
    reasons = "; ".join(f"{candidate}: {reason}" for candidate, reason in refused)
    raise UnsupportedError(f"no target can run here: {reasons}")
