"""GPTQ checkpoints' integers and zero points, as AutoGPTQ, GPTQModel, optimum and AutoRound write them.

qweight   [in * bits / width, out], packed along the inputs;  qzeros: [groups, out * bits / width], along the outputs
scales    [groups, out];  g_idx: int32 [in], the group of each channel

The method is Frantar et al. 2022, arXiv 2210.17323.  What the words of zero points mean depends on who wrote them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

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
from edgeq.format.codec import PLANES, AnyArray, ArrayU8

WRONG_ONES = np.array([0x24924924, 0x92492492, 0x49249249], np.uint32)
"""What GPTQModel before 7.0 took from words of three-bit zero points instead of one from each field."""
WRONG_SYMMETRIC = np.array([0x00000000, 0xB6DB6DB7, 0x49249249], np.uint32)
"""What it left where all zero points are four."""
PER_WORD = 8
"""Values of four bits in a word: AWQ's outputs in one."""
PLANAR_RUN = 32
"""Values in a run of the planar layout."""


def integers(words: AnyArray, bits: int, count: int, planar: bool = False) -> ArrayU8:
    """[words, lines], packed along the first dimension -> uint8 [lines, count].

    planar   every run of 32 values lies in planes, low bits first; otherwise all values in one stream
    """
    lines = np.ascontiguousarray(words.T)
    if not planar:
        return unpack(lines, bits, count)
    runs = lines.reshape(len(lines), -1, bits)
    found = np.zeros((*runs.shape[:2], PLANAR_RUN), np.uint8)
    low = 0
    for plane in PLANES[bits]:
        found |= unpack(runs[:, :, low : low + plane], plane, PLANAR_RUN) << np.uint8(low)
        low += plane
    return np.ascontiguousarray(found.reshape(len(lines), -1)[:, :count])


@dataclass(frozen=True)
class ZeroRule:
    """How the words of zero points are read.

    bits        of a zero point
    version     1: one less than the zero point is stored; 2: the zero point
    symmetric   the configuration says that all are 2**(bits - 1)
    writer      version of GPTQModel that wrote them; (): another program, or not known
    planar      in planes, as the weights
    """

    bits: int
    version: int = 1
    symmetric: bool = True
    writer: tuple[int, ...] = ()
    planar: bool = False

    def zeros(self, words: AnyArray) -> ArrayU8:
        """Words [groups, words of out] -> uint8 [groups, out]."""
        bits, center = self.bits, 1 << (self.bits - 1)
        count = words.shape[1] * 8 * words.dtype.itemsize // bits
        fields = integers(words.T, bits, count, self.planar)
        if self.symmetric and (np.all(fields == center - 1) and self.version == 1 or np.all(fields == center)):
            # Files exist that hold zero points of version 2 under the name of version 1.
            return np.full_like(fields, center)
        if self.version == 2 or self.planar:
            return fields
        if bits == 3 and ((self.writer and self.writer < (7,)) or _repeats(words, WRONG_SYMMETRIC)):
            return unpack(words.view(np.uint32) + np.resize(WRONG_ONES, words.shape[1]), bits, count)
        if 8 % bits == 0 and self.writer >= (0, 9):
            # It took one from every field of the whole word at once, with borrows between them.
            ones = sum(1 << at for at in range(0, 8 * words.dtype.itemsize, bits))
            unsigned = np.ascontiguousarray(words).view(f"<u{words.dtype.itemsize}")
            return unpack(unsigned + unsigned.dtype.type(ones), bits, count)
        return (fields + np.uint8(1)) & np.uint8((1 << bits) - 1)

    def lost(self, words: AnyArray) -> int:
        """Zero points that the writer may have overwritten: fields above a zero that wrapped around to all ones."""
        if self.symmetric or self.version == 2 or self.writer or self.planar or 32 % self.bits:
            return 0
        fields = unpack(words, self.bits, words.shape[1] * 8 * words.dtype.itemsize // self.bits)
        top = fields.reshape(len(words), words.shape[1], -1)
        ones = top == (1 << self.bits) - 1
        return int(ones[ones[:, :, -1]].sum())


def _repeats(words: AnyArray, pattern: AnyArray) -> bool:
    return words.size > 0 and bool(np.all(words.view(np.uint32) == np.resize(pattern, words.shape[1])))


@dataclass(frozen=True, eq=False)
class GptqWeight:
    """A weight of a GPTQ checkpoint; `order`: of act-order, groups lie one after another in it."""

    qweight: ShardTensor
    scales: ShardTensor
    qzeros: ShardTensor
    bits: int
    columns: int
    group_size: int
    form: Form
    rule: ZeroRule
    order: NDArray[np.int32] | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.qweight.shape[1], self.columns

    def grouped(self, first: int, rows: int) -> Grouped:
        chosen = slice(first, first + rows)
        words = self.qweight.raw(0, self.qweight.shape[0], "qweight")[:, chosen]
        q = integers(words, self.bits, self.columns, self.rule.planar)
        if self.order is not None:
            q = np.ascontiguousarray(q[:, self.order])
        groups = self.scales.shape[0]
        scale = np.ascontiguousarray(as_floats(self.scales, self.scales.raw(0, groups, "scales")[:, chosen]).T)
        if self.form == "symmetric":
            return Grouped(q, self.bits, self.group_size, scale)
        zero = self.rule.zeros(self.qzeros.raw(0, groups, "qzeros"))[:, chosen]
        return Grouped(q, self.bits, self.group_size, scale, np.ascontiguousarray(zero.T))


LAYOUTS_OF_WORDS = {"gptq": 1, "gptq_v2": 2, "gptq_p": 2}
"""Layouts as configurations spell them -> the version of their zero points."""
PARTS = (".qweight", ".qzeros", ".scales", ".g_idx")
WORDS = {"int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64"}
WIDTHS = {"I8": 8, "I16": 16, "I32": 32, "I64": 64}


def gptq_weights(shards: Shards, settings: QuantizationSettings) -> PackedWeights:
    """The quantized weights of a GPTQ folder.

    UnsupportedError: a layout that is not read, by its name.  CheckpointError: tensors that do not fit the configuration.
    """
    layout = settings.text("checkpoint_format", "format", default="gptq")
    if settings.flag("is_marlin_format", default=False):
        layout = "marlin"
    if layout not in LAYOUTS_OF_WORDS:
        raise UnsupportedError(
            f"{settings.place}: GPTQ's layout {layout!r} is not supported; supported: {', '.join(LAYOUTS_OF_WORDS)}: ask for a "
            "checkpoint in one of these"
        )
    for key in ("rotation", "adapter"):
        if settings.values.get(key):
            raise UnsupportedError(
                f"{settings.place}: {key} is {str(settings.values[key])[:80]!r}: it changes what the weights mean when the "
                "model runs; supported: checkpoints without it"
            )
    words = settings.text("pack_dtype", default="int32").removeprefix("torch.")
    if words not in WORDS:
        raise UnsupportedError(f"{settings.place}: pack_dtype is {words!r}; supported: {', '.join(WORDS)}")
    found: dict[str, GptqWeight] = {}
    lost = 0
    for module in modules(shards, ".qweight"):
        weight = _weight(shards, module, settings, layout, WORDS[words])
        lost += weight.rule.lost(weight.qzeros.raw(0, weight.qzeros.shape[0], "qzeros"))
        found[module] = weight
    note = (
        f"{lost} zero points lie above one that wrapped around to all ones: their writer may have overwritten them; they are "
        "read as other programs read them"
    )
    return PackedWeights(found, frozenset(f"{each}{end}" for each in found for end in PARTS), (note,) if lost else ())


def _weight(shards: Shards, module: str, settings: QuantizationSettings, layout: str, words: str) -> GptqWeight:
    qweight = matrix(shards, f"{module}.qweight", (words,))
    scales = matrix(shards, f"{module}.scales", SCALES)
    rows, width = qweight.shape[1], WIDTHS[words]
    if scales.shape[1] == PER_WORD * rows and settings.integer("bits") == 4:
        raise CheckpointError(
            f"tensors {module}.qweight {qweight.shape} and scales {scales.shape} lie as AWQ's, and the configuration says "
            "GPTQ; download config.json again"
        )
    groups = scales.shape[0]
    part(shards, f"{module}.scales", SCALES, (groups, rows))
    qzeros = matrix(shards, f"{module}.qzeros", (words,))
    bits = _bits(settings, module, qzeros.shape[1] * width, rows)
    planar, straight = layout == "gptq_p", (3,) if width == 32 else ()
    able = (*straight, 5, 6, 7) if planar else (2, *straight, 4, 8)
    if bits not in able:
        raise UnsupportedError(
            f"{settings.place}: {module} has {bits} bits; the layout {layout} in words of {width} bits is supported with "
            f"{', '.join(map(str, sorted(able)))}"
        )
    columns = qweight.shape[0] * width // bits
    if qweight.shape[0] * width % bits or (planar and columns % PLANAR_RUN):
        raise CheckpointError(f"tensor {module}.qweight has the shape {qweight.shape}, which is none of {bits} bits")
    size = _group_size(settings, module, columns, groups)
    part(shards, f"{module}.qzeros", (words,), (groups, rows * bits // width))
    order = group_order(shards, f"{module}.g_idx", columns, size)
    rule = ZeroRule(bits, LAYOUTS_OF_WORDS[layout], settings.flag("sym", default=True), _writer(settings), planar)
    zeros = rule.zeros(qzeros.raw(0, groups, f"{module}.qzeros"))
    form: Form = "symmetric" if np.all(zeros == 1 << (bits - 1)) else "zero"
    return GptqWeight(qweight, scales, qzeros, bits, columns, size, form, rule, order)


def _bits(settings: QuantizationSettings, module: str, stream: int, rows: int) -> int:
    """Bits of a weight, from the zero points of its `rows` outputs, which take `stream` bits.

    `dynamic` has patterns for modules with other settings.  A pattern of a stranger can take for ever; shapes say the same.
    CheckpointError: they say something else than the configuration.
    """
    bits, configured = stream // rows, settings.integer("bits")
    if stream % rows or (bits != configured and not settings.object("dynamic")):
        raise CheckpointError(
            f"tensor {module}.qzeros has {stream} bits for {rows} outputs, and {settings.place} says {configured} bits; "
            "download config.json again"
        )
    return bits


def _group_size(settings: QuantizationSettings, module: str, columns: int, groups: int) -> int:
    """Channels of a group of a weight.  CheckpointError: as `_bits`."""
    configured = settings.integer("group_size", default=-1)
    size = columns if configured == -1 else configured
    if size > 0 and -(-columns // size) == groups:
        return min(size, columns)
    if columns % groups or not settings.object("dynamic"):
        raise CheckpointError(
            f"tensor {module}.scales has {groups} groups for {columns} input channels, and {settings.place} says groups of "
            f"{configured}; download config.json again"
        )
    return columns // groups


def _writer(settings: QuantizationSettings) -> tuple[int, ...]:
    """The version of GPTQModel that wrote the checkpoint; (): another program, or not known."""
    named = settings.object("meta").get("quantizer")
    for each in named if isinstance(named, list) else [named]:
        if isinstance(each, str) and (version := re.match(r"gptqmodel:(\d{1,6})\.(\d{1,6})", each)):
            return int(version[1]), int(version[2])
    return ()
