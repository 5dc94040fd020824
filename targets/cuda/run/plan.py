"""The kernels and the memory that a model needs on a GPU, found out without one: its program is made on a device that has
nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from numpy.typing import NDArray

from edgeq.errors import DeviceError
from edgeq.format.container import ModelFile
from edgeq.format.records import Mode
from edgeq.targets.cuda.arguments.products import FusedArguments
from edgeq.targets.cuda.device import occupancy
from edgeq.targets.cuda.device.device import Call, Copy, Device, Kernel, Mark, Memory, Pinned, Recording
from edgeq.targets.cuda.lowering.spread import rounds_of
from edgeq.targets.cuda.run.program import CudaProgram
from edgeq.targets.cuda.supply.pack import Generated, Variant
from edgeq.targets.cuda.supply.supply import OnKernel
from edgeq.targets.graph import Graph, Linear
from edgeq.targets.target import Beside, Options

ALIGNMENT = 256


@dataclass(frozen=True)
class _Place:
    address: int
    nbytes: int


@dataclass(frozen=True)
class _Named:
    generated: Generated


class NoDevice:
    """A device whose memory is addresses, and whose kernels are names.

    blocks_held   blocks of threads of a kernel that a multiprocessor has room for
    """

    name, sm = "a GPU that is not here", 0

    def __init__(
        self, integrated: bool = False, multiprocessors: int = 1, blocks_held: Callable[[Variant], int] = lambda variant: 1
    ) -> None:
        self.integrated, self.multiprocessors, self._held = integrated, multiprocessors, blocks_held
        self._next = ALIGNMENT

    def memory(self) -> tuple[int, int]:
        return 1 << 62, 1 << 62

    def allocate(self, nbytes: int) -> Memory:
        place = _Place(self._next, nbytes)
        self._next += -(-nbytes // ALIGNMENT) * ALIGNMENT
        return place

    def write(self, address: int, data: NDArray[Any]) -> None: ...

    def read(self, address: int, data: NDArray[Any]) -> None: ...

    def zero(self, address: int, nbytes: int) -> None: ...

    def copy(self, target: int, source: int, nbytes: int) -> None: ...

    def load(self, kernels: Iterable[Generated]) -> Mapping[Variant, Kernel]:
        return {each.variant: _Named(each) for each in kernels}

    def blocks_held(self, kernel: Kernel) -> int:
        return self._held(kernel.generated.variant)

    def launch(self, kernel: Kernel, grid: Sequence[int], block: Sequence[int], arguments: Sequence[int | float]) -> None: ...

    def mark(self) -> Mark:
        return Mark()

    def stamp(self, mark: Mark) -> None: ...

    def seconds(self, marks: Sequence[Mark]) -> list[float]:
        raise DeviceError(f"{self.name} runs nothing")

    def pinned(self, nbytes: int) -> Pinned:
        raise DeviceError(f"{self.name} runs nothing")

    def record(self, steps: Sequence[Call | Copy | Mark]) -> Recording:
        raise DeviceError(f"{self.name} runs nothing")

    def synchronize(self) -> None: ...


def variants(graph: Graph, file: ModelFile, options: Options, modes: Iterable[Mode]) -> list[Variant]:
    """Every kernel that a program launches in these modes, with requantized weights too if the options ask for them.

    UnsupportedError: as CudaTarget.compile.
    """
    asked: dict[Variant, None] = {}

    def compiled(wanted: Sequence[Variant], on_kernel: OnKernel) -> list[Generated]:
        asked.update(dict.fromkeys(wanted))
        return names_only(wanted, on_kernel)

    for mode in modes:
        # A short prompt is decoded with the weights of the file.
        for requantize in {False, options.requantize}:
            CudaProgram(NoDevice(), graph, file, replace(options, mode=mode, requantize=requantize), kernel_source=compiled)
    return sorted(asked, key=lambda variant: variant.symbol)


def device_bytes(
    graph: Graph,
    file: ModelFile,
    options: Options,
    device: Device,
    stream_masters: bool = False,
    beside: Sequence[Beside] = (),
) -> int:
    """Memory of a program on a device: weights, buffers, recordings, the pages of the cache that its pool begins with, and the
    requantized weights of one session if the options ask for them; with what programs `beside` it take more.

    UnsupportedError: as CudaTarget.compile.
    """
    nothing = NoDevice(device.integrated, device.multiprocessors)
    program = CudaProgram(nothing, graph, file, options, kernel_source=names_only, stream_masters=stream_masters)
    needed = program.device_bytes + (program.new_weights().nbytes if options.requantize else 0)
    for each in beside:
        made = CudaProgram(
            nothing, each.graph, file, each.options, kernel_source=names_only, beside=program if each.shares else None
        )
        needed += made.device_bytes
        program = made if each.shares else program
    return needed


@dataclass(frozen=True)
class Product:
    """A fused product of a decoded token on a GPU of so many multiprocessors.

    columns   input channels of the weights, of two blocks of them those of the first
    ctas      blocks of threads, those of all shares of the input channels
    blocks    of 16 output channels that each has
    rounds    of its input channels, of all these blocks;  ahead: of these, how many it asks for before it multiplies
    shares    blocks of threads that share the input channels;  normed: a norm is computed before
    """

    name: str
    variant: Variant
    rows: int
    columns: int
    ctas: int
    blocks: int
    rounds: int
    ahead: int
    shares: int
    normed: bool

    def in_flight(self, resident_blocks: int, multiprocessors: int, threads: int) -> int | None:
        """Bytes that a multiprocessor has asked for, a mean.  None: all of the product.

        resident_blocks   blocks that it has room for
        """
        if self.ahead >= self.rounds and self.ctas <= resident_blocks * multiprocessors:
            return None
        return occupancy.bytes_in_flight(
            self.variant, min(resident_blocks, self.ctas / multiprocessors), threads, self.ahead, self.columns
        )


def products(
    graph: Graph, file: ModelFile, options: Options, multiprocessors: int, blocks_held: Callable[[Variant], int]
) -> list[Product]:
    """The different ones of a decoded token, as their launches have them.  UnsupportedError: as CudaTarget.compile.

    blocks_held   blocks of threads of a kernel that a multiprocessor has room for
    """
    device = NoDevice(multiprocessors=multiprocessors, blocks_held=blocks_held)
    program = CudaProgram(device, graph, file, options, kernel_source=names_only)
    found: dict[tuple[object, ...], Product] = {}
    for each in program.launches_of_a_token():
        if not isinstance(each.operation, Linear) or not isinstance(each.arguments, FusedArguments):
            continue
        layer, spread = each.operation.linear, each.arguments.spread
        factors = 2 if each.variant.kernel == "fused_activate" and each.variant.literals[1] else 1
        weight, blocks = layer.weights[0], spread.each * factors
        made = Product(
            layer.name.rpartition(".")[2],
            each.variant,
            layer.rows,
            weight.columns,
            spread.ctas * spread.shares,
            blocks,
            blocks * -(-rounds_of(layer) // spread.shares),
            spread.ahead,
            spread.shares,
            each.arguments.norm.norm != 0,
        )
        found.setdefault((made.variant, made.rows, made.columns), made)
    return list(found.values())


def launches_per_token(graph: Graph, file: ModelFile, options: Options) -> int:
    """Kernels that a decoded token of one text starts.  UnsupportedError: as CudaTarget.compile."""
    return CudaProgram(NoDevice(), graph, file, options, kernel_source=names_only).kernels_per_token


def names_only(wanted: Sequence[Variant], on_kernel: OnKernel) -> list[Generated]:
    return [Generated(variant, variant.symbol, "", (), (1, 1, 1), (1, 1, 1)) for variant in wanted]
