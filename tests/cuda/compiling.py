"""A kernel compiled for the GPUs that are supported, as tests of generated kernels want it."""

from __future__ import annotations

import re
from zlib import crc32

from edgeq.targets.cuda.supply import build, nvrtc
from edgeq.targets.cuda.supply.pack import Variant

OTHERS = (87, 90)
GATHERED = re.compile(r"make_(uint|int|float)[24]\(")
BOUNDS = re.compile(r"__launch_bounds__\((\d+)(?:, (\d+))?\)")
REGISTERS = 65536
"""Those that a multiprocessor has."""


def allowed(text: str) -> int:
    """Registers that a thread may have: more, and its multiprocessor does not hold the blocks that the kernel promises."""
    (bounds,) = set(BOUNDS.findall(text))  # of a declaration too
    threads, blocks = int(bounds[0]), int(bounds[1] or 1)
    return min(nvrtc.MAX_REGISTERS, REGISTERS // (threads * blocks))


def compiles_for_every_gpu(variant: Variant, every: bool) -> None:
    """Asserts that it spills no register and gathers no vector load word by word, on sm_80.

    On sm_87 or sm_90 too, one of them in turn, if it takes more than seven eighths of the registers that it may have.  The text
    is the same for all, and these take up to a ninth of what it may have more than sm_80 (52 of 64 where sm_80 takes 45), or a
    quarter fewer.  `make kernels` fails if a kernel spills on a GPU that it is for.

    every    compile for all of these and for sm_89, and assert that none takes a fifth of the registers of a thread more than
             sm_80; sm_89 takes those of sm_87, in f64 fewer, and so spills nothing that sm_87 does not
    """
    (generated,) = build.kernels([variant])
    assert not GATHERED.search(generated.text), "a vector load is gathered word by word"
    most = allowed(generated.text)
    found = {80: nvrtc.compiled(generated, "sm_80")}
    near = 8 * found[80].registers > 7 * most
    # By its name: of kernels that differ in one literal some come to each.
    one = OTHERS[crc32(variant.symbol.encode()) % len(OTHERS)]
    others = (*OTHERS, 89) if every else (one,) if near else ()
    found |= {sm: nvrtc.compiled(generated, f"sm_{sm}") for sm in others}
    for compiled in found.values():
        assert compiled.image[:4] == b"\x7fELF" and not compiled.spilled and compiled.registers <= 255
        assert 5 * (compiled.registers - found[80].registers) <= most
    if every:
        same = "double" not in generated.text
        assert found[89].registers == found[87].registers if same else found[89].registers <= found[87].registers
