"""edgeq's own products, on a device of the CUDA target."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from edgeq.format.codec import Codec
from edgeq.format.container import ModelFile
from edgeq.format.records import ArrayRef, LinearSpec, Mode, Weight
from edgeq.targets.cuda import CudaTarget
from edgeq.targets.cuda.device.device import Device
from edgeq.targets.cuda.device.discover import find
from edgeq.targets.cuda.run.program import CudaProgram
from edgeq.targets.cuda.supply import build
from edgeq.targets.cuda.supply.nvrtc import arch_for
from edgeq.targets.cuda.supply.pack import Generated, Variant
from edgeq.targets.cuda.supply.supply import KernelSource, OnKernel
from edgeq.targets.graph import CacheSpec, Embed, Graph, Linear, Operation
from edgeq.targets.rows import Rows
from edgeq.targets.target import Options
from edgeq.tools.lab.products.contestants import GROUP, Prepared

CODEC = Codec("int", 4, GROUP)


class Arrays:
    """Arrays in memory, where a target reads those of a file."""

    def __init__(self) -> None:
        self._kept: list[NDArray[Any]] = []

    def add(self, array: NDArray[Any], dtype: str) -> ArrayRef:
        self._kept.append(array)
        return ArrayRef(dtype, array.shape, len(self._kept) - 1)

    def array(self, ref: ArrayRef) -> NDArray[Any]:
        return self._kept[ref.segment]

    def release(self, ref: ArrayRef, uncached: bool = False) -> None:
        """There are no pages of a file to drop."""


class Edgeq:
    """Weights of 4 bits in groups of 128 by `mode`.  Up to 16 rows the product quantizes x, else once for all."""

    def __init__(self, mode: Mode, device: Device | None = None, source: KernelSource = build.kernels) -> None:
        """device, source   None: the first GPU, with kernels that are compiled here"""
        self.name = f"int4 g128, edgeq {mode}"
        self._mode, self._device, self._source = mode, device, source

    def refusal(self) -> str | None:
        if self._device is not None:
            return None
        found = find()
        if found.first is None:
            return found.refused or "there is no NVIDIA GPU"
        from edgeq.targets.cuda.device.driver import DriverDevice

        self._device, arch = DriverDevice(found.first.ordinal), arch_for(found.first.sm)

        def compiled(variants: list[Variant], on_kernel: OnKernel) -> list[Generated]:
            made = [build.compiled(variant, [arch]) for variant in variants]
            return [replace(each.generated, image=each.images[arch].image) for each in made]

        self._source = cast(KernelSource, compiled)
        return None

    def prepare(self, rows: int, columns: int, copies: int, most_tokens: int) -> Prepared:
        assert self._device is not None
        arrays, rng, operations, nbytes = Arrays(), np.random.default_rng(0), list[Operation](), 0
        table = arrays.add(rng.standard_normal((most_tokens, columns)).astype(np.float32), "f32")
        operations.append(Embed(-1, table, "x"))
        for i in range(copies):
            parts = CODEC.parts(rows, columns)
            q = arrays.add(rng.integers(0, 256, parts["q"].shape, np.uint8), "u8")
            scale = arrays.add(np.full(parts["scale"].shape, columns**-0.5 / CODEC.center, np.float16), "f16")
            weight = Weight(CODEC, rows, columns, {"q": q, "scale": scale})
            nbytes = weight.nbytes
            operations.append(Linear(0, "x", LinearSpec(f"{i}.product", (weight,)), "y"))
        graph = Graph({"x": columns, "y": rows}, tuple(operations), "y", cache=(CacheSpec(1, 16, 16),))
        options = Options(self._mode, max_rows=most_tokens, max_logits=1, graphs=False)
        target = CudaTarget(self._device, self._source)
        return _Prepared(target.compile(graph, cast(ModelFile, arrays), options), copies, nbytes)


class _Prepared:
    def __init__(self, program: CudaProgram, copies: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self._program, self._copies = program, copies

    def seconds(self, tokens: int, calls: int, repetitions: int) -> list[float]:
        at = np.arange(tokens, dtype=np.int32)
        none = np.zeros(tokens, np.int32)
        rows = Rows(at, none[None], none, none, [[self._program.new_page()]], none[:0])
        # x is what an earlier run leaves in its buffer.
        self._program.run(rows)
        rounds = -(-calls // self._copies)
        taken = self._program.seconds_of(Linear, rows, rounds, repetitions)
        return [seconds / rounds / self._copies for seconds in taken]
