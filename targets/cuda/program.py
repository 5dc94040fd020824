"""A compiled graph on a device: its memory, its kernels, and the launches of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from edgeq.container import ModelFile
from edgeq.errors import DeviceError
from edgeq.records import Mode
from edgeq.targets.cuda import build
from edgeq.targets.cuda.device import Device, Kernel
from edgeq.targets.cuda.lower import MANY_TOKENS, Angles, Gather, Launch, Lowered, lower
from edgeq.targets.cuda.pack import Variant
from edgeq.targets.cuda.storage import Pool, Storage
from edgeq.targets.graph import Graph, Select
from edgeq.targets.host import check_rows
from edgeq.targets.reference.context import as_float32
from edgeq.targets.rows import Page, Rows
from edgeq.targets.target import OnProgress, Options, Step, StepTimes, no_progress

CHUNK_ROWS = 1024
"""Default maximum rows per run."""
FEW_ROWS = 16
"""Rows up to which products use the kernel for few, which reads the weights once for every 8 of them."""
PAGES_OF_A_RUN = 1 << 16
"""Pages that the rows of a run see at most: 4 million positions."""


def resolved(options: Options) -> Options:
    """The options with the number of rows of a run, where that is left to the target."""
    return replace(options, max_rows=options.max_rows or max(CHUNK_ROWS, options.max_logits))


class CudaProgram:
    """The host's threads only launch; `threads` is what this file uses."""

    threads = 1
    tile = MANY_TOKENS

    def __init__(
        self, device: Device, graph: Graph, file: ModelFile, options: Options, on_progress: OnProgress = no_progress
    ) -> None:
        self.options = resolved(options)
        self._device, self._graph, self._file = device, graph, file
        self._storage = Storage(device, file)
        self._storage.named("pages", PAGES_OF_A_RUN * 8)
        self._pool = Pool(device, graph.page_bytes(self.options.kv))
        self._modes: dict[Mode, list[Lowered]] = {}
        self._angles: set[Angles] = set()
        self._kernels: dict[Variant, Kernel] = {}
        self._logits = np.zeros((self.options.max_logits, graph.buffers[graph.result]), np.float32)
        self._failed = ""
        self.prepare(self.options.mode, on_progress)

    @property
    def description(self) -> str:
        return (
            f"cuda target: {self._device.name}, sm_{self._device.sm}, mode {self.options.mode}, "
            f"{len(self._modes[self.options.mode])} kernels per run"
        )

    @property
    def device_bytes(self) -> int:
        """Bytes of device memory that this program holds."""
        return self._storage.nbytes + self._pool.nbytes

    def prepare(self, mode: Mode, on_progress: OnProgress = no_progress) -> None:
        if mode in self._modes:
            return
        lowered, angles = lower(self._graph, self._storage, self.options, mode)
        needed = dict.fromkeys(v for each in lowered if isinstance(each, Launch) for v in (each.variant, each.many) if v)
        missing = [variant for variant in needed if variant not in self._kernels]
        generated = build.kernels(missing, lambda done, label: on_progress(done, len(missing), f"kernel {label}"))
        self._kernels.update(self._device.load(generated))
        self._angles |= angles
        self._modes[mode] = lowered

    def new_page(self) -> Page:
        return self._pool.page()

    def copy_page(self, page: Page) -> Page:
        return self._pool.filled(self._pool.contents(page))

    def save_page(self, page: Page) -> bytes:
        return self._pool.contents(page).tobytes()

    def load_page(self, data: bytes) -> Page:
        return self._pool.filled(np.frombuffer(data, np.uint8))

    def read_bandwidth(self, refresh: bool = False) -> float | None:
        """None: not measured."""
        return None

    def run(self, rows: Rows, mode: Mode | None = None, *, times: list[StepTimes] | None = None) -> NDArray[np.float32]:
        """The rows of the result, float32 [wanted, width].  ValueError: more rows than the options allow."""
        check_rows(rows, self.options, self._graph.together)
        if self._failed:
            raise DeviceError(self._failed)
        mode = mode or self.options.mode
        self.prepare(mode)
        try:
            return self._run(rows, self._modes[mode], times)
        except DeviceError as error:
            self._failed = f"this program cannot run any more: {error}"
            raise

    def _run(self, rows: Rows, lowered: list[Lowered], times: list[StepTimes] | None) -> NDArray[np.float32]:
        stages = rows, rows.selected() if len(rows.wanted) else None
        pages = self._send_pages(rows)
        for stage, here in enumerate(stages):
            if here is not None:
                self._send(here, stage, pages[here.sessions])
        if len(rows.wanted):
            self._storage.send("wanted", np.asarray(rows.wanted, np.int32))
        steps: list[Step] = []
        clock = [perf_counter()]
        for each in lowered:
            here = stages[each.stage] if isinstance(each, Launch) else rows
            if here is None:
                break
            steps.append(self._start(each, here))
            if times is not None:
                self._device.synchronize()
                clock.append(perf_counter())
        self._device.synchronize()
        if times is not None:
            seconds = np.diff(clock)
            times.append(StepTimes(steps, np.stack([seconds, np.zeros_like(seconds)], 1)))
        return self._result(rows)

    def _start(self, each: Lowered, here: Rows) -> Step:
        if isinstance(each, Gather):
            table = self._file.array(each.table)[here.tokens.astype(np.int64)]
            self._device.write(each.address, np.ascontiguousarray(as_float32(table, each.table.dtype)))
            return Step(each.operation, "gather")
        variant = each.many if each.many and len(here) > FEW_ROWS else each.variant
        kernel = self._kernels[variant]
        scalars: Mapping[str, int | float] = {**each.values, "tokens": len(here), "pool": self._pool.base}
        self._device.launch(kernel, *kernel.generated.bind(scalars))
        return Step(each.operation, variant.symbol, each.reads_weights)

    def _send_pages(self, rows: Rows) -> NDArray[np.int32]:
        """Send the offsets of the pages of all sessions; returns where those of each begin."""
        offsets = [self._pool.offset(page) for session in rows.pages for page in session]
        if len(offsets) > PAGES_OF_A_RUN:
            raise ValueError(f"{len(offsets)} pages in a run, of at most {PAGES_OF_A_RUN}")
        self._storage.send("pages", np.array(offsets, np.int64))
        return np.cumsum([0, *(len(session) for session in rows.pages)])[:-1].astype(np.int32)

    def _send(self, rows: Rows, stage: int, tables: NDArray[np.int32]) -> None:
        for name, values in (("tokens", rows.tokens), ("slots", rows.slots), ("tables", tables)):
            if self._storage.has((name, "sent", stage)):
                self._storage.send((name, "sent", stage), np.asarray(values, np.int32))
        for angles in self._angles:
            if angles.stage == stage:
                cos, sin = angles.of(rows.positions)
                self._storage.send((angles, "cos"), cos)
                self._storage.send((angles, "sin"), sin)

    def _result(self, rows: Rows) -> NDArray[np.float32]:
        stage = int(any(isinstance(op, Select) for op in self._graph.operations))
        count = len(rows.wanted) if stage else len(rows)
        result = self._logits[:count]
        if count:
            self._device.read(self._storage.address((self._graph.result, stage)), result)
        return result
