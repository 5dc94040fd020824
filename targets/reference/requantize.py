"""Test-time requantization in numpy: sums over inputs, masters rounded again, layers that run with the result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from edgeq.format.container import ModelFile
from edgeq.format.quantization import ROUNDINGS
from edgeq.format.records import LinearSpec
from edgeq.targets.reference.matrices import Matrices
from edgeq.targets.requantization import HostWeights, InputSums, SharedInput, input_indices, requantized_arrays
from edgeq.targets.rows import Rows

ArrayF32 = NDArray[np.float32]


class ReferenceWeights(HostWeights):
    """Requantized weights, and their matrices as float32.

    indices   layer name -> index of its shared input
    """

    def __init__(self, inputs: Sequence[SharedInput]) -> None:
        arrays = {ref: np.zeros(shape, dtype) for ref, (dtype, shape) in requantized_arrays(inputs).items()}
        super().__init__(arrays, [np.ones(each.columns, np.float32) for each in inputs])
        self.indices = input_indices(inputs)
        self.matrices = Matrices(self)


def requantize(file: ModelFile, inputs: Sequence[SharedInput], weights: ReferenceWeights, scales: Sequence[ArrayF32]) -> None:
    """Fill `weights` for the scales s float32 [columns] of every input: W diag(s) rounded, and 1/s."""
    masters = Matrices(file)
    for i, (each, scale) in enumerate(zip(inputs, scales, strict=True)):
        weights.input_scales[i][:] = np.float32(1) / scale
        for layer in each.layers:
            assert layer.master
            weight = layer.weights[0]
            whole = np.concatenate(list(masters.blocks(layer.master)))
            masters.kept.clear()
            made = ROUNDINGS[weight.codec.kind](whole * scale, weight.codec)
            for name, ref in weight.arrays.items():
                weights.arrays[ref][...] = made[name]
            for ref in layer.master.arrays.values():
                file.release(ref)
    weights.matrices = Matrices(weights)


def add_squares(sums: InputSums, layer: LinearSpec, x: ArrayF32, rows: Rows) -> None:
    """Once per shared input: for the first of the layers that read it."""
    for each in sums.inputs:
        if each.layers[0].name == layer.name:
            total = sums.values[each.offset : each.offset + each.columns]
            for r in range(len(x)):
                if rows.counted is None or rows.counted[r]:
                    total += x[r] * x[r]


def with_master(sums: InputSums, layer: LinearSpec) -> LinearSpec:
    """The layer with its master for its weight, where its input is one of those that sums are taken of."""
    if layer.master and any(each.name == layer.name for shared in sums.inputs for each in shared.layers):
        return replace(layer, weights=(layer.master,))
    return layer
