"""The machine code of fused products and of attention: what is read is asked for before anything waits for it, and a turn of a
product takes few instructions."""

from __future__ import annotations

import struct
from itertools import pairwise

import pytest

from edgeq.targets.cuda.lowering.attention import PART
from edgeq.targets.cuda.supply import build, nvrtc
from edgeq.targets.cuda.supply.pack import Variant

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("needs_generator")]

OPCODES = {
    0x981: "load", 0x23C: "product", 0x237: "product", 0xB1D: "barrier", 0x947: "branch", 0x98F: "prefetch",
    **{base | form: "arithmetic" for base in (0x20, 0x21) for form in (0x200, 0x400, 0x800)},
}  # fmt: skip
"""Lowest 12 bits of an instruction of sm_80 to sm_90: LDG, HMMA and IMMA, BAR, BRA, CCTL, FMUL and FADD."""
ALWAYS = 7
"""The next four bits of an instruction that no predicate guards."""
MAX_REGISTERS = 128
WEIGHTS, GROUPS = 4096, 8
"""Those of a warp in a turn, 16 output channels and 1,024 input channels of its block of threads, and groups of the latter."""


def instructions(image: bytes) -> list[tuple[str, int]]:
    """The kernel of an ELF file of machine code, 16 bytes an instruction: its kind, and how far a branch goes; a `jump` is one
    that is always taken."""
    (headers,) = struct.unpack_from("<Q", image, 0x28)
    size, count, names = struct.unpack_from("<HHH", image, 0x3A)
    sections = [struct.unpack_from("<IIQQQQ", image, headers + i * size) for i in range(count)]
    (code,) = (
        image[offset : offset + nbytes]
        for name, _, _, _, offset, nbytes in sections
        if image[sections[names][4] + name :].startswith(b".text.")
    )
    found = list[tuple[str, int]]()
    for at in range(0, len(code), 16):
        opcode, distance = struct.unpack_from("<Ii", code, at)
        kind = OPCODES.get(opcode & 0xFFF, "")
        found.append(("jump" if kind == "branch" and opcode >> 12 & 0xF == ALWAYS else kind, distance // 16))
    return found


def fewest(found: list[tuple[str, int]], *places: int) -> int:
    """Instructions from the first of these places to the last one, through all of them and forwards, by the shortest way."""
    total = 0
    for begin, end in pairwise(places):
        after = {begin: 0}
        for at in range(begin, end):
            kind, distance = found[at]
            if at in after:
                ways = [at + 1 + distance] if kind in ("branch", "jump") and distance > 0 else []
                for place in ways if kind == "jump" else [*ways, at + 1]:
                    after[place] = min(after.get(place, len(found)), after[at] + 1)
        total += after[end]
    return total


def of_a_turn(found: list[tuple[str, int]]) -> float:
    """Instructions that a warp issues for 512 weights: all of the loop over the output blocks of a round, with its sums.

    Half of the warps ask for the lines of a turn, the other half for those of the next one.
    """
    kinds = [kind for kind, _ in found]
    products = [i for i, kind in enumerate(kinds) if kind == "product"]
    back = [(i + 1 + far, i) for i, (kind, far) in enumerate(found) if kind in ("branch", "jump") and far < 0]
    # The innermost loop around the products.
    begin, end = max(each for each in back if each[0] <= products[0] and each[1] > products[-1])
    asking = [i for i in range(begin, products[0]) if kinds[i] == "prefetch"]
    left = kinds.index("barrier", products[-1])
    # The sum of a whole round is one piece without branches, and has so many additions.
    pieces, piece = list[list[int]](), list[int]()
    for i in range(left, end):
        if kinds[i] in ("branch", "jump"):
            pieces, piece = [*pieces, piece], []
        elif kinds[i] == "arithmetic":
            piece.append(i)
    whole = [each for each in pieces if len(each) == GROUPS]
    alone, asked = (
        min(fewest(found, begin, *before, *products, left, *sums, end) for sums in whole) + 1 for before in ([], asking)
    )
    return (alone + asked) / 2 * 512 / WEIGHTS


@pytest.mark.parametrize(
    ("variant", "products", "loads", "most"),
    [
        # Two steps of four chunks of two mma each in a16, one in a8; two words of a chunk at once, and two scales.  The most
        # instructions for 512 weights.
        (Variant("fused_rows", ("group", 4, False, False, 128)), 16, 10, 40),
        pytest.param(
            Variant("fused_activate", ("silu", True, "group", 4, False, False, 128)), 16, 10, 40, marks=pytest.mark.exhaustive
        ),
        pytest.param(Variant("fused_rows", ("group", 4, False, True, 128)), 8, 10, 29, marks=pytest.mark.exhaustive),
        pytest.param(
            Variant("fused_heads", ("f16", False, "group", 4, False, False, 128)), 16, 10, 37, marks=pytest.mark.exhaustive
        ),
    ],
    ids=["rows", "activate", "rows-a8", "heads"],
)
def test_a_round_is_asked_for_before_the_first_of_its_products(variant: Variant, products: int, loads: int, most: int) -> None:
    if reason := nvrtc.refusal():
        pytest.skip(reason)
    (generated,) = build.kernels([variant])
    compiled = nvrtc.compiled(generated, "sm_87")
    assert not compiled.spilled and compiled.registers <= MAX_REGISTERS
    found = instructions(compiled.image)
    kinds = [kind for kind, _ in found]
    of_products = [i for i, kind in enumerate(kinds) if kind == "product"]
    assert len(of_products) == products
    begin, end = of_products[0], of_products[-1]
    *_, before_form, before_products = (i for i, kind in enumerate(kinds[:begin]) if kind == "barrier")
    # Where all groups are whole at constant distances from an address, else at addresses of their own.
    assert kinds[before_products:begin].count("load") == 2 * loads and "load" not in kinds[begin:end]
    assert of_a_turn(found) <= most
    # No loop over the steps: a branch back has all products in what it repeats, or none.
    for at, (kind, distance) in enumerate(found):
        if kind in ("branch", "jump") and distance < 0:
            repeated = [i for i in of_products if at + distance < i < at]
            assert len(repeated) in (0, products)
    # Four channels of x, of their order and of the gain of the norm are asked for together.
    form = kinds[before_form:before_products]
    first = form.index("arithmetic")
    assert form[:first].count("load") >= 12
    assert "load" not in form[first:]


@pytest.mark.exhaustive
def test_eight_parts_of_a_context_are_asked_for_before_the_first_of_them_is_added() -> None:
    if reason := nvrtc.refusal():
        pytest.skip(reason)
    (generated,) = build.kernels([Variant("attend", (64, "f16", PART, False))])
    compiled = nvrtc.compiled(generated, "sm_87")
    assert not compiled.spilled and compiled.registers <= MAX_REGISTERS
    kinds = [kind for kind, _ in instructions(compiled.image)]
    last = max(i for i, kind in enumerate(kinds) if kind == "product")
    waiting = ("arithmetic", "barrier", "branch", "jump")
    waits = [last, *(i for i, kind in enumerate(kinds) if i > last and kind in waiting), len(kinds)]
    # The eighth may come after a product of the sums so far, which waits for none of them.
    assert max(kinds[begin:end].count("load") for begin, end in pairwise(waits)) >= 7
