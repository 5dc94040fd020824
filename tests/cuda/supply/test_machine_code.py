"""The order of instructions in the machine code of fused products and of attention: what is read is asked for before anything
waits for it."""

from __future__ import annotations

import struct
from itertools import pairwise

import pytest

from edgeq.targets.cuda.lowering.attention import PART
from edgeq.targets.cuda.supply import build, nvrtc
from edgeq.targets.cuda.supply.pack import Variant

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("needs_generator")]

OPCODES = {
    0x981: "load", 0x23C: "product", 0x237: "product", 0xB1D: "barrier", 0x947: "branch",
    **{base | form: "arithmetic" for base in (0x20, 0x21) for form in (0x200, 0x400, 0x800)},
}  # fmt: skip
"""Lowest 12 bits of an instruction of sm_80 to sm_90: LDG, HMMA and IMMA, BAR, BRA, FMUL and FADD."""
MAX_REGISTERS = 128


def instructions(image: bytes) -> list[tuple[str, int]]:
    """The kernel of an ELF file of machine code, 16 bytes an instruction: its kind, and how far a branch goes."""
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
        found.append((OPCODES.get(opcode & 0xFFF, ""), distance // 16))
    return found


@pytest.mark.parametrize(
    ("variant", "products", "loads"),
    [
        # Two steps of four chunks of two mma each in a16, one in a8; two words of a chunk at once, and two scales.
        (Variant("fused_rows", ("group", 4, False, False, 128)), 16, 10),
        pytest.param(
            Variant("fused_activate", ("silu", True, "group", 4, False, False, 128)), 16, 10, marks=pytest.mark.exhaustive
        ),
        pytest.param(Variant("fused_rows", ("group", 4, False, True, 128)), 8, 10, marks=pytest.mark.exhaustive),
        pytest.param(
            Variant("fused_heads", ("f16", False, "group", 4, False, False, 128)), 16, 10, marks=pytest.mark.exhaustive
        ),
    ],
    ids=["rows", "activate", "rows-a8", "heads"],
)
def test_a_round_is_asked_for_before_the_first_of_its_products(variant: Variant, products: int, loads: int) -> None:
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
    assert kinds[before_products:begin].count("load") == loads and "load" not in kinds[begin:end]
    # No loop over the steps: a branch back has all products in what it repeats, or none.
    for at, (kind, distance) in enumerate(found):
        if kind == "branch" and distance < 0:
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
    waits = [last, *(i for i, kind in enumerate(kinds) if i > last and kind in ("arithmetic", "barrier", "branch")), len(kinds)]
    # The eighth may come after a product of the sums so far, which waits for none of them.
    assert max(kinds[begin:end].count("load") for begin, end in pairwise(waits)) >= 7
