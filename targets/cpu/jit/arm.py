"""Tells Numba what an Arm processor can do.

LLVM finds the name of an Arm core in /proc/cpuinfo.  In a container, a virtual machine or an emulator, or for a core it does
not know, it says "generic", and then `sdot` does not exist for it: the compiler ends the process.  The kernel always knows.
"""

from __future__ import annotations

import llvmlite.binding as llvm
import numba
from numba.core.registry import cpu_target

from edgeq import machine
from edgeq.errors import UnsupportedError

# Our names of features -> LLVM's.
LLVM_FEATURES = {"asimd": "neon", "lse": "lse", "fp16": "fullfp16", "rdm": "rdm", "dotprod": "dotprod"}


def settings(features: frozenset[str], host: str) -> tuple[str, str]:
    """LLVM's processor name and feature string for an Arm core with `features`, of which LLVM says that it is `host`.

    A generic core is scheduled as a Cortex-A76 if it has the dot product, else as a Cortex-A72.  Every feature is named,
    present or not: a name alone implies features, and one of them that is missing here would end in an illegal instruction.
    """
    if host == "generic":
        host = "cortex-a76" if "dotprod" in features else "cortex-a72"
    return host, ",".join(f"{'+' if ours in features else '-'}{theirs}" for ours, theirs in LLVM_FEATURES.items())


def configure() -> None:
    """Set Numba's processor before it compiles anything; what the user set by NUMBA_CPU_NAME or NUMBA_CPU_FEATURES stays.

    UnsupportedError: another package had Numba compile for a generic processor already.
    """
    cpu = machine.cpu()
    if cpu.arch not in ("aarch64", "arm64"):
        return
    name, features = settings(cpu.features, llvm.get_host_cpu_name())
    config = numba.config
    if config.CPU_NAME is None:
        config.CPU_NAME = name
    if not config.CPU_FEATURES:
        config.CPU_FEATURES = features
    _, _, used = cpu_target.target_context.codegen().magic_tuple()
    if used != config.CPU_FEATURES:
        raise UnsupportedError(
            "numba was set up by another package before edgeq could tell it what this Arm processor can do; "
            f"import edgeq.runtime first, or set NUMBA_CPU_NAME={name} and NUMBA_CPU_FEATURES={features}"
        )
