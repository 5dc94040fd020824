"""The set `avx-vnni`: its machine code, and its results by the definition of its instruction where no processor here has it.

On processors that have `vpdpbusd` in 256 bits, of AVX or of AVX-512, the tests of all instruction sets run it as it is.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import numpy as np
import pytest
from llvmlite import ir

from edgeq.format.codec import PLANES, Codec
from edgeq.format.records import Mode
from edgeq.system import machine
from edgeq.targets.cpu.isa import avx_vnni, isa_index
from edgeq.targets.cpu.isa.avx2 import Avx2
from edgeq.targets.cpu.isa.avx_vnni import VEX, AvxVnni
from edgeq.targets.cpu.isa.isa import Isa
from edgeq.targets.cpu.jit import compile, processor, simd
from edgeq.targets.cpu.kernels.args import ONE_CHUNK
from edgeq.targets.cpu.kernels.panels.panel_matmul import PANEL, tile_of_panel
from edgeq.targets.cpu.kernels.products.bitplanes import IntegerWeights
from edgeq.targets.cpu.kernels.products.groups import group_kind
from edgeq.targets.cpu.kernels.products.microkernel_int import IntegerTile
from edgeq.targets.target import Options
from tests.arm.tiles import CODECS, TileCase, emitter, product
from tests.targets.cases import HERE, INTEGER_CODECS, MODES, Arrays, case, run, sizes_of
from tests.targets.products.integer_product import check_extremes, check_product
from tests.targets.products.test_swiglu_matmul import I3, I4, I8, mlp
from tests.targets.products.x86_code import compiled, inner, inner_loops, optimized

ISA, TOKENS = AvxVnni(), AvxVnni.tiles[0]
PROCESSOR = processor.of_isa(ISA.name)
FEW = [Codec("int", 4, 0, False), Codec("int", 8, 0, False), Codec("half", 4, 32), Codec("trellis", 3, 32)]
"""Codecs whose tiles are run in `make test` too."""
OF_KERNELS = Codec("offset", 4, 32)
"""The codec whose kernels are run in `make test` too."""
WITHOUT_TILES = ("offset", "two-level")
"""Kinds whose tiles are tried in kernels alone."""
BY_TILES = [each for each in INTEGER_CODECS if each.group_size == 32 and each.kind not in WITHOUT_TILES]
BY_TILES = list(dict.fromkeys([*CODECS, *BY_TILES]))
"""Codecs whose tiles are run alone: every width of every kind in groups of one chunk, and what tests/arm runs."""
NATIVE = ISA.name in HERE
"""Whether the tests of all instruction sets run the set, in every codec; here a few are left, of what stands in for it."""
PUT_ASIDE = re.compile(r"[xy]mm\d+, -?\d*\(%rsp\)")
"""A vector in memory of its own."""
PAGE = Path(__file__).parents[3] / "docs" / "peers.md"


def turn_of(codec: Codec) -> str:
    """The mode in which a codec is tried in `make test`."""
    return MODES[(codec.bits + codec.symmetric + len(codec.kind)) % 2]


def of_every_kind(codec: Codec) -> bool:
    """One codec of every kind, and every width of integers with zero points in groups of 32."""
    if codec.kind == "int" and not codec.symmetric:
        return codec.group_size == 32
    return codec.bits == (3 if codec.kind == "trellis" else 4) and codec.group_size == (0 if codec.kind == "int" else 32)


def in_code(codec: Codec) -> bool:
    """Whether its tiles are looked at: integers and four bits in all sizes of groups, of the others every width in one size."""
    sizes = [size for size in sizes_of(codec) if size != 64]
    turn = codec.group_size == sizes[(codec.bits + len(codec.kind) + codec.wide + codec.symmetric) % len(sizes)]
    return turn or codec.kind == "int" or codec.bits == 4 or of_every_kind(codec)


def tile_cases(codecs: Iterable[Codec], common: Callable[[Codec], bool]) -> list[Any]:
    """Tiles of one token and of several, in one of the two modes; 64 channels have the tile of 128.

    Those of `common` are in `make test` with one token, or with several, by turns."""
    return [
        case(
            TileCase(codec, int(turn_of(codec) == "a16"), tokens),
            common=common(codec) and (tokens == 1) == (codec.bits % 2 == 0),
            id=f"{codec.name}-{turn_of(codec)}-{tokens}".replace(" ", "-"),
        )
        for codec in codecs
        if codec.group_size != 64
        for tokens in (1, TOKENS)
    ]


@pytest.mark.parametrize("tile", tile_cases(filter(in_code, INTEGER_CODECS), of_every_kind))
def test_a_dot_product_is_one_instruction_of_avx(tile: TileCase) -> None:
    """No call, no vector put aside in a loop, nothing of AVX-512, no sums in 16 bits."""
    lines = compiled(emitter(ISA.name, tile).emit, 5, *PROCESSOR.settings[1:])
    assert not [line for line in lines if line.startswith("call") or "zmm" in line or "{%k" in line]
    dots = [line for line in lines if "vpdpbusd" in line]
    assert all(line.startswith("{vex}") for line in dots) and len(dots) * 32 == 16 * 32 * tile.tokens * (1 + tile.mode16)
    assert not [line for line in lines if line.startswith(("vpmaddubsw", "vpmaddwd", "vpdpwssd"))]
    aside = [line for loop in inner_loops(lines) for line in loop if PUT_ASIDE.search(line)]
    # Three planes of bits, and a trellis, have more fields and masks than there are registers.
    many = len(PLANES[tile.codec.bits]) > 2 or tile.codec.kind == "trellis"
    assert len(aside) <= (6 if many else 0)


def test_processors_with_avx512_run_it_in_an_encoding_of_theirs() -> None:
    chosen = processor.of_isa("avx512-vnni")
    assert ISA.runs_on(chosen.arch, chosen.features) and VEX not in chosen.features
    tile = emitter(ISA.name, TileCase(Codec("int", 4, 32), 0, 1))
    dots = [line for line in compiled(tile.emit, 5, *chosen.settings[1:]) if "vpdpbusd" in line]
    assert len(dots) == 16 and not [line for line in dots if "{vex}" in line or "zmm" in line]


def by_definition(b: Any, name: str, result: Any, accumulator: Any, weights: Any, activations: Any) -> Any:
    """`vpdpbusd` as Intel's Software Developer's Manual, volume 2, defines it: products of unsigned and signed bytes, four of a
    lane added to its 32 bits, which wrap around.

    Bytes at even and at odd places become words, and `vpmaddwd` of AVX2 adds the products of two: exact, and few instructions.
    """
    assert name == "llvm.x86.avx512.vpdpbusd.256"
    words, lanes = ir.VectorType(ir.IntType(16), 16), ir.VectorType(simd.I32, 8)
    w, x, byte = b.bitcast(weights, words), b.bitcast(activations, words), ir.Constant(words, [8] * 16)
    even = b.and_(w, ir.Constant(words, [255] * 16)), b.ashr(b.shl(x, byte), byte)
    odd = b.lshr(w, byte), b.ashr(x, byte)
    pairs = (simd.call(b, "llvm.x86.avx2.pmadd.wd", lanes, *each) for each in (even, odd))
    return b.add(accumulator, b.add(*pairs))


def function_of(emit: Callable[..., None], arguments: int) -> tuple[Any, Any]:
    """What `emit` emits as a function for this processor, and what keeps it in memory."""
    here = processor.here().settings
    _, module = optimized(emit, arguments, here.name, here.flags)
    target = llvm.Target.from_default_triple().create_target_machine(cpu=here.name, features=here.flags, opt=3, jit=True)
    engine = llvm.create_mcjit_compiler(module, target)
    engine.finalize_object()
    return ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * arguments)(engine.get_function_address("tile")), engine


x86 = pytest.mark.skipif("avx2" not in HERE, reason="a processor without AVX2")


def dots(b: Any, out: Any, weights: Any, activations: Any) -> None:
    """out i32 [8] += a dot product."""
    ints = ir.VectorType(simd.I32, 8).as_pointer()
    places = [b.inttoptr(address, ints) for address in (out, weights, activations)]
    values = [b.load(place, align=4) for place in places]
    b.store(avx_vnni.call(b, "llvm.x86.avx512.vpdpbusd.256", values[0].type, *values), places[0], align=4)


@x86
def test_the_definition_is_that_of_the_instruction(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes at their limits and sums that wrap around: of the formula in numpy, and of the instruction where it is here."""
    rng = np.random.default_rng(1)
    weights, activations = (
        rng.choice(np.array([0, 1, 127, 128, 255], np.uint8), (64, 32)),
        rng.integers(-128, 128, (64, 32), np.int8),
    )
    sums = rng.choice(np.array([0, 1, -1, 2**31 - 1, -(2**31)], np.int64), (64, 8))
    expected = (sums + (weights.astype(np.int64) * activations).reshape(64, 8, 4).sum(2)).astype(np.int32)
    for call in [avx_vnni.call] * NATIVE + [by_definition]:
        monkeypatch.setattr(avx_vnni, "call", call)
        function, kept = function_of(dots, 3)
        found = sums.astype(np.int32)
        for out, w, x in zip(found, weights, activations, strict=True):
            function(out.ctypes.data, w.ctypes.data, x.ctypes.data)
        assert np.array_equal(found, expected)
        del kept


@x86
@pytest.mark.parametrize("tile", tile_cases(FEW if NATIVE else BY_TILES, lambda codec: codec in FEW))
def test_tiles_equal_integer_arithmetic(tile: TileCase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(avx_vnni, "call", by_definition)
    emit = emitter(ISA.name, tile).emit
    function, kept = function_of(lambda b, *values: emit(b, *values, ir.Constant(ir.IntType(64), 0)), 4)
    for extreme in (False, True):
        found, expected = product(function, ISA.name, tile, extreme)
        assert np.max(np.abs(found - expected)) <= 1e-6 * np.max(np.abs(expected))
    del kept


@pytest.fixture
def by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of the set, run as they are where the processor can, else compiled by the definition and kept apart."""
    if NATIVE:
        return
    real = machine.cpu()
    kept = compile.cache_folder().name.encode() + Path(__file__).read_bytes()
    folder = machine.cache_folder() / f"kernels-{hashlib.blake2b(kept, digest_size=8).hexdigest()}"
    monkeypatch.setattr(machine, "cpu", lambda: machine.Cpu(real.name, real.arch, real.features | {VEX}, real.cores))
    monkeypatch.setattr(compile, "cache_folder", lambda: folder)
    monkeypatch.setattr(avx_vnni, "call", by_definition)


def in_kernels(codec: Codec) -> bool:
    """What has no tile of its own, one width of each other kind, and a width for groups of half a chunk and of two."""
    if codec.group_size == 32:
        return codec.kind in WITHOUT_TILES or codec.bits == (3 if codec.kind == "trellis" else 4)
    return codec.kind == "int" and (codec.bits, codec.group_size) in ((4, 16), (8, 64))


@x86
@pytest.mark.parametrize(
    "codec",
    [
        case(codec, common=codec == OF_KERNELS, id=codec.name.replace(" ", "-"))
        for codec in ([OF_KERNELS] if NATIVE else INTEGER_CODECS)
        if in_kernels(codec)
    ],
)
def test_products_equal_those_of_the_formula(codec: Codec, by_kernels: None) -> None:
    """In one of the modes; tiles are tried apart, and what joins them, the same for all sets, with every codec on others."""
    check_product(ISA.name, codec, turn_of(codec))


@x86
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("codec", "mode"),
    [
        (Codec("int", bits, (128, 0)[(i + j) % 2], False), mode)
        for i, bits in enumerate((2, 5, 7, 8))
        for j, mode in enumerate(MODES)
    ],
    ids=str,
)
def test_sums_at_their_limits(codec: Codec, mode: str, by_kernels: None) -> None:
    check_extremes(ISA.name, codec, mode)


@x86
@pytest.mark.exhaustive
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("codecs", [(I4, I8), (I3, I4)], ids=["4-8", "3-4"])
def test_prompts_have_the_bits_of_avx2(codecs: tuple[Codec, Codec], mode: Mode, by_kernels: None) -> None:
    """Panels of an MLP's products and the activation between them: more rows than a panel, the last tile not whole."""
    count, arrays = PANEL + 7, Arrays()
    for graph in mlp(arrays, np.random.default_rng(1), *codecs, 272, count):
        expected = run("cpu", graph, arrays, count, Options(mode, 2, Avx2.name))
        assert np.array_equal(run("cpu", graph, arrays, count, Options(mode, 2, ISA.name)), expected)


@cache
def instructions(isa: Isa, codec: Codec, mode: str, tokens: int) -> float:
    """Instructions of a loop over chunks of 512 weights with a group for each, for a token: alone, or one of a tile."""
    mode16 = mode == "a16" or isa.widens(codec.multiplied_bits)
    weights, chosen = (
        IntegerWeights(isa_index(isa), codec.bits, int(mode16), group_kind(codec), ONE_CHUNK),
        processor.of_isa(isa.name),
    )
    if tokens == 1:
        lines = compiled(IntegerTile(weights, 1).emit, 5, *chosen.settings[1:])
    else:
        tile = tile_of_panel(weights, tokens)
        emit = lambda b, *values: tile.emit_chunks(b, *values[:4], values[4:8], values[8:])  # noqa: E731
        lines = compiled(emit, 12, *chosen.settings[1:])
    return len(inner(lines)) / tokens


def table() -> str:
    """Instructions for 512 weights, as a table of the page."""
    lines = ["| codec | decode, a8 | decode, a16 | prompt, a8 | prompt, a16 |", "|---|---|---|---|---|"]
    codecs = [
        codec for codec in INTEGER_CODECS if codec.group_size == 32 and (codec.bits == 4 or codec.kind in ("trellis", "int"))
    ]
    for codec in codecs:
        pairs = [[instructions(isa, codec, mode, tokens) for isa in (Avx2(), ISA)] for tokens in (1, TOKENS) for mode in MODES]
        lines.append(" | ".join([f"| `{codec.name}`", *(f"{before:.0f} → {after:.0f}" for before, after in pairs)]) + " |")
    return "\n".join(lines)


@pytest.mark.exhaustive
def test_the_table_of_instructions_is_in_the_documentation() -> None:
    assert table() in PAGE.read_text(encoding="utf-8"), table()
