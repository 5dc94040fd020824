"""The kernels of a program, loaded when a lowering first asks for them, and launches of them with their numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from edgeq.targets.cuda.arguments.heads import AttendArguments
from edgeq.targets.cuda.arguments.record import Value
from edgeq.targets.cuda.device.device import Call, Device, Kernel
from edgeq.targets.cuda.lowering.attention import head_blocks, side_by_side
from edgeq.targets.cuda.lowering.context import Launch, Lowered, Routed
from edgeq.targets.cuda.lowering.largest import Chosen
from edgeq.targets.cuda.run.requantized import CudaWeights
from edgeq.targets.cuda.supply.pack import POINTER, Expression, Generated, Variant
from edgeq.targets.cuda.supply.supply import KernelSource
from edgeq.targets.graph import Attention
from edgeq.targets.target import OnProgress


class Reach(NamedTuple):
    """What a run takes beside its rows: how many times PART positions the longest context has, where parts of it may be taken
    side by side, and sessions."""

    parts: int = 0
    sessions: int = 0


NOTHING_ELSE = Reach()


class ProgramKernels:
    """loaded   by variant"""

    def __init__(self, device: Device, source: KernelSource, pool: int) -> None:
        """pool   the address from which page tables count"""
        self.loaded: dict[Variant, Kernel] = {}
        self._device, self._source, self._pool = device, source, pool
        self._held: dict[Variant, int] = {}

    def load(self, variants: Iterable[Variant], on_progress: OnProgress) -> None:
        """UnsupportedError: one is missing, or the device does not take it."""
        missing = [variant for variant in dict.fromkeys(variants) if variant not in self.loaded]
        generated = self._source(missing, lambda done, label: on_progress(done, len(missing), f"kernel {label}"))
        self.loaded.update(self._device.load(generated))

    def blocks_held(self, variant: Variant) -> int:
        """Blocks of threads of a kernel that a multiprocessor holds at once."""
        if variant not in self._held:
            self._held[variant] = self._device.blocks_held(self.loaded[variant])
        return self._held[variant]

    def check(self, lowered: Iterable[Lowered]) -> None:
        """ValueError: a launch does not have a number that its kernel asks for, which would be found out when it runs."""
        for launch in _launches(lowered):
            for variant in launch.variants:
                missing = sorted(asked(self.loaded[variant].generated) - launch.arguments.by_name.keys() - launch.arguments.run)
                if missing:
                    raise ValueError(f"the launch of {variant.symbol} has no {', '.join(missing)}")

    def call(
        self, launch: Launch, tokens: int, weights: CudaWeights | None, reach: Reach = NOTHING_ELSE,
        moved: Mapping[int, int] | None = None,
    ) -> Call:  # fmt: skip
        """A launch over `tokens` rows; moved: addresses to be used in place of others."""
        kernel = self.loaded[launch.matmul if launch.matmul and tokens > launch.few_rows else launch.variant]
        scalars = {**launch.arguments.by_name, "tokens": tokens * launch.rows_per_token, "sessions": reach.sessions}
        scalars["pool"] = scalars["numbers"] = self._pool
        if isinstance(made := launch.arguments, AttendArguments):
            blocks = head_blocks(made.heads, made.cache.kv_heads)
            places = self._device.multiprocessors * self.blocks_held(launch.variant)
            # The operation's: where its rows have ranges, the kernel is told what they see of the window.
            assert isinstance(launch.operation, Attention)
            window = launch.operation.window
            scalars["parts"], scalars["taken"] = side_by_side(tokens, reach.parts, blocks, places, window)
        scalars |= {name: weights.address(ref) for name, ref in launch.moved.items()} if weights else {}
        return _bound(kernel, scalars, moved)

    def choosing(self, chosen: Chosen, rows: int, moved: Mapping[int, int] | None = None) -> list[Call]:
        """The launches that find the largest numbers of so many rows of the result; moved: as of `call`."""
        kernels = [(self.loaded[variant], arguments.by_name) for variant, arguments in chosen.launches]
        return [_bound(kernel, {**by_name, "tokens": rows}, moved) for kernel, by_name in kernels]


def _bound(kernel: Kernel, scalars: Mapping[str, Value], moved: Mapping[int, int] | None) -> Call:
    if moved:
        pointers = {str(p.value) for p in kernel.generated.parameters if p.type == POINTER}
        scalars = {name: moved.get(int(at), at) if name in pointers else at for name, at in scalars.items()}
    return Call(kernel, *kernel.generated.bind(scalars))


def asked(generated: Generated) -> set[str]:
    """The numbers and addresses, by name, that a kernel and its launch need."""
    expressions = (*generated.grid, *generated.block, *(parameter.value for parameter in generated.parameters))
    return {name for expression in expressions for name in _names(expression)}


def _names(expression: Expression) -> Iterator[str]:
    if isinstance(expression, str):
        yield expression
    elif isinstance(expression, list):
        for operand in expression[1:]:
            yield from _names(operand)


def _launches(lowered: Iterable[Lowered]) -> Iterator[Launch]:
    for each in lowered:
        if isinstance(each, Launch):
            yield each
        elif isinstance(each, Routed):
            yield from (launch for expert in each.launches for launch in expert)
            yield each.combine
