"""The processor that machine code is for: this one, or a device's for which a workstation compiles.

LLVM finds the name of an Arm core in /proc/cpuinfo.  In a container, a virtual machine or an emulator, or for a core it does
not know, it says "generic", and then `sdot` does not exist for it: the compiler ends the process.  The kernel always knows.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

from edgeq.errors import InputError
from edgeq.system import machine
from edgeq.system.devices import DeviceSpec

# Our names of features -> LLVM's.
LLVM_FEATURES = {"asimd": "neon", "lse": "lse", "fp16": "fullfp16", "rdm": "rdm", "dotprod": "dotprod", "i8mm": "i8mm"}


class CompilerSettings(NamedTuple):
    """What LLVM has to know: its architecture and system, core, and list of features."""

    triple: str
    name: str
    flags: str


@dataclass(frozen=True)
class Processor:
    """What code runs on.

    arch       as `platform.machine()` says
    features   as in machine.Cpu; without one of them the code does not run
    label      tells processors of the same features apart, for which code is scheduled differently
    known      of a device; None: LLVM is asked about this machine, where something is compiled for it
    """

    arch: str
    features: frozenset[str]
    label: str
    known: CompilerSettings | None = None

    @cached_property
    def settings(self) -> CompilerSettings:
        return self.known or _found_here()

    @property
    def is_arm(self) -> bool:
        return self.arch in ("aarch64", "arm64")

    @property
    def is_x86(self) -> bool:
        return self.arch in ("x86_64", "AMD64")

    @property
    def is_linux(self) -> bool:
        return "linux" in (self.known.triple if self.known else sys.platform)


def settings(features: frozenset[str], host: str) -> tuple[str, str]:
    """LLVM's processor name and feature string for an Arm core with `features`, of which LLVM says that it is `host`.

    A generic core is scheduled as a Cortex-A76 if it has the dot product, else as a Cortex-A72.  Every feature is named,
    present or not: a name alone implies features, and one of them that is missing here would end in an illegal instruction.
    """
    if host == "generic":
        host = "cortex-a76" if "dotprod" in features else "cortex-a72"
    return host, ",".join(f"{'+' if ours in features else '-'}{theirs}" for ours, theirs in LLVM_FEATURES.items())


def here() -> Processor:
    """This machine's.  What the user set by NUMBA_CPU_NAME or NUMBA_CPU_FEATURES stays."""
    cpu = machine.cpu()
    given = (os.environ.get(name) for name in _GIVEN)
    return Processor(cpu.arch, cpu.features, " ".join([cpu.name, *filter(None, given)]))


_GIVEN = "NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES"


def _found_here() -> CompilerSettings:
    # 47 MB and a tenth of a second, which runs of kernels that are kept do without.
    import llvmlite.binding as llvm

    cpu, (given_name, given_flags) = machine.cpu(), (os.environ.get(name) for name in _GIVEN)
    name, flags = llvm.get_host_cpu_name(), ""
    if cpu.arch in ("aarch64", "arm64"):
        name, flags = settings(cpu.features, name)
    elif not given_flags:
        flags = llvm.get_host_cpu_features().flatten()
    return CompilerSettings(llvm.get_process_triple(), given_name or name, given_flags or flags)


_ARM = ("aarch64", "aarch64-unknown-linux-gnu")
_X86 = ("x86_64", "x86_64-unknown-linux-gnu")
# As /proc/cpuinfo spells what LLVM takes for granted at this level ("abm" is lzcnt).
_V3 = frozenset({"abm", "avx", "avx2", "bmi1", "bmi2", "cx16", "f16c", "fma", "lahf_lm", "movbe", "popcnt", "sse4_2", "xsave"})
# As /proc/cpuinfo spells what no such level has -> LLVM's flag.
_FLAGS = {"avx_vnni": "+avxvnni", "avx512_vnni": "+avx512vnni"}
# Instruction set of a device -> architecture, and as little of it as every such processor has.
_OF_ISA = {
    "neon": (*_ARM, frozenset({"asimd"}), "cortex-a72"),
    "neon-dotprod": (*_ARM, frozenset({"asimd", "dotprod", "fp16", "lse", "rdm"}), "cortex-a76"),
    "neon-i8mm": (*_ARM, frozenset({"asimd", "dotprod", "fp16", "i8mm", "lse", "rdm"}), "cortex-a76"),
    "avx2": (*_X86, _V3, "x86-64-v3"),
    "avx-vnni": (*_X86, _V3 | {"avx_vnni"}, "x86-64-v3"),
    "avx512-vnni": (*_X86, _V3 | {"avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl", "avx512_vnni"}, "x86-64-v4"),
}


ISAS = tuple(_OF_ISA)
"""Instruction sets of devices that kernels are compiled for."""


def of_device(device: DeviceSpec) -> Processor:
    """The processor of a device.  InputError: none that kernels are compiled for."""
    if device.isa not in _OF_ISA:
        raise InputError(f"device {device.name} computes on a GPU ({device.isa}); kernels are compiled for {', '.join(ISAS)}")
    return of_isa(device.isa)


def of_isa(isa: str) -> Processor:
    """The processor that devices of one of ISAS have at least."""
    arch, triple, features, name = _OF_ISA[isa]
    flags = settings(features, name)[1] if arch == "aarch64" else ",".join(_FLAGS[each] for each in _FLAGS if each in features)
    return Processor(arch, features, name, CompilerSettings(triple, name, flags))


_chosen: list[Processor] = []


def choose(processor: Processor) -> None:
    """Compile for `processor` from here on.  Only before the first kernel: what kernels are made of is compiled once."""
    assert not _chosen, "this process compiles for another processor already"
    _chosen.append(processor)


@cache
def current() -> Processor:
    """The processor that this process compiles for."""
    return _chosen[0] if _chosen else here()
