"""A kernel compiled for the GPUs that are supported, as tests of generated kernels want it."""

from __future__ import annotations

import re

from edgeq.targets.cuda.supply import build, nvrtc
from edgeq.targets.cuda.supply.pack import Variant

OTHERS = (80, 90)
GATHERED = re.compile(r"make_(uint|int|float)[24]\(")
BOUNDS = re.compile(r"__launch_bounds__\((\d+)(?:, (\d+))?\)")
REGISTERS = 65536
"""Those that a multiprocessor has."""


def allowed(text: str) -> int:
    """Registers that a thread may have: more, and its multiprocessor does not hold the blocks that the kernel promises."""
    (bounds,) = set(BOUNDS.findall(text))  # of a declaration too
    threads, blocks = int(bounds[0]), int(bounds[1] or 1)
    return min(nvrtc.MAX_REGISTERS, REGISTERS // (threads * blocks))


def compiles_for_every_gpu(variant: Variant, every: bool, sm_89: bool) -> None:
    """Asserts that it spills no register and gathers no vector load word by word, on sm_87.

    On sm_80 and sm_90 too if it takes more than two thirds of the registers that it may have: the text is the same for all, and
    they take some more (182 on sm_80 where sm_87 takes 141).  `make kernels` fails if one spills on a GPU that it is for.

    every    compile for all of these anyway
    sm_89    compile for it too: it takes the registers of sm_87, in f64 fewer, and so spills nothing that sm_87 does not
    """
    (generated,) = build.kernels([variant])
    assert not GATHERED.search(generated.text), "a vector load is gathered word by word"
    found = {87: nvrtc.compiled(generated, "sm_87")}
    near = 3 * found[87].registers > 2 * allowed(generated.text)
    found |= {sm: nvrtc.compiled(generated, f"sm_{sm}") for sm in (*OTHERS * (every or near), *([89] if sm_89 else []))}
    for compiled in found.values():
        assert compiled.image[:4] == b"\x7fELF" and not compiled.spilled and compiled.registers <= 255
    same = "double" not in generated.text
    assert not sm_89 or (found[89].registers == found[87].registers if same else found[89].registers <= found[87].registers)
