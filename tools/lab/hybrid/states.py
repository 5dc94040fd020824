"""What states cost: a decoder beside the same one whose scans are left out, and a conversation that goes on after a restart."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, cast

import numpy as np

from edgeq.format.container import ModelFile
from edgeq.pictures.prompt import Prompt
from edgeq.runtime import Model, Session
from edgeq.runtime.batching.prefix_tree import Node, PrefixTree, key_of
from edgeq.runtime.batching.prompt_store import PromptStore
from edgeq.targets import TargetChoice
from edgeq.targets.capabilities import HoldsStates
from edgeq.targets.cpu import CpuTarget
from edgeq.targets.family_operations import DeltaRule
from edgeq.targets.graph import Graph
from edgeq.targets.rows import PAGE
from edgeq.targets.states import LOG, StateSpec
from edgeq.targets.target import Options
from edgeq.tools.cli.terminal import Report
from edgeq.tools.lab.hybrid.shapes import random_file, shape

DECODED = 32
"""Tokens that are decoded in a turn."""


class WithoutScans(CpuTarget):
    """The processor, for networks whose gated delta nets give what was in memory: as fast as if their scans took no time."""

    def compile(self, graph: Graph, *given: Any, **named: Any) -> Any:
        kept = tuple(each for each in graph.operations if not isinstance(each, DeltaRule))
        return super().compile(replace(graph, operations=kept), *given, **named)


@dataclass(frozen=True)
class ScanCost:
    """Median milliseconds with scans and without, and the median of the ratios turn by turn.

    bytes_ratio   bytes that a token reads, of weights, states and logs, to those of weights
    """

    rows: int
    with_ms: float
    without_ms: float
    ratio: float
    bytes_ratio: float


def scans(name: str, layers: int, prompt: int, threads: int, rounds: int, report: Report) -> list[ScanCost]:
    """A prompt of so many tokens and the tokens after it, with scans and without, in turn."""
    config = replace(shape(name, layers), draft_layers=0)
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, prompt).tolist()
    prompts: list[list[float]] = [[], []]
    decoded: list[list[float]] = [[], []]
    with random_file(config) as path, ExitStack() as stack:
        options = Options("a8", threads=threads, threads_prefill=threads)
        targets = (CpuTarget(), WithoutScans())
        models = [
            stack.enter_context(Model(ModelFile.open(path), TargetChoice(target, []), options, context=prompt + PAGE))
            for target in targets
        ]
        for turn in range(rounds + 1):
            for index, model in enumerate(models):
                report(2 * turn + index, 2 * rounds + 2, "scans")
                with model.session() as session:
                    began = perf_counter()
                    session.prefill(tokens)
                    read = perf_counter()
                    for token in tokens[:DECODED]:
                        session.decode(token)
                    ended = perf_counter()
                if turn:
                    prompts[index].append(read - began)
                    decoded[index].append((ended - read) / DECODED)
        sizes = models[0].file.metadata.bytes_per_token()
        weights = sizes["weights"] + sizes["head"]
        moved = sum(map(moved_bytes, models[0].graph.states))
    return [
        _cost(prompt, prompts, 1.0),
        _cost(1, decoded, (weights + moved) / weights),
    ]


def _cost(rows: int, seconds: list[list[float]], bytes_ratio: float) -> ScanCost:
    with_scans, without = seconds
    ratio = statistics.median(a / b for a, b in zip(with_scans, without, strict=True))
    return ScanCost(rows, 1000 * statistics.median(with_scans), 1000 * statistics.median(without), ratio, bytes_ratio)


def moved_bytes(spec: StateSpec) -> float:
    """Bytes of a state that a token reads or writes, on average: S, half of a log and its own row; at the end of a log S is
    read and written once more."""
    if spec.kind == "tail":
        return 4 * (spec.shape[0] + 1) * spec.shape[1]
    return 4 * (spec.snapshot_numbers * (1 + 2 / LOG) + spec.log * (LOG / 2 + 1))


@dataclass(frozen=True)
class Continued:
    """How a conversation of `tokens` tokens goes on: milliseconds, the least of all turns, as what else
    runs on a machine only adds to them.

    page_kb, snapshot_mb, snapshots   bytes of a page and of a snapshot of the states; how many snapshots are kept
    disk_ms      to the first new token where pages and snapshots are on disk, as after a restart of a server
    memory_ms    the same where they are in memory
    session_ms   reading a saved session of `session_mb`, its digest checked, and the first token after it
    read_ms      reading the bytes of that file and nothing more;  snapshot_ms: beginning from a snapshot in memory
    token_ms     a token
    """

    tokens: int
    page_kb: float
    snapshot_mb: float
    snapshots: int
    session_mb: float
    disk_ms: float
    memory_ms: float
    session_ms: float
    read_ms: float
    snapshot_ms: float
    token_ms: float


def continued(name: str, layers: int, tokens: int, threads: int, rounds: int, report: Report) -> Continued:
    """All ways in turn.  Files are in the system's cache, as where the process alone was started again."""
    config = replace(shape(name, layers), draft_layers=0)
    text = np.random.default_rng(0).integers(0, config.vocab_size, tokens // PAGE * PAGE + 1).tolist()
    length, taken = len(text) - 1, list[tuple[float, ...]]()
    with ExitStack() as stack:
        path = stack.enter_context(random_file(config))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="edgeq-")))
        model = stack.enter_context(Model.load(path, mode="a8", threads=threads, context=length + 2 * PAGE))
        store, sizes = model.prompt_store(folder / "pages", 1 << 33), (model.program.window, model.program.snapshot_pages)
        stack.callback(store.close)
        with model.session() as session:
            report(0, rounds + 2, "prompt")
            session.prefill(text[:-1])
            session.save(folder / "saved")
            tree, path_of_text = PrefixTree(*sizes), list[Node]()
            tree.extend("", path_of_text, session.tokens, (), session.pages)
            snapshots = [node.page.snapshot for node in path_of_text if node.page and node.page.snapshot]
            store.put(tree.digest("", ()), path_of_text)
            store.flush(60)
        for turn in range(rounds + 1):
            report(turn + 1, rounds + 2, "goes on")
            times, tree = list[float](), PrefixTree(*sizes)
            for _ in ("from disk", "from memory"):
                with model.session() as session:
                    times.append(timed(partial(taken_over, tree, store, session, text)))
            with model.session() as session:
                times.append(timed(partial(loaded, session, folder / "saved", text[-1])))
                times.append(timed(lambda: (folder / "saved").read_bytes()))
                times.append(timed(lambda: cast(HoldsStates, model.program).start_from(snapshots[-1], length)))
                times.append(timed(lambda: session.decode(text[0])))
            if turn:
                taken.append(tuple(times))
        page_bytes, snapshot_bytes = len(model.program.page_memory()), cast(HoldsStates, model.program).saved_bytes[1]
        saved = (folder / "saved").stat().st_size
    least = [1000 * min(each) for each in zip(*taken, strict=True)]
    return Continued(length, page_bytes / 1e3, snapshot_bytes / 1e6, len(snapshots), saved / 1e6, *least)


def taken_over(tree: PrefixTree, store: PromptStore, session: Session, text: Sequence[int]) -> None:
    """Run the last token of a text whose pages before it are in a tree, or else on disk."""
    held = tree.find("", Prompt(list(text)))
    keys = (key_of(text, (), start) for start in range(PAGE * len(held), len(text) - 1, PAGE))
    for key, page in store.pages(tree.digest("", held), keys, len(held)):
        tree.add("", held, key, page)
    assert tree.complete(held) * PAGE == len(text) - 1
    session.adopt(text[:-1], (), [node.page for node in held if node.page])
    session.decode(text[-1])
    tree.release(held)


def loaded(session: Session, path: Path, token: int) -> None:
    """Read a saved session and run a token after it."""
    session.load(path)
    session.decode(token)


def timed(call: Callable[[], object]) -> float:
    """Seconds of a call."""
    began = perf_counter()
    call()
    return perf_counter() - began
