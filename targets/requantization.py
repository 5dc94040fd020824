"""Test-time requantization: activation statistics and per-session requantized weights.

Layers with a `master` take part.  A target sums the squares of what they read, and rounds their masters again for given input
scales; which scales follow from the sums is decided in `runtime/session/requantize.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from edgeq.errors import UnsupportedError
from edgeq.format.codec import ROWS, AnyArray
from edgeq.format.quantization import ROUNDINGS
from edgeq.format.records import ArrayRef, LinearSpec
from edgeq.targets.graph import Graph, Linear, Select

WeightSource = Literal["file", "masters", "requantized"]
"""Which weights a lowered graph reads: the file's, their masters while a prompt is summed, or those rounded again for it."""


@dataclass(frozen=True)
class SharedInput:
    """An input of `columns` channels and the layers with a master that read it, in the order of the graph.

    Its sums begin at `offset` of `InputSums.values`, a multiple of 16.
    """

    layers: tuple[LinearSpec, ...]
    columns: int
    offset: int


def shared_inputs(graph: Graph) -> tuple[SharedInput, ...]:
    """The inputs of all layers with a master before the selection of rows; experts are not among them.

    UnsupportedError: such a layer has parts that change its input.
    """
    readers: list[list[LinearSpec]] = []
    open_buffers: dict[str, list[LinearSpec]] = {}
    for operation in graph.operations:
        if isinstance(operation, Select):
            # After it few rows are left, not those of a prompt.
            break
        if isinstance(operation, Linear) and operation.linear.master:
            layer = operation.linear
            if layer.input_order or layer.transform or layer.input_scale or layer.activation:
                raise UnsupportedError(
                    f"{layer.name}: a master beside input_order, transform, input_scale or activation is not supported; "
                    "run with `requantization=never`"
                )
            if operation.x not in open_buffers:
                open_buffers[operation.x] = []
                readers.append(open_buffers[operation.x])
            open_buffers[operation.x].append(layer)
        for name in operation.writes():
            open_buffers.pop(name, None)
    inputs, offset = [], 0
    for layers in readers:
        inputs.append(SharedInput(tuple(layers), layers[0].columns, offset))
        offset += -(-layers[0].columns // ROWS) * ROWS
    return tuple(inputs)


def input_indices(inputs: Iterable[SharedInput]) -> dict[str, int]:
    """Layer name -> index of the shared input that it reads, for every layer with a master."""
    return {layer.name: index for index, each in enumerate(inputs) for layer in each.layers}


def master_arrays(layer: LinearSpec) -> tuple[ArrayRef, ...]:
    assert layer.master
    return tuple(layer.master.arrays.values())


@dataclass
class InputSums:
    """Sums over tokens of the squares of what layers read, per channel; float32, added in the order of the tokens.

    values   float32: the sums of every input, from its offset
    tokens   how many were added
    """

    inputs: tuple[SharedInput, ...]
    values: NDArray[np.float32] = field(init=False)
    tokens: int = 0

    def __post_init__(self) -> None:
        last = self.inputs[-1] if self.inputs else None
        self.values = np.zeros(last.offset + -(-last.columns // ROWS) * ROWS if last else 0, np.float32)

    def squares(self) -> list[NDArray[np.float32]]:
        """Per input, [columns]: views."""
        return [self.values[i.offset : i.offset + i.columns] for i in self.inputs]

    def reset(self) -> None:
        """Discard the statistics."""
        self.values[:] = 0
        self.tokens = 0

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Roll the sums back if the block raises: tokens of an interrupted run will be read again."""
        values, tokens = self.values.copy(), self.tokens
        try:
            yield
        except BaseException:
            self.values[:], self.tokens = values, tokens
            raise


class Weights(Protocol):
    """The requantized weights of all layers with a master; the memory belongs to whoever holds them."""

    @property
    def nbytes(self) -> int: ...


class HostWeights:
    """Requantized weights in host memory.

    arrays         by the record of the file's array that each replaces
    input_scales   per shared input f32 [columns], what its layers multiply their input by
    """

    def __init__(self, arrays: dict[ArrayRef, AnyArray], input_scales: list[NDArray[np.float32]]) -> None:
        self.arrays, self.input_scales = arrays, input_scales

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in (*self.arrays.values(), *self.input_scales))

    def array(self, ref: ArrayRef) -> AnyArray:
        return self.arrays[ref]


def requantized_arrays(inputs: Iterable[SharedInput]) -> dict[ArrayRef, tuple[str, tuple[int, ...]]]:
    """The arrays of requantized weights: numpy dtype and shape by the record of the array that each replaces.

    UnsupportedError: a layer's own weights are floats, which nothing is rounded to.
    """
    found = {}
    for layer in (layer for each in inputs for layer in each.layers):
        weight = layer.weights[0]
        if weight.codec.kind not in ROUNDINGS:
            raise UnsupportedError(
                f"{layer.name}: weights in {weight.codec.name} cannot be requantized; run with `requantization=never`"
            )
        for name, part in weight.codec.parts(weight.rows, weight.columns).items():
            found[weight.arrays[name]] = part.dtype, part.shape
    return found
