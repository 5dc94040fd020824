"""MLX's affine layout, as mlx-lm saves it: w = scales * q + biases, both floats of each group, scales of any sign.

weight            uint32 [out, words of in], the integers of a row as one little-endian stream of bits
scales, biases    [out, in/G];  the bias of the layer is called bias

Learned biases (DWQ) are no multiples of their scales, and those of the plain quantizer only up to a rounding: they are kept as
offsets, not turned into zero points.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from edgeq.converters.importers.quantized.bit_stream import unpack
from edgeq.converters.importers.quantized.grouped import Grouped
from edgeq.converters.importers.quantized.packed_tensor import (
    HALVES,
    Form,
    PackedWeights,
    Shards,
    as_floats,
    matrix,
    modules,
    part,
)
from edgeq.converters.importers.quantized.settings import MAX_SHOWN, QuantizationSettings
from edgeq.converters.importers.safetensors_folder import ShardTensor
from edgeq.errors import CheckpointError, UnsupportedError

MODE = "affine"
BITS = (2, 3, 4, 5, 6, 8)
GROUPS = (32, 64, 128)
WORD = 32
PARTS = (".weight", ".scales", ".biases")


@dataclass(frozen=True, eq=False)
class MlxWeight:
    """A weight in MLX's affine layout."""

    words: ShardTensor
    scales: ShardTensor
    biases: ShardTensor
    bits: int
    group_size: int
    form: ClassVar[Form] = "offset"
    order: ClassVar[NDArray[np.int32] | None] = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.words.shape[0], self.words.shape[1] * WORD // self.bits

    def grouped(self, first: int, rows: int) -> Grouped:
        q = unpack(self.words.raw(first, rows, "weight"), self.bits, self.shape[1])
        scale = as_floats(self.scales, self.scales.raw(first, rows, "scales"))
        offset = as_floats(self.biases, self.biases.raw(first, rows, "biases"))
        return Grouped(q, self.bits, self.group_size, scale, offset=offset)


def mlx_weights(shards: Shards, settings: QuantizationSettings) -> PackedWeights:
    """The quantized weights of an MLX folder.

    UnsupportedError: a mode or a width that is not read, by its name.  CheckpointError: tensors that do not fit the
    configuration.
    """
    scheme = _scheme(settings)
    found: dict[str, MlxWeight] = {}
    for module in modules(shards, ".scales"):
        own = settings.values.get(module, True)
        if own is False:
            raise CheckpointError(
                f"tensor {module}.scales is there, and {settings.place} says that {module} is not quantized; download "
                "config.json again"
            )
        found[module] = _weight(shards, module, scheme if own is True else _scheme(_own(settings, module, own)))
    for module, own in settings.values.items():
        if isinstance(own, Mapping) and module not in found and f"{module}.weight" in shards:
            raise CheckpointError(
                f"tensor {module}.scales is missing, and {settings.place} says how {module[:MAX_SHOWN]} is quantized; the "
                "checkpoint is incomplete"
            )
    return PackedWeights(found, frozenset(f"{module}{end}" for module in found for end in PARTS))


def _own(settings: QuantizationSettings, module: str, own: Any) -> QuantizationSettings:
    """What the configuration says of one module alone.  MLX takes no key of it from the others, so it must have them all."""
    if not isinstance(own, dict):
        raise CheckpointError(f"{settings.place}: {module} is {str(own)[:MAX_SHOWN]!r}; expected an object, true or false")
    return QuantizationSettings(own, f"{settings.place}: {module}")


def _scheme(settings: QuantizationSettings) -> tuple[int, int]:
    """Bits and group size.  UnsupportedError: of another mode, or none of MLX's."""
    mode = settings.text("mode", default=MODE)
    if mode != MODE:
        raise UnsupportedError(
            f"{settings.place}: MLX's mode {mode[:MAX_SHOWN]!r} is not supported; supported: {MODE}: ask for a checkpoint "
            "quantized in it, or convert the original one"
        )
    bits, group_size = settings.integer("bits"), settings.integer("group_size")
    if bits not in BITS or group_size not in GROUPS:
        raise UnsupportedError(
            f"{settings.place}: {bits} bits in groups of {group_size}; MLX is supported with {', '.join(map(str, BITS))} bits "
            f"in groups of {', '.join(map(str, GROUPS))}"
        )
    return bits, group_size


def _weight(shards: Shards, module: str, scheme: tuple[int, int]) -> MlxWeight:
    bits, group_size = scheme
    stacked = part(shards, f"{module}.weight", ("U32",))
    if len(stacked.shape) == 3:
        raise UnsupportedError(
            f"tensor {module}.weight has the shape {stacked.shape}: MLX stacks the experts of a layer into one tensor; "
            "supported: matrices: convert the original checkpoint"
        )
    words = matrix(shards, f"{module}.weight", ("U32",))
    columns = words.shape[1] * WORD // bits
    if words.shape[1] * WORD % bits or columns % group_size:
        raise CheckpointError(
            f"tensor {module}.weight has the shape {words.shape}, which is none of {bits} bits in groups of {group_size}; "
            "download config.json again"
        )
    shape = (words.shape[0], columns // group_size)
    scales, biases = (part(shards, f"{module}.{end}", HALVES, shape) for end in ("scales", "biases"))
    return MlxWeight(words, scales, biases, bits, group_size)
