"""Instruction sets: one file each says how it multiplies packed integers (isa.py has what each must say)."""

from __future__ import annotations

from edgeq.targets.cpu.isa.avx2 import Avx2
from edgeq.targets.cpu.isa.avx512 import Avx512Amx, Avx512Vnni, Avx512Winograd
from edgeq.targets.cpu.isa.avx_vnni import AvxVnni
from edgeq.targets.cpu.isa.isa import Isa
from edgeq.targets.cpu.isa.neon import Neon, NeonDot, NeonI8mm
from edgeq.targets.cpu.isa.portable import Portable


def all_isas() -> tuple[Isa, ...]:
    """Best first."""
    x86 = (Avx512Amx(), Avx512Winograd(), Avx512Vnni(), AvxVnni(), Avx2())
    return (*x86, NeonI8mm(), NeonDot(), Neon(), Portable())


def isa_index(isa: Isa) -> int:
    """The place of an instruction set in `all_isas`: the number by which kernels name it as a literal."""
    return [each.name for each in all_isas()].index(isa.name)
