"""AutoAWQ's layouts of four-bit weights: gemm, gemv, and gemv_fast, which is llm-awq's too.

gemm        qweight int32 [in, out/8], qzeros int32 [in/G, out/8], scales [in/G, out]
gemv        qweight int32 [out, in/8], qzeros int32 [out, zw], scales [out, 8 zw]: cut to the groups there are
gemv_fast   qweight int16 [out/4, in], scales and scaled zeros f16 [8 zw, out]

AWQ itself is Lin et al. 2023, arXiv 2306.00978.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from edgeq.converters.importers.quantized.bit_stream import unpack
from edgeq.converters.importers.quantized.grouped import Grouped
from edgeq.converters.importers.quantized.packed_tensor import (
    HALVES,
    Form,
    PackedWeight,
    PackedWeights,
    Shards,
    as_floats,
    matrix,
    modules,
    part,
)
from edgeq.converters.importers.quantized.settings import QuantizationSettings
from edgeq.converters.importers.safetensors_folder import ShardTensor
from edgeq.errors import CheckpointError, UnsupportedError
from edgeq.format.codec import AnyArray, ArrayF32, ArrayU8

BITS = 4
CENTER = 8
PER_WORD = 8
PARTS = (".qweight", ".qzeros", ".scales", ".scaled_zeros")
NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Output channel 8 c + j of the layout gemm lies in this nibble of word c."""
ZERO_TOLERANCE = 0.02
"""How far from an integer the quotient of a scaled zero point, rounded to f16, and its scale may lie."""


def gemm_integers(words: AnyArray) -> ArrayU8:
    """int32 [n, out/8] -> uint8 [n, out]: the layout gemm has its outputs in an order of its own."""
    nibbles = unpack(words, BITS, PER_WORD * words.shape[1]).reshape(len(words), -1, PER_WORD)
    return np.ascontiguousarray(nibbles[:, :, NIBBLES]).reshape(len(words), -1)


def gemv_zero_words(columns: int, group_size: int) -> int:
    """Words of zero points of each output in the layout gemv."""
    multiple = {64: 2, 32: 4}.get(group_size, 1)
    groups = -(-columns // group_size)
    return -(-groups // (PER_WORD * multiple)) * multiple


def fast_integers(words: AnyArray) -> ArrayU8:
    """int16 [rows/4, in] -> uint8 [rows, in]: the layout gemv_fast interleaves four rows and 64 channels."""
    quads, columns = words.shape
    # 64 words are 16 for each of four rows, and every word has four positions of its row.
    positions = unpack(words, BITS, 4 * columns).reshape(quads, columns // 64, 4, 64).transpose(0, 2, 1, 3)
    # Position 8 beta + 4 gamma + alpha of 32 is channel 8 alpha + 2 beta + gamma.
    runs = positions.reshape(quads, 4, columns // 32, 4, 2, 4).transpose(0, 1, 2, 5, 3, 4)
    return np.ascontiguousarray(runs).reshape(4 * quads, columns)


def unscaled_zeros(scaled: ArrayF32, scales: ArrayF32) -> ArrayU8 | None:
    """Zero points of scaled ones, -scale z: uint8; None: they are no integers of four bits, so only offsets keep them."""
    with np.errstate(divide="ignore", invalid="ignore"):
        quotient = np.where(scales == 0, np.where(scaled == 0, 0, np.inf), -scaled / scales)
    nearest = np.round(quotient)
    fits = (np.abs(quotient - nearest) <= ZERO_TOLERANCE) & (nearest >= 0) & (nearest < 1 << BITS)
    return nearest.astype(np.uint8) if fits.all() else None


@dataclass(frozen=True, eq=False)
class GemmWeight:
    """A weight in the layout gemm."""

    qweight: ShardTensor
    scales: ShardTensor
    qzeros: ShardTensor | None
    group_size: int
    form: Form
    bits: ClassVar[int] = BITS
    order: ClassVar[NDArray[np.int32] | None] = None

    @property
    def shape(self) -> tuple[int, int]:
        return PER_WORD * self.qweight.shape[1], self.qweight.shape[0]

    def grouped(self, first: int, rows: int) -> Grouped:
        start, stop = first // PER_WORD, -(-(first + rows) // PER_WORD)
        inside = slice(first - PER_WORD * start, first - PER_WORD * start + rows)

        def integers(tensor: ShardTensor, name: str) -> ArrayU8:
            words = tensor.raw(0, tensor.shape[0], name)[:, start:stop]
            return np.ascontiguousarray(gemm_integers(words)[:, inside].T)

        scale = as_floats(self.scales, self.scales.raw(0, self.scales.shape[0], "scales")[:, first : first + rows])
        zero = None if self.form == "symmetric" or self.qzeros is None else integers(self.qzeros, "qzeros")
        return Grouped(integers(self.qweight, "qweight"), BITS, self.group_size, np.ascontiguousarray(scale.T), zero)


@dataclass(frozen=True, eq=False)
class GemvWeight:
    """A weight in the layout gemv."""

    qweight: ShardTensor
    scales: ShardTensor
    qzeros: ShardTensor
    group_size: int
    form: Form
    bits: ClassVar[int] = BITS
    order: ClassVar[NDArray[np.int32] | None] = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.qweight.shape[0], PER_WORD * self.qweight.shape[1]

    def grouped(self, first: int, rows: int) -> Grouped:
        columns = self.shape[1]
        groups = -(-columns // self.group_size)
        q = unpack(self.qweight.raw(first, rows, "qweight"), BITS, columns)
        scale = as_floats(self.scales, self.scales.raw(first, rows, "scales")[:, :groups])
        zero = None if self.form == "symmetric" else unpack(self.qzeros.raw(first, rows, "qzeros"), BITS, groups)
        return Grouped(q, BITS, self.group_size, scale, zero)


@dataclass(frozen=True, eq=False)
class GemvFastWeight:
    """A weight in the layout gemv_fast.  `form`: "offset" where scaled zero points are those of no integers."""

    qweight: ShardTensor
    scales: ShardTensor
    scaled_zeros: ShardTensor
    group_size: int
    form: Form
    bits: ClassVar[int] = BITS
    order: ClassVar[NDArray[np.int32] | None] = None

    @property
    def shape(self) -> tuple[int, int]:
        return 4 * self.qweight.shape[0], self.qweight.shape[1]

    def grouped(self, first: int, rows: int) -> Grouped:
        groups = -(-self.shape[1] // self.group_size)
        start, stop = first // 4, -(-(first + rows) // 4)
        q = fast_integers(self.qweight.raw(start, stop - start, "qweight"))[first - 4 * start :][:rows]
        scale, scaled = (
            np.ascontiguousarray(as_floats(each, each.raw(0, groups, "scales")[:, first : first + rows]).T)
            for each in (self.scales, self.scaled_zeros)
        )
        if self.form == "offset":
            return Grouped(q, BITS, self.group_size, scale, offset=scaled)
        return Grouped(q, BITS, self.group_size, scale, unscaled_zeros(scaled, scale) if self.form == "zero" else None)


def awq_weights(shards: Shards, settings: QuantizationSettings) -> PackedWeights:
    """The quantized weights of an AutoAWQ folder.

    UnsupportedError: a layout that is not read, by its name.  CheckpointError: tensors that do not fit the configuration.
    """
    version = settings.text("version", "format", "checkpoint_format", default="gemm")
    if settings.text("backend", default="") == "llm-awq":
        version = "gemv_fast"
    if version not in LAYOUTS:
        raise UnsupportedError(
            f"{settings.place}: AWQ's layout {version!r} is not supported; supported: {', '.join(LAYOUTS)}: save the "
            "checkpoint again as gemm"
        )
    bits, group_size = settings.integer("bits", "w_bit", default=BITS), settings.integer("group_size", "q_group_size")
    if bits != BITS or group_size == 0 or group_size < -1:
        raise UnsupportedError(
            f"{settings.place}: {bits} bits in groups of {group_size}; AWQ is supported with 4 bits, in groups"
        )
    found = {module: LAYOUTS[version](shards, module, group_size) for module in modules(shards, ".qweight")}
    return PackedWeights(found, frozenset(f"{module}{end}" for module in found for end in PARTS))


def _gemm(shards: Shards, module: str, group_size: int) -> GemmWeight:
    qweight, scales = matrix(shards, f"{module}.qweight", ("I32",)), matrix(shards, f"{module}.scales", HALVES)
    columns, rows = qweight.shape[0], PER_WORD * qweight.shape[1]
    size = columns if group_size == -1 else min(group_size, columns)
    if scales.shape == (-(-columns * PER_WORD // size), qweight.shape[1]):
        raise CheckpointError(
            f"tensors {module}.qweight {qweight.shape} and scales {scales.shape} lie as GPTQ's, and the configuration says "
            "AWQ; download config.json again"
        )
    groups = -(-columns // size)
    part(shards, f"{module}.scales", HALVES, (groups, rows))
    if f"{module}.qzeros" not in shards:
        return GemmWeight(qweight, scales, None, size, "symmetric")
    qzeros = part(shards, f"{module}.qzeros", ("I32",), (groups, qweight.shape[1]))
    return GemmWeight(qweight, scales, qzeros, size, _form(gemm_integers(qzeros.raw(0, groups, f"{module}.qzeros"))))


def _gemv(shards: Shards, module: str, group_size: int) -> GemvWeight:
    qweight = matrix(shards, f"{module}.qweight", ("I32",))
    rows, columns = qweight.shape[0], PER_WORD * qweight.shape[1]
    size = columns if group_size == -1 else min(group_size, columns)
    words, groups = gemv_zero_words(columns, size), -(-columns // size)
    scales = part(shards, f"{module}.scales", HALVES, (rows, PER_WORD * words))
    qzeros = part(shards, f"{module}.qzeros", ("I32",), (rows, words))
    zeros = unpack(qzeros.raw(0, rows, f"{module}.qzeros"), BITS, groups)
    return GemvWeight(qweight, scales, qzeros, size, _form(zeros))


def _gemv_fast(shards: Shards, module: str, group_size: int) -> GemvFastWeight:
    qweight = matrix(shards, f"{module}.qweight", ("I16",))
    rows, columns = 4 * qweight.shape[0], qweight.shape[1]
    size = columns if group_size == -1 else min(group_size, columns)
    if columns % 64:
        raise CheckpointError(
            f"tensor {module}.qweight has the shape {qweight.shape}; expected a multiple of 64 input channels"
        )
    shape = (PER_WORD * gemv_zero_words(columns, size), rows)
    zeros = f"{module}.scaled_zeros" if f"{module}.scaled_zeros" in shards else f"{module}.qzeros"
    scales, scaled = part(shards, f"{module}.scales", HALVES, shape), part(shards, zeros, HALVES, shape)
    groups = -(-columns // size)
    found = unscaled_zeros(*(as_floats(each, each.raw(0, groups, zeros)) for each in (scaled, scales)))
    return GemvFastWeight(qweight, scales, scaled, size, "offset" if found is None else _form(found))


def _form(zeros: ArrayU8) -> Form:
    return "symmetric" if np.all(zeros == CENTER) else "zero"


LAYOUTS: dict[str, Callable[[Shards, str, int], PackedWeight]] = {"gemm": _gemm, "gemv": _gemv, "gemv_fast": _gemv_fast}
"""How weights lie, as configurations spell it -> what reads the tensors of a module."""
