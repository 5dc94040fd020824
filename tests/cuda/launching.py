"""Single kernels over arrays, and the arrays of a product."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from edgeq.format.codec import Codec
from edgeq.format.quantization import activation_block
from edgeq.targets.cuda.device.device import upload
from edgeq.targets.cuda.lowering.linear import PARAMETERS, beside
from edgeq.targets.cuda.supply.pack import Generated, Variant
from tests.cuda.emulated import FORWARD, EmulatedDevice
from tests.targets import cases

Arrays = dict[str, np.ndarray]
GROUPS = (16, 32, 64, 128)


def in_half(bits: int, zero: bool, integer: bool, group: int) -> bool:
    """Whether a product of integers is in the half of all which is compiled and launched.

    Each combination of any three of the four arguments is in it: what goes wrong in a kernel for all but one of them is seen.
    """
    return (bits + zero + integer + GROUPS.index(group or GROUPS[-1])) % 2 == 1


def launched(generated: Generated, arrays: Arrays, scalars: dict[str, int | float], order: int = FORWARD) -> Arrays:
    """The arrays after one launch of a kernel; those that it does not write come back as they were."""
    # To optimize a kernel takes longer than a launch or two of it gain.
    device = EmulatedDevice(order, level="-O0")
    loaded = device.load([generated])[generated.variant]
    memory = {name: upload(device, array) for name, array in arrays.items()}
    device.launch(loaded, *generated.bind({**scalars, **{name: m.address for name, m in memory.items()}}))
    device.synchronize()
    result = {name: np.empty_like(array) for name, array in arrays.items()}
    for name, array in result.items():
        device.read(memory[name].address, array)
    return result


@dataclass(frozen=True)
class Product:
    """A weight matrix and the variants of the kernels for it.

    matrix   the weights as float32
    """

    codec: Codec
    integer: bool
    matrix: np.ndarray
    arrays: Arrays

    @property
    def group(self) -> int:
        return activation_block(self.codec)

    def variant(self, kernel: str) -> Variant:
        if kernel == "quantize_input":
            return Variant("quantize_input", (self.integer, self.group))
        return Variant(kernel, (self.codec.bits, beside(self.codec), self.integer, self.group))

    def quantized(self, quantize_input: Generated, x: np.ndarray, limit: int, order: int = FORWARD) -> Arrays:
        """What the product reads: data, scales and sums of x f32 [tokens, columns]."""
        tokens, columns = x.shape
        padded, groups = -(-tokens // 64) * 64, -(-columns // self.group)
        channels = -(-columns // 128) * 128
        room = {
            "data": np.zeros(channels * padded * (1 if self.integer else 2) // 4, np.uint32),
            "xs": np.full(groups * padded, np.nan, np.float32),
            "xn": np.full(groups * padded, -1, np.int32),
        }
        scalars = {"tokens": tokens, "columns": columns, "width": columns, "padded": padded, "groups": groups, "limit": limit}
        return launched(quantize_input, {"x": x, **room}, scalars, order)

    def product(
        self, kernel: Generated, quantized: Arrays, tokens: int, y: np.ndarray, bias: np.ndarray | None, order: int = FORWARD
    ) -> np.ndarray:
        """W x, plus `bias`, added to y f32 [tokens, output channels] where y is not NaN."""
        rows, columns = self.matrix.shape
        groups = -(-columns // self.group)
        scalars = {
            "tokens": tokens, "rows": rows, "width": rows, "groups": groups, "padded": len(quantized["xs"]) // groups,
            "chunks": -(-columns // 32), "stride": 1 if self.codec.group_size else 0,
            "add": int(not np.isnan(y).any()), "has_bias": int(bias is not None),
        }  # fmt: skip
        arrays = {**self.arrays, "x": quantized["data"], "xs": quantized["xs"], "xn": quantized["xn"], "y": y}
        arrays["bias"] = np.zeros(1, np.float32) if bias is None else bias
        return launched(kernel, arrays, scalars, order)["y"]


def product_of(codec: Codec, integer: bool, rows: int, columns: int, values: str = "random", seed: int = 0) -> Product:
    """A random matrix [rows, columns] of the kind of values that tests/targets/cases.py has."""
    stored = cases.Arrays()
    weight = cases.weight(stored, np.random.default_rng(seed), codec, rows, columns, values)
    arrays = dict.fromkeys(PARAMETERS.values(), np.zeros(1, np.uint8))
    arrays |= {PARAMETERS[name]: stored.array(ref) for name, ref in weight.arrays.items()}
    return Product(codec, integer, cases.matrix(stored, weight), arrays)
