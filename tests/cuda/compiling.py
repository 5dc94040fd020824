"""A kernel compiled for every GPU that is supported, as tests of generated kernels want it."""

from __future__ import annotations

import re

from edgeq.targets.cuda.supply import build, nvrtc
from edgeq.targets.cuda.supply.pack import Variant

SMS = (80, 87, 90)
GATHERED = re.compile(r"make_(uint|int|float)[24]\(")


def compiles_for_every_gpu(variant: Variant, sm_89: bool) -> None:
    """Asserts that it spills no register and gathers no vector load word by word.

    sm_89   compile for it too: it takes the registers of sm_87, and so spills nothing that sm_87 does not
    """
    (generated,) = build.kernels([variant])
    assert not GATHERED.search(generated.text), "a vector load is gathered word by word"
    found = {sm: nvrtc.compiled(generated, f"sm_{sm}") for sm in (*SMS, *([89] if sm_89 else []))}
    for compiled in found.values():
        assert compiled.image[:4] == b"\x7fELF" and not compiled.spilled and compiled.registers <= 255
    assert not sm_89 or found[89].registers == found[87].registers
