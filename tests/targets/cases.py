"""Small graphs run on two targets: one description of a case serves every kernel and instruction set."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from edgeq.format.codec import MAX_ENTRY, SUPER_SIZE, Codec, dequantize, pack_beside, pack_floats, pack_integers
from edgeq.format.records import ArrayRef, LinearSpec, Weight
from edgeq.system import machine
from edgeq.targets import load
from edgeq.targets.cpu.isa import all_isas
from edgeq.targets.graph import CacheSpec, Embed, Graph, Linear, Operation, Select
from edgeq.targets.rows import PAGE, Rows
from edgeq.targets.target import Options, Program
from edgeq.targets.times import StepTimes

HERE = [isa.name for isa in all_isas() if isa.runs_on(machine.cpu().arch, machine.cpu().features)]
"""Instruction sets of the cpu target that this machine has."""


class Arrays:
    """Arrays in memory where a target expects a model file; no packs of kernels are beside or inside it."""

    path = Path("in-memory.edgeq")
    metadata = SimpleNamespace(kernels={})

    def __init__(self) -> None:
        self._arrays: list[np.ndarray] = []

    def add(self, a: np.ndarray, dtype: str) -> ArrayRef:
        # The file gives every array an address that is a multiple of 64.
        whole = np.zeros(a.nbytes + 64, np.uint8)
        start = -whole.ctypes.data % 64
        kept = whole[start : start + a.nbytes].view(a.dtype).reshape(a.shape)
        kept[...] = a
        self._arrays.append(kept)
        return ArrayRef(dtype, a.shape, len(self._arrays) - 1)

    def array(self, ref: ArrayRef) -> np.ndarray:
        return self._arrays[ref.segment]

    def release(self, ref: ArrayRef, uncached: bool = False) -> None:
        """There are no pages of a file to drop."""


def integers(rng: np.random.Generator, codec: Codec, rows: int, columns: int, values: str) -> tuple[np.ndarray, ...]:
    """q, scale and zero [rows, ...] of the kind of values asked for: "random", "least" or "most"."""
    top = (1 << codec.bits) - 1
    q = rng.integers(0, top + 1, (rows, columns), dtype=np.uint8)
    if values != "random":
        q[:] = 0 if values == "least" else top
    groups = codec.groups(columns)
    scale = (rng.uniform(0.5, 2, (rows, groups)) * rng.choice([-1, 1], (rows, groups))).astype(np.float16)
    zero = rng.choice(np.array([0, 1, top // 2, top], np.uint8), (rows, groups))
    return q, scale, zero


def weight(arrays: Arrays, rng: np.random.Generator, codec: Codec, rows: int, columns: int, values: str = "random") -> Weight:
    if not codec.integer:
        w = rng.standard_normal((rows, columns)).astype(np.float32)
        return Weight(codec, rows, columns, {"q": arrays.add(pack_floats(w, codec.kind), codec.kind)})
    q, scale, zero = integers(rng, codec, rows, columns, values)
    found, stored = {"scale": scale, "zero": zero}, codec.parts(rows, columns)
    if codec.coded:
        found["scale"] = rng.integers(0, 16, scale.shape).astype(np.uint8)
        found["super_scale"] = scale[:, :1]
    if "table" in stored:
        found["table"] = tables(rng, codec, rows, values)
    elif codec.kind == "two-level":
        found |= two_levels(rng, codec, rows, columns)
    elif "offset" in stored:
        # From that of weights around zero to that of weights of one sign, of either.
        share = rng.choice(np.array([0, -0.5, -1, 0.25]), scale.shape) + rng.uniform(-0.1, 0.1, scale.shape)
        found["offset"] = (share * scale * (1 << codec.bits)).astype(np.float16)
    parts = {"q": arrays.add(pack_integers(q, codec.bits), "u8")}
    parts |= {
        name: arrays.add(pack_beside(codec, name, found[name]), part.stored) for name, part in stored.items() if name != "q"
    }
    return Weight(codec, rows, columns, parts)


def tables(rng: np.random.Generator, codec: Codec, rows: int, values: str = "random") -> np.ndarray:
    """Entries [rows, ...], another table for each block of 16 rows: any, or the least or the largest alone."""
    most, count = MAX_ENTRY[codec.wide], codec.parts(16, 32)["table"].shape[1]
    entries = rng.integers(-most, most + 1, (-(-rows // 16), count)).astype(np.int8)
    entries[:, 0], entries[:, -1] = -most, most
    if values != "random":
        entries[:] = -most if values == "least" else most
    return np.repeat(entries, 16, axis=0)[:rows]


def two_levels(rng: np.random.Generator, codec: Codec, rows: int, columns: int) -> dict[str, np.ndarray]:
    """The numbers of groups, [rows, ...]: all that 8 bits hold, with scales and offsets of the sizes of other codecs."""
    groups, above = (rows, codec.groups(columns)), (rows, -(-columns // SUPER_SIZE))
    found = {"scale": rng.integers(-128, 128, groups).astype(np.int8)}
    found["super_scale"] = (rng.uniform(0.5, 2, above) / 64 * rng.choice([-1, 1], above)).astype(np.float16)
    if not codec.symmetric:
        found["offset"] = rng.integers(0, 256, groups).astype(np.uint8)
        found["super_offset"] = (rng.uniform(-2, 2, above) / 128 * (1 << codec.bits)).astype(np.float16)
    return found


def matrix(arrays: Arrays, w: Weight) -> np.ndarray:
    return dequantize(w.codec, w.rows, w.columns, {name: arrays.array(ref) for name, ref in w.arrays.items()})


def product(arrays: Arrays, x: np.ndarray, w: Weight, bias: np.ndarray | None = None, extra: Sequence[Operation] = ()) -> Graph:
    """Row r of the result is W x[token of row r] (+ bias)."""
    table = arrays.add(x, "f32")
    linear = LinearSpec("layer", (w,), None if bias is None else arrays.add(bias, "f32"))
    operations = (Embed(-1, table, "x"), *extra, Select(-1, ("x",)), Linear(-1, "x", linear, "y"))
    return Graph({"x": w.columns, "y": w.rows}, operations, "y", cache=(CacheSpec(1, 2, 2),))


def rows_of(program, count: int, first: int = 0, pages=None) -> Rows:
    """`count` rows of one session from position `first`, row r with token first + r, all logits wanted."""
    places = np.arange(first, first + count, dtype=np.int32)
    pages = pages if pages is not None else [program.new_page() for _ in range((first + count - 1) // PAGE + 1)]
    return Rows(places, places[None], places, np.zeros(count, np.int32), [pages], np.arange(count, dtype=np.int32))


def run(target: str, graph: Graph, arrays: Arrays, count: int, options: Options) -> np.ndarray:
    options = replace(options, max_rows=max(options.max_rows, count), max_logits=max(options.max_logits, count))
    program = load(target).compile(graph, arrays, options)
    return program.run(rows_of(program, count)).copy()


GROUP_SIZES = (16, 32, 64, 128, 0)
INTEGER_CODECS = [
    Codec(kind, bits, group, symmetric)
    for bits, group, (kind, symmetric) in itertools.product(
        range(2, 9), GROUP_SIZES, (("int", True), ("int", False), ("half", True), ("offset", True))
    )
]
INTEGER_CODECS += [Codec("s4", bits, group) for bits, group in itertools.product(range(2, 9), (16, 32, 128))]
INTEGER_CODECS += [
    Codec("table", bits, group, wide=wide)
    for bits, group, wide in itertools.product(range(1, 5), (16, 32, 128, 0), (False, True))
]
INTEGER_CODECS += [Codec("trellis", bits, group) for bits, group in itertools.product(range(1, 4), (16, 32, 64, 128))]
INTEGER_CODECS += [
    Codec("two-level", bits, group, symmetric)
    for bits, group, symmetric in itertools.product(range(2, 9), (16, 32, 128), (True, False))
    if bits <= 6 or group == 32
]


def case(*values: object, common: bool, id: str):
    """Parameters of a test; one that is not `common` is left to the exhaustive run."""
    return pytest.param(*values, marks=() if common else pytest.mark.exhaustive, id=id)


ISAS = [case(isa, common=isa == HERE[0], id=isa) for isa in HERE]
"""Instruction sets as parameters: what is not about one is tried on the best one, and on the others in the exhaustive run."""

MODES = ("a8", "a16")


def in_turn(bits: int, mode: str) -> bool:
    """Whether it is the turn of this mode, where every width is to be tried in one of the two."""
    return MODES[bits % 2] == mode


def numbers_of(codec: Codec) -> tuple[object, ...]:
    """What groups have beside their integers."""
    return codec.kind, codec.symmetric, codec.wide


def sizes_of(codec: Codec) -> list[int]:
    """The sizes of groups that there are with these bits and these numbers beside them."""
    return [each.group_size for each in INTEGER_CODECS if (each.bits, numbers_of(each)) == (codec.bits, numbers_of(codec))]


def tried(below: int, codec: Codec, mode: str) -> bool:
    """Whether products in this codec are tried in this mode on an instruction set that so many of this machine are better than.

    A kernel depends on the instruction set, the mode, the bits, what groups have beside a scale and whether they have 16
    channels, 32 or more: 300 kernels for decode and as many for prefill on each set, each compiled in about a second.  They are
    made of a piece for each of these, so every two pieces are tried together, and not all.

    On the best set integers of four bits are tried whole, and of the other widths every mode and size, with zero points and
    without by turns: what is added up, and could overflow, depends on these three.  What others have beside their integers
    scales the same sums: four bits are tried in every size, another width in one, in modes by turns; a width that is looked up
    in both modes.  The other sets have integers of four bits as the best one has other widths; else half of the sizes with
    zero points and the others without, in modes by turns, and of what few files have each width in one size and mode.
    """
    size, number = codec.group_size, MODES.index(mode)
    place = GROUP_SIZES.index(128 if size == 64 else size)
    if codec.kind == "int":
        if codec.bits == 4 and not below:
            return True
        if codec.bits == 4 or not below:
            return codec.symmetric == ((codec.bits + place + number + below) % 2 == 0)
        sizes = (16, 128) if codec.symmetric == (below % 2 == 1) else (32, 0)
        return size in sizes and in_turn(codec.bits + sizes.index(size), mode)
    sizes = sizes_of(codec)
    if below:
        return size == sizes[(codec.bits + below + codec.wide) % len(sizes)] and in_turn(codec.bits + below // 2, mode)
    if codec.bits == 4 and codec.kind != "trellis":
        return in_turn(codec.bits + GROUP_SIZES.index(size) + 1, mode)
    looked_up = codec.kind in ("table", "trellis")
    first = codec.bits - (codec.wide or codec.kind != "table") + number * (len(sizes) // 2)
    turn = size == sizes[first % len(sizes)]
    return turn and (looked_up or in_turn(codec.bits, mode)) or codec.kind == "trellis" and size == 32


def product_case(isa: str, codec: Codec, mode: str):
    """Parameters of a test of integer products; those whose kernels few other tests need are left to the exhaustive run.

    On the best instruction set integers of four bits are tried with every kind of group, in both modes where groups are short,
    and 3 and 8 bits in one of the modes; of what few files have four bits with groups of 32, of trellises two.  On other sets
    integers of four bits with zero points, in groups of 128 in one mode and of rows in the other.
    """
    best, group, whole, turn = isa == HERE[0], codec.group_size, codec.kind == "int", in_turn(codec.bits, mode)
    if not best:
        common = whole and codec.bits == 4 and not codec.symmetric
        common = common and group in (128, 0) and in_turn(HERE.index(isa) + (group == 0), mode)
    elif whole and codec.bits == 4:
        common = group in (16, 32) and not codec.symmetric or group != 16 and in_turn(codec.symmetric, mode)
    elif whole:
        common = group == 128 and codec.bits in (3, 8) and not codec.symmetric and turn
    else:
        common = group == 32 and codec.bits == (2 if codec.kind == "trellis" else 4) and turn
        common = common and (codec.kind != "table" or codec.wide)
    return case(isa, codec, mode, common=common, id=f"{codec.name}-{mode}-{isa}".replace(" ", "-"))


def product_cases(codecs: list[Codec]):
    """Parameters of a test of these codecs, those of `tried`."""
    return [
        product_case(isa, codec, mode)
        for codec in codecs
        for mode in MODES
        for below, isa in enumerate(HERE)
        if tried(below, codec, mode)
    ]


FLOAT_CODECS = [Codec("f32"), Codec("f16"), Codec("bf16")]


@contextmanager
def recording(program: Program) -> Iterator[list[StepTimes]]:
    """After the block the list has the times of its runs."""
    times = list[StepTimes]()
    program.record(True)
    try:
        yield times
    finally:
        program.record(False)
        times += [each.times for each in program.recorded()]
