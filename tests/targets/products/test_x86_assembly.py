"""The machine code that LLVM makes of tiles for AVX2, compiled on whatever runs the tests."""

from collections import Counter
from functools import cache

import pytest

from edgeq.targets.cpu.isa import all_isas, isa_index
from edgeq.targets.cpu.isa.avx2 import Avx2
from edgeq.targets.cpu.kernels.args import CHUNKS, ONE_CHUNK
from edgeq.targets.cpu.kernels.panels.panel_tile import PanelTile, center_of
from edgeq.targets.cpu.kernels.products.bitplanes import IntegerWeights
from edgeq.targets.cpu.kernels.products.groups import OFFSET, SYMMETRIC, ZERO
from edgeq.targets.cpu.kernels.products.microkernel_int import IntegerTile
from edgeq.targets.cpu.lowering.activations import MAX_A16
from tests.targets.products.x86_code import compiled, inner

CPUS = ("x86-64-v3", "haswell", "alderlake", "znver2", "znver3")
"""Each has its own model of what takes how long, by which the compiler orders instructions."""
TOKENS, PRODUCTS = Avx2.tiles[0], 16 * 32 * Avx2.tiles[0]
ALL = [(bits, mode16) for bits in range(2, 9) for mode16 in (0, 1) if mode16 or not Avx2().widens(bits)]


@cache
def code(bits: int, mode16: int, cpu: str = CPUS[0]) -> list[str]:
    """Instructions of the tile of a panel, in order, and labels."""
    tile = PanelTile(IntegerWeights(isa_index(Avx2()), bits, mode16, SYMMETRIC, CHUNKS), TOKENS)
    return compiled(lambda b, *args: tile.emit_chunks(b, *args[:4], args[4:8], args[8:]), 12, cpu)


@cache
def code_of_decode(bits: int, kind: int, cpu: str = CPUS[0]) -> list[str]:
    """The same of a token alone, whose activation blocks are one chunk; `kind`: of groups.py."""
    return compiled(IntegerTile(IntegerWeights(isa_index(Avx2()), bits, 0, kind, ONE_CHUNK), 1).emit, 5, cpu)


@pytest.mark.parametrize(
    ("bits", "mode16", "cpu"),
    [
        pytest.param(*tile, cpu, marks=() if cpu == CPUS[i % 5] else pytest.mark.exhaustive)
        for i, tile in enumerate(ALL)
        for cpu in CPUS
    ],
)
def test_no_call_and_no_spill(bits: int, mode16: int, cpu: str) -> None:
    assert not [line for line in code(bits, mode16, cpu) if line.startswith("call")]
    assert not [line for line in inner(code(bits, mode16, cpu)) if "%rsp" in line]


@pytest.mark.parametrize(
    ("bits", "mode16"), [pytest.param(*tile, marks=pytest.mark.exhaustive if i % 2 else ()) for i, tile in enumerate(ALL)]
)
def test_multiplications_and_loads_are_those_of_the_method(bits: int, mode16: int) -> None:
    found = Counter(line.split()[0] for line in inner(code(bits, mode16)))
    vectors = 16 // Avx2.lanes
    if mode16:
        assert found["vpmaddwd"] * 32 == PRODUCTS and found["vpaddd"] == found["vpmaddwd"]
        assert found["vpaddw"] == 2 * found["vpmaddwd"]
        # One of a quad's vectors is added from memory.
        loads = 8 * (2 * vectors - 1)
    else:
        widened = -(-8 // Avx2().run(bits)) * vectors * TOKENS
        assert found["vpmaddubsw"] * 32 == PRODUCTS and found["vpmaddwd"] == found["vpaddd"] == widened
        assert found["vpaddw"] == found["vpmaddubsw"] - widened
        loads = 8 * vectors
    assert found["vpbroadcastd"] == (16 if mode16 else 8) * TOKENS
    # Weights once for all tokens of a tile; sums of 32 bits are written once a chunk, those of words stay.
    moves = sum(found[name] for name in ("vmovdqa", "vmovdqu", "vmovaps", "vmovups"))
    assert moves <= loads + (0 if mode16 else found["vpmaddwd"])
    assert sum(found.values()) <= sum(n for name, n in found.items() if name.startswith("v")) + 8


@pytest.mark.parametrize("cpu", CPUS)
@pytest.mark.parametrize("kind", [SYMMETRIC, ZERO, OFFSET])
def test_a_token_alone_adds_up_a_chunk_in_one_pass(kind: int, cpu: str) -> None:
    """All products of a chunk in 16 bits, their sums once in 32; no loop within the loop, and no vector put aside."""
    lines = inner(code_of_decode(4, kind, cpu))
    assert not [line for line in lines if "%rsp" in line]
    found = Counter(line.split()[0] for line in lines)
    # With AVX-VNNI one instruction makes 32 bits of them and adds.
    assert found["vpmaddubsw"] == 16 and found["vpaddw"] == 14
    assert sum("vpmaddwd" in line or "vpdpwssd" in line for line in lines) == 2
    # Two vectors of rows: 32 that multiply and add, 24 that unpack by shift and mask, 8 of tokens, 8 loads, 5 prefetches, and
    # what scales them.
    assert len(lines) <= 104


def test_sums_of_16_bits_cannot_overflow() -> None:
    for isa in all_isas():
        for bits in range(2, 8) if isa.sums_16 else ():
            assert isa.run(bits) * 2 * 128 * ((1 << bits) - 1) <= 1 << 15


def test_words_cannot_overflow() -> None:
    """Factors of Winograd's product fit 16 bits, and two products 32."""
    largest = max(MAX_A16, 255) + max(center_of(bits) for bits in range(2, 9))
    assert largest < 1 << 15 and 2 * largest**2 < 1 << 31
