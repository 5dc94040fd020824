"""Requantized weights of a session: their memory on the device, and the rounding that fills them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import count

import numpy as np
from numpy.typing import NDArray

from edgeq.format.codec import CHUNK
from edgeq.format.records import ArrayRef, LinearSpec
from edgeq.targets.cuda.arguments.products import RequantizeArguments
from edgeq.targets.cuda.device.device import Device, Kernel, Memory
from edgeq.targets.cuda.lowering.context import refuse
from edgeq.targets.cuda.lowering.linear import launches_of
from edgeq.targets.cuda.run.storage import Storage
from edgeq.targets.cuda.supply.pack import Variant
from edgeq.targets.requantization import SharedInput, master_arrays, requantized_arrays

_NUMBERS = count(1)


class CudaWeights:
    """Requantized weights on the device, freed when the object is dropped.

    number   no others have or had it: what was recorded with the addresses of weights that are gone must not run again
    """

    def __init__(self, device: Device, inputs: Sequence[SharedInput]) -> None:
        self.number = next(_NUMBERS)
        self._memory: dict[object, Memory] = {}
        sizes: dict[object, int] = {
            ref: math.prod(shape) * np.dtype(dtype).itemsize for ref, (dtype, shape) in requantized_arrays(inputs).items()
        }
        sizes |= {("factors", index): 4 * each.columns for index, each in enumerate(inputs)}
        for key, nbytes in sizes.items():
            self._memory[key] = device.allocate(nbytes)
            device.zero(self._memory[key].address, nbytes)

    @property
    def nbytes(self) -> int:
        return sum(memory.nbytes for memory in self._memory.values())

    def address(self, key: ArrayRef | tuple[str, int]) -> int:
        """Address of the array that replaces one of the file, or of 1 / s of a shared input."""
        return self._memory[key].address


def variant_of(layer: LinearSpec) -> Variant:
    """The kernel that rounds the master of a layer to the codec of its weights."""
    assert layer.master
    master, codec = layer.master.codec, layer.weights[0].codec
    rounding = launches_of(codec).requantize
    if rounding is None:
        refuse(f"a rounding of masters to the codec {codec.name}")
    return rounding(master, codec)


class CudaRequantizer:
    """Rounds masters."""

    def __init__(self, device: Device, storage: Storage, inputs: Sequence[SharedInput]) -> None:
        self._device, self._storage, self._inputs = device, storage, inputs
        self._factors = storage.named("factors", max((each.columns for each in inputs), default=1) * 4)

    @property
    def variants(self) -> list[Variant]:
        return [variant_of(layer) for each in self._inputs for layer in each.layers]

    def fill(self, kernels: Mapping[Variant, Kernel], weights: CudaWeights, scales: Sequence[NDArray[np.float32]]) -> None:
        """Round every master times the scales of its input, and keep 1 / s for the input itself."""
        for index, (each, scale) in enumerate(zip(self._inputs, scales, strict=True)):
            s = np.ascontiguousarray(scale, np.float32)
            self._device.write(weights.address(("factors", index)), np.float32(1) / s)
            self._device.write(self._factors, s)
            for layer in each.layers:
                kernel, master = kernels[variant_of(layer)], master_arrays(layer)
                if self._storage.streams(master):
                    self._storage.bring(master)
                self._device.launch(kernel, *kernel.generated.bind(self._arguments(layer, weights).by_name))
        self._device.synchronize()

    def _arguments(self, layer: LinearSpec, weights: CudaWeights) -> RequantizeArguments:
        assert layer.master
        master, weight, array = layer.master, layer.weights[0], self._storage.array
        group = weight.codec.group_size or weight.columns
        return RequantizeArguments(
            master=array(master.arrays["q"]),
            scales=array(master.arrays["scale"]) if "scale" in master.arrays else 0,
            zeros=array(master.arrays["zero"]) if "zero" in master.arrays else 0,
            factors=self._factors,
            q=weights.address(weight.arrays["q"]),
            qs=weights.address(weight.arrays["scale"]),
            qz=weights.address(weight.arrays["zero"]) if "zero" in weight.arrays else 0,
            rows=weight.rows,
            columns=weight.columns,
            master_group=master.codec.group_size or master.columns,
            group=group,
            span=-(-max(group, CHUNK) // CHUNK) * CHUNK,
        )
