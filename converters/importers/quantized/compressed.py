"""compressed-tensors: what llm-compressor writes and vLLM reads, in integers of 2 to 8 bits.

pack-quantized                    weight_packed int32 [out, words of in], weight_shape [2]
int-quantized, naive-quantized    weight int8 [out, in], a value in each byte whatever its bits
all                               weight_scale [out, groups], [out, 1], [1] or by blocks of rows and columns; where they are
                                  asymmetric weight_zero_point, packed along the outputs or int8 in the shape of the scales

Bytes are signed and packed values are 2**(bits - 1) above the signed ones.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeq.converters.importers.quantized.bit_stream import unpack
from edgeq.converters.importers.quantized.grouped import Grouped
from edgeq.converters.importers.quantized.packed_tensor import (
    SCALES,
    Form,
    PackedWeights,
    Shards,
    as_floats,
    group_order,
    matrix,
    modules,
    part,
)
from edgeq.converters.importers.quantized.settings import QuantizationSettings
from edgeq.converters.importers.safetensors_folder import ShardTensor
from edgeq.errors import CheckpointError, UnsupportedError
from edgeq.format.codec import BITS, AnyArray, ArrayU8

WORD = 32
FORMATS = ("pack-quantized", "int-quantized", "naive-quantized")
MIXED, DENSE = "mixed-precision", "dense"
PRESET = re.compile(r"W(\d)A\d{1,2}(_ASYM)?")
PARTS = (
    *(".weight_packed", ".weight_shape", ".weight_scale", ".weight_zero_point", ".weight_g_idx"),
    *(".input_scale", ".input_zero_point", ".input_global_scale"),
)
CACHE = (".k_scale", ".v_scale", ".q_scale", ".output_scale", ".k_zero_point", ".v_zero_point", ".output_zero_point")
"""Ends of the names of scales of the cache and of outputs."""
MAX_GROUPS = 4096
MAX_SIDE = 1 << 31


@dataclass(frozen=True)
class WeightScheme:
    """What a group of config.json says of its weights.  `block`: rows and columns that share a scale."""

    bits: int
    group_size: int = 0
    block: tuple[int, int] | None = None


def whole_words(words: AnyArray, bits: int, count: int) -> ArrayU8:
    """int32 [lines, words] of floor(32 / bits) values each -> uint8 [lines, count]: as releases before 0.17 packed them."""
    per = WORD // bits
    shifts = (np.arange(per) * bits).astype(np.uint32)
    values = (np.ascontiguousarray(words).view(np.uint32)[:, :, None] >> shifts) & np.uint32((1 << bits) - 1)
    return np.ascontiguousarray(values.reshape(len(words), -1)[:, :count].astype(np.uint8))


@dataclass(frozen=True, eq=False)
class CompressedWeight:
    """A weight of a compressed-tensors folder.

    integers   the tensor with its integers: words of them, or bytes
    dense      a value may lie in two words
    block      rows that share a scale beside the columns that do; 0: all of them
    """

    integers: ShardTensor
    scales: ShardTensor
    zeros: ShardTensor | None
    shape: tuple[int, int]
    bits: int
    group_size: int
    form: Form
    dense: bool = True
    block: int = 1
    order: NDArray[np.int32] | None = None

    def grouped(self, first: int, rows: int) -> Grouped:
        found = self.integers.raw(first, rows, "weight")
        q = _signed(found, self.bits) if self.integers.dtype == "I8" else self._unpacked(found, self.shape[1])
        if self.order is not None:
            q = np.ascontiguousarray(q[:, self.order])
        scale = as_floats(self.scales, self._of_rows(self.scales, first, rows))
        return Grouped(q, self.bits, self.group_size, scale, self.zero_points(first, rows))

    def zero_points(self, first: int, rows: int) -> ArrayU8 | None:
        """uint8 [rows, groups]; None: they are symmetric."""
        if self.zeros is None or self.form == "symmetric":
            return None
        if self.zeros.dtype == "I8":
            return _signed(self._of_rows(self.zeros, first, rows), self.bits)
        words = self.zeros.raw(0, self.zeros.shape[0], "weight_zero_point")
        return np.ascontiguousarray(self._unpacked(np.ascontiguousarray(words.T), self.shape[0]).T[first : first + rows])

    def _unpacked(self, words: AnyArray, count: int) -> ArrayU8:
        return unpack(words, self.bits, count) if self.dense else whole_words(words, self.bits, count)

    def _of_rows(self, tensor: ShardTensor, first: int, rows: int) -> AnyArray:
        """What these rows have of a tensor in the shape of the scales: [rows, groups]."""
        if not self.block:
            return np.repeat(tensor.raw(0, tensor.shape[0] if tensor.shape else 1, "scale").reshape(1, 1), rows, axis=0)
        start, stop = first // self.block, -(-(first + rows) // self.block)
        found = tensor.raw(start, stop - start, "scale")
        return np.repeat(found, self.block, axis=0)[first - start * self.block :][:rows]


def _signed(values: AnyArray, bits: int) -> ArrayU8:
    """int8 of so many bits, as the unsigned integers that are 2**(bits - 1) above.  CheckpointError: one has more bits."""
    unsigned = values.astype(np.int16) + np.int16(1 << (bits - 1))
    if unsigned.size and (unsigned.min() < 0 or unsigned.max() >= 1 << bits):
        raise CheckpointError(
            f"an integer of {bits} bits is {int(values.flat[np.abs(values).argmax()])}; the checkpoint is damaged"
        )
    return unsigned.astype(np.uint8)


def compressed_weights(shards: Shards, settings: QuantizationSettings) -> PackedWeights:
    """The quantized weights of a compressed-tensors folder.

    UnsupportedError: a key or a format that is not supported, by its name.  CheckpointError: tensors that do not fit the
    configuration.
    """
    schemes, notes = _schemes(settings)
    found: dict[str, CompressedWeight] = {}
    for module in modules(shards, ".weight_packed"):
        found[module] = _packed(shards, module, schemes)
    left = {f"{module}{end}" for module in found for end in PARTS}
    for module in modules(shards, ".weight_scale"):
        if module not in found:
            found[module] = _bytes(shards, module, schemes)
            left |= {f"{module}{end}" for end in (*PARTS, ".weight")}
    left |= {name for name in shards if name.endswith(CACHE)}
    return PackedWeights(found, frozenset(left), tuple(notes))


def _schemes(settings: QuantizationSettings) -> tuple[list[WeightScheme], list[str]]:
    """What the groups say of weights, and lines for the user.  UnsupportedError: a key by its name."""
    place = settings.place
    status = settings.text("quantization_status", default="compressed")
    if status != "compressed":
        raise UnsupportedError(
            f"{place}: quantization_status is {status!r}; supported: compressed: save the checkpoint compressed"
        )
    for key in ("sparsity_config", "transform_config"):
        found = settings.object(key)
        if found and not (key == "sparsity_config" and found.get("format") == DENSE):
            raise UnsupportedError(f"{place}: {key} is {str(dict(found))[:80]}; supported: checkpoints without it")
    names = {settings.text("format", default="pack-quantized")}
    groups, schemes, notes = settings.object("config_groups"), [], []
    if len(groups) > MAX_GROUPS:
        raise CheckpointError(f"{place}: {len(groups)} groups; expected at most {MAX_GROUPS}")
    for name, group in groups.items():
        inside = QuantizationSettings(group if isinstance(group, dict) else {}, f"{place}: config_groups: {name[:40]}")
        if "format" in inside.values and inside.values["format"] is not None:
            names.add(inside.text("format"))
        schemes.append(_preset(name, group, inside) if isinstance(group, list) else _scheme(inside))
        if isinstance(group, list) or inside.values.get("input_activations"):
            notes = [
                "the checkpoint is made for quantized inputs of its layers: their scales are left out, its weights are kept, "
                "and inputs are quantized by edgeq's modes (a16, or a8 with --mode a8)"
            ]
        if inside.values.get("output_activations"):
            raise UnsupportedError(f"{inside.place}: output_activations are not supported; supported: null")
    wrong = sorted(names - {*FORMATS, MIXED, DENSE})
    if wrong:
        raise UnsupportedError(
            f"{place}: the format {wrong[0]!r} is not supported; supported: {', '.join(FORMATS)}; ask for one of these, or "
            "convert the original checkpoint"
        )
    if settings.values.get("kv_cache_scheme"):
        notes.append("the checkpoint is made for a quantized cache: its scales are left out; choose --kv when it runs")
    return schemes, notes


def _scheme(group: QuantizationSettings) -> WeightScheme:
    """What a group says of its weights, in words."""
    weights = QuantizationSettings(group.object("weights"), f"{group.place}: weights")
    numbers, bits = weights.text("type", default="int"), weights.integer("num_bits")
    if numbers != "int" or bits not in BITS:
        raise UnsupportedError(f"{weights.place}: {bits} bits of type {numbers!r}; supported: int, 2 to 8 bits")
    block = weights.values.get("block_structure")
    if block is None:
        return WeightScheme(bits, max(0, weights.integer("group_size", default=0)))
    if not isinstance(block, list) or len(block) != 2 or any(type(n) is not int or not 0 < n < MAX_SIDE for n in block):
        raise CheckpointError(f"{weights.place}: block_structure is {str(block)[:80]}; expected two sizes")
    return WeightScheme(bits, 0, (block[0], block[1]))


def _preset(name: str, targets: list[Any], group: QuantizationSettings) -> WeightScheme:
    """A group of which targets alone are given: its name says the rest."""
    found = PRESET.fullmatch(name.upper())
    if name.upper() == "INT8":
        return WeightScheme(8)
    if found is None or int(found[1]) not in BITS:
        raise UnsupportedError(
            f"{group.place}: this preset is not supported; supported: W4A16, W8A8 and others of integers, INT8"
        )
    return WeightScheme(int(found[1]), 128)


def _packed(shards: Shards, module: str, schemes: list[WeightScheme]) -> CompressedWeight:
    packed = matrix(shards, f"{module}.weight_packed", ("I32",))
    sides = part(shards, f"{module}.weight_shape", ("I64", "I32"), (2,)).raw(0, 2, f"{module}.weight_shape").tolist()
    rows, columns = (int(side) for side in sides)
    if rows != packed.shape[0] or not 0 < columns < MAX_SIDE:
        raise CheckpointError(f"tensor {module}.weight_packed has the shape {packed.shape}, and weight_shape is {sides}")
    # Patterns of a stranger say which modules a group is for, and could take for ever: the shape says its bits.
    widths = {
        (bits, dense): -(-columns * bits // WORD) if dense else -(-columns // (WORD // bits))
        for bits in sorted({scheme.bits for scheme in schemes})
        for dense in (True, False)
        if dense or WORD % bits
    }
    fitting = [way for way, width in widths.items() if width == packed.shape[1]]
    if len({bits for bits, _ in fitting}) != 1:
        known = ", ".join(str(bits) for bits in sorted({scheme.bits for scheme in schemes}))
        raise CheckpointError(
            f"tensor {module}.weight_packed has the shape {packed.shape} for {columns} input channels, which "
            f"{'no' if not fitting else 'more than one'} group of config.json fits (bits: {known or 'none'})"
        )
    return _weight(shards, module, packed, (rows, columns), fitting[0], schemes)


def _bytes(shards: Shards, module: str, schemes: list[WeightScheme]) -> CompressedWeight:
    weight = matrix(shards, f"{module}.weight", ("I8",))
    if not schemes:
        raise CheckpointError(f"tensor {module}.weight is of integers, and config.json has no group for it")
    # Where several widths are in the file the widest holds the values of all of them.
    bits = max(scheme.bits for scheme in schemes)
    return _weight(shards, module, weight, (weight.shape[0], weight.shape[1]), (bits, True), schemes)


def _weight(
    shards: Shards,
    module: str,
    integers: ShardTensor,
    shape: tuple[int, int],
    way: tuple[int, bool],
    schemes: list[WeightScheme],
) -> CompressedWeight:
    (rows, columns), (bits, dense) = shape, way
    scales = part(shards, f"{module}.weight_scale", SCALES)
    block, group_size = _groups(module, scales.shape, shape, schemes)
    zeros = shards.get(f"{module}.weight_zero_point")
    groups = scales.shape[1] if len(scales.shape) == 2 else 1
    if zeros is not None:
        words = -(-rows * bits // WORD) if dense else -(-rows // (WORD // bits))
        expected = scales.shape if zeros.dtype != "I32" else (words, groups)
        zeros = part(shards, f"{module}.weight_zero_point", ("I8", "I32"), expected)
    order = group_order(shards, f"{module}.weight_g_idx", columns, group_size)
    found = CompressedWeight(
        *(integers, scales, zeros, shape, bits, group_size),
        form="symmetric" if zeros is None else "zero",
        dense=dense,
        block=block,
        order=order,
    )
    points = found.zero_points(0, rows)
    centered = points is None or bool(np.all(points == 1 << (bits - 1)))
    return (
        found
        if not centered
        else CompressedWeight(
            *(integers, scales, None, shape, bits, group_size), form="symmetric", dense=dense, block=block, order=order
        )
    )


def _groups(module: str, scale_shape: tuple[int, ...], shape: tuple[int, int], schemes: list[WeightScheme]) -> tuple[int, int]:
    """Rows and columns that share a scale: rows 0 where all of them do.  CheckpointError: the scales have another shape."""
    rows, columns = shape
    if scale_shape in ((), (1,)) or (scale_shape == (1, 1) and rows > 1):
        return 0, columns
    if scale_shape == (rows,):
        scale_shape = (rows, 1)
    if len(scale_shape) == 2 and scale_shape[0] == rows and scale_shape[1]:
        groups = scale_shape[1]
        sizes = {scheme.group_size for scheme in schemes if scheme.group_size and -(-columns // scheme.group_size) == groups}
        if groups == 1 or len(sizes) == 1 or columns % groups == 0:
            return 1, columns if groups == 1 else sizes.pop() if len(sizes) == 1 else columns // groups
    for scheme in schemes:
        if scheme.block and scale_shape == (-(-rows // scheme.block[0]), -(-columns // scheme.block[1])):
            return min(scheme.block[0], rows), min(scheme.block[1], columns)
    raise CheckpointError(f"tensor {module}.weight_scale has the shape {scale_shape}, which fits no group of config.json")
