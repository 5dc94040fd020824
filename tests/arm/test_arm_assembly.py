"""The machine code that LLVM makes of the Arm kernels, compiled on whatever runs the tests."""

from __future__ import annotations

import itertools
import json
from functools import cache

import pytest
from click.testing import CliRunner

from edgeq.targets.cpu.kernels.args import BF16_KIND, CHUNKS, F16_KIND, F32_KIND
from edgeq.targets.cpu.kernels.products.groups import TABLE, TABLE_WIDE, TRELLIS
from edgeq.targets.cpu.kernels.products.microkernel_float import FloatTile
from edgeq.tools.lab import arm_roofline
from edgeq.tools.lab.arm_roofline import CORES, assembly, compiled, loops

PI4, PI5 = "raspberry-pi-4", "raspberry-pi-5"
WIDENING = ("v.smull", "v.smull2", "v.smlal", "v.smlal2")
PRODUCTS_PER_CHUNK = 16 * 32
# In `make test` four bits in every way, and the other widths in one of the four by turns.
ALL = [
    pytest.param(*way, marks=() if way[0] == 4 or i % 8 == 3 else pytest.mark.exhaustive)
    for i, way in enumerate(itertools.product(range(2, 9), (False, True), (1, 4)))
]


@cache
def code(board: str, bits: int, mode16: bool, tokens: int) -> str:
    return assembly(board, bits, mode16, tokens=tokens)


def at_once(mode16: bool, tokens: int) -> int:
    """Bytes of an activation in one loop: both of 16 bits of a token alone; several tokens have a loop for each."""
    return 2 if mode16 and tokens == 1 else 1


@pytest.mark.parametrize("isa, board", [("neon", PI4), ("neon-dotprod", PI5)])
@pytest.mark.parametrize("kind", [TABLE, TABLE_WIDE], ids=["narrow", "wide"])
def test_a_table_is_looked_up_by_one_instruction_for_sixteen_weights(isa: str, board: str, kind: int) -> None:
    target, module = compiled(CORES[board], arm_roofline.tile(isa, 4, False, kind, CHUNKS, 1).emit)
    found = loops(str(target.emit_assembly(module)))
    assert found.inner["v.tbl"] * 16 == PRODUCTS_PER_CHUNK and not found.calls


@pytest.mark.parametrize("isa, board", [("neon", PI4), ("neon-dotprod", PI5)])
@pytest.mark.parametrize("bits", [1, 2, 3])
def test_bits_of_neighbouring_rows_are_found_while_they_lie_packed(isa: str, board: str, bits: int) -> None:
    """Two turns of a vector and one xor for each line that has coded bits, of 16 rows four vectors."""
    target, module = compiled(CORES[board], arm_roofline.tile(isa, bits, False, TRELLIS, CHUNKS, 1).emit)
    found = loops(str(target.emit_assembly(module)))
    assert found.inner["v.tbl"] * 16 == PRODUCTS_PER_CHUNK and not found.calls
    assert found.inner["v.ext"] == 8 * (2 if bits == 2 else 1)


@pytest.mark.parametrize("bits, mode16, tokens", ALL)
def test_dot_products_do_all_the_work_where_the_processor_has_them(bits: int, mode16: bool, tokens: int) -> None:
    inner = loops(code(PI5, bits, mode16, tokens)).inner
    dots = inner["v.sdot"]
    assert dots * 16 == PRODUCTS_PER_CHUNK * tokens * at_once(mode16, tokens)
    assert not any(inner[name] for name in WIDENING)


@pytest.mark.parametrize("bits, mode16, tokens", ALL)
def test_widening_multiplications_do_all_the_work_without_dot_products(bits: int, mode16: bool, tokens: int) -> None:
    text = code(PI4, bits, mode16, tokens)
    inner, pairs = loops(text).inner, mode16 and bits == 8
    passes = 1 if pairs else at_once(mode16, tokens)
    assert "sdot" not in text and "udot" not in text
    assert sum(inner[name] for name in WIDENING) * (4 if pairs else 8) == PRODUCTS_PER_CHUNK * tokens * passes
    # Products are added up in 16 bits for as many quads as fit, then brought to 32.
    most = 4 * tokens * {2: 1, 3: 1, 4: 1, 5: 2, 6: 4, 7: 8, 8: 8}[bits]
    assert inner["v.sadalp"] == (0 if pairs else most * passes)


@pytest.mark.parametrize("board", [PI4, PI5])
@pytest.mark.parametrize("bits, mode16, tokens", ALL)
def test_no_scalar_arithmetic_and_no_call_in_a_tile(board: str, bits: int, mode16: bool, tokens: int) -> None:
    found = loops(code(board, bits, mode16, tokens))
    assert not found.calls
    # What is left in scalar registers: addresses, the counter and its end.
    scalar = {name: n for name, n in found.inner.items() if not name.startswith(("v.", "ld", "st"))}
    assert not {"mul", "madd", "smull", "smaddl", "umov", "smov", "fmov"} & set(scalar), scalar
    assert sum(scalar.values()) <= 8
    # One token, the way of decode, has room in the registers; without dot products 16 bits put a few aside.
    if tokens == 1:
        most = sum(found.inner.values()) / 8 if mode16 and (bits == 7 or board == PI4) else 0
        assert found.inner["str"] + 2 * found.inner["stp"] <= most


@pytest.mark.parametrize("kind", [F16_KIND, BF16_KIND, F32_KIND])
@pytest.mark.parametrize("tokens", [1, 4])
def test_floats_are_converted_by_instructions_of_armv8_0(kind: int, tokens: int) -> None:
    """No library function and no half-precision arithmetic, which a Cortex-A72 lacks."""
    target, module = compiled(CORES[PI4], FloatTile(kind, tokens).emit)
    text = str(target.emit_assembly(module))
    assert "\tbl\t" not in text and "__" not in text and "fmla\tv" in text
    assert ("fcvtl" in text) == (kind == F16_KIND)
    assert not [line for line in text.splitlines() if "f" in line[:3] and ".8h" in line]


@pytest.mark.parametrize("board", ["apple-m2", "graviton-3"])
@pytest.mark.parametrize("bits, mode16", [(4, False), (4, True), (8, False)])
def test_products_of_octets_do_all_the_work_of_prompts_where_the_processor_has_them(
    board: str, bits: int, mode16: bool
) -> None:
    unpack, reorder, tile = (loops(text or "") for text in arm_roofline.panel_code(board, bits, mode16))
    assert len(tile.passes) == 1 + mode16 and not unpack.calls + reorder.calls + tile.calls
    for found in tile.passes:
        assert {name for name in found if name.startswith("v.")} == {"v.smmla"}
        assert found["v.smmla"] * 32 == PRODUCTS_PER_CHUNK * arm_roofline.TOKENS
        # Weights once, and activations once for each half of the rows: no sum is put aside.
        assert found["ldr"] + found["ldur"] + 2 * found["ldp"] == (32 if mode16 else 40) and not found["str"] + found["stp"]
    # Two vectors that are written as `st2` need no zip1.
    for found, vectors in ((unpack.inner, 32), (reorder.inner, 16 if mode16 else 8)):
        assert found["v.zip1"] + found["v.zip2"] + found["st2"] == vectors


@pytest.mark.parametrize(
    "board, bits, mode16", [(PI4, 4, False), (PI4, 8, False), (PI4, 8, True), (PI5, 4, False), (PI5, 4, True), (PI5, 8, False)]
)
def test_tiles_of_panels_unpack_nothing_and_put_no_sum_aside(board: str, bits: int, mode16: bool) -> None:
    unpack, _, text = arm_roofline.panel_code(board, bits, mode16)
    found, words = loops(text), board == PI4 and mode16
    assert not found.calls + loops(unpack).calls
    for inner in found.passes:
        assert not any(inner[f"v.{name}"] for name in ("and", "eor", "orr", "ushr", "ext", "mov"))
        stores, products = inner["str"] + 2 * inner["stp"], PRODUCTS_PER_CHUNK * arm_roofline.TOKENS
        if board == PI5:
            assert inner["v.sdot"] * 16 == products and not stores
            # Weights and activations once for 16 sums.
            assert inner["ldr"] + 2 * inner["ldp"] == (48 if mode16 else 40)
        elif words:
            # Winograd's product: half the multiplications.
            assert sum(inner[name] for name in WIDENING) * 8 == products and not stores
        else:
            # Sums of 32 bits are written once a chunk.
            assert sum(inner[name] for name in WIDENING) * 8 == products and stores == 16


def test_sdot_takes_activations_by_lane() -> None:
    """One 16-byte load serves four quads: no broadcast of its own for each."""
    inner = loops(code(PI5, 4, False, 1)).inner
    assert not inner["v.dup"] and 2 * inner["ldp"] + inner["ldr"] == 16 + 2


def test_instructions_for_a_line_are_as_documented() -> None:
    """isa/neon.py decides for multiplication and against table lookup by this count."""
    inner = loops(code(PI4, 4, False, 1)).inner
    vector = {name: n / 4 for name, n in inner.items() if name.startswith("v.")}
    assert sum(vector[name] for name in WIDENING if name in vector) == 16
    assert vector["v.and"] + vector["v.ushr"] == 8 and vector["v.addp"] + vector["v.sadalp"] == 2 and vector["v.dup"] == 2
    assert sum(inner.values()) / 256 < 0.5


@pytest.mark.exhaustive
def test_the_tables_are_in_the_documentation() -> None:
    text = (arm_roofline.__spec__.origin or "").replace("tools/lab/arm_roofline.py", "docs/arm.md")
    with open(text, encoding="utf-8") as file:
        page = file.read()
    assert arm_roofline.markdown(arm_roofline.table()) in page, "run: python -m edgeq.tools.lab.arm_roofline"
    assert arm_roofline.markdown_of_prompts(arm_roofline.prompts()) in page, "run: python -m edgeq.tools.lab.arm_roofline"


@pytest.mark.exhaustive
def test_decode_is_bound_by_memory_and_json_says_so() -> None:
    result = CliRunner().invoke(arm_roofline.main, ["--json"])
    rows = json.loads(result.stdout)["decode"]
    assert {row["board"] for row in rows} == set(CORES)
    for row in rows:
        if row["board"] in (PI4, PI5):
            assert row["compute"]["4"] > row["memory"] > row["memory_reached"]


@pytest.mark.exhaustive
def test_panels_make_prompts_faster_and_instructions_for_matrices_twice_as_fast() -> None:
    found = {(row.board, row.panels, row.weights, row.mode): row for row in arm_roofline.prompts()}
    for (board, panels, *case), row in found.items():
        gain = row.compute[1] / found[(board, False, *case)].compute[1]
        assert not panels or gain > (1.9 if row.isa == "neon-i8mm" else 1.15 if board == PI5 else 0.98), (board, case)
