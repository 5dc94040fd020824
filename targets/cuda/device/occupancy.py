"""How many blocks of a kernel a multiprocessor holds, and the bytes of weights that they ask for at once: computed numbers.

Limits of a compute capability: CUDA C++ Programming Guide 12.6, table "Technical Specifications per Compute Capability".
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from edgeq.system.devices import DeviceSpec
from edgeq.targets.cuda.supply.nvrtc import Compiled
from edgeq.targets.cuda.supply.pack import Generated, Variant, whole

REGISTERS = 65536
REGISTER_UNIT, RESERVED_SHARED = 256, 1024
"""Registers of a warp are given in units; the system takes some shared memory of every block."""
LATENCY = 0.8e-6
"""Seconds from asking for memory to having it, of a busy GPU: so long every byte is in flight (Little's law)."""
FEW_ROWS, WARP = 16, 32
DETAILS = {"matvec": 0, "fused_rows": 1, "fused_activate": 3, "fused_heads": 3}
"""Kernels that read weights in decode, and how many literals they have before those of the weights."""


@dataclass(frozen=True)
class Multiprocessor:
    threads: int
    blocks: int
    shared: int


MULTIPROCESSORS = {
    80: Multiprocessor(2048, 32, 164 << 10),
    86: Multiprocessor(1536, 16, 100 << 10),
    87: Multiprocessor(1536, 16, 164 << 10),
    89: Multiprocessor(1536, 24, 100 << 10),
    90: Multiprocessor(2048, 32, 228 << 10),
}


def threads_of(generated: Generated) -> int:
    """Threads of a block, which are literals in all kernels.  FormatError: here they are not."""
    return whole(generated.block[0], {})


def blocks_held(image: Compiled, threads: int) -> int | None:
    """Blocks that a multiprocessor holds at once; None: PTX, or a capability without known limits."""
    limits = MULTIPROCESSORS.get(int(image.arch.rpartition("_")[2])) if image.arch.startswith("sm_") else None
    if limits is None:
        return None
    warps = -(-threads // WARP)
    registers = -(-image.registers * WARP // REGISTER_UNIT) * REGISTER_UNIT * warps
    return min(
        limits.blocks,
        limits.threads // (warps * WARP),
        REGISTERS // registers,
        limits.shared // (image.shared + RESERVED_SHARED),
    )


def bytes_in_flight(variant: Variant, blocks: float, threads: int, ahead: int = 1, columns: int | None = None) -> int | None:
    """Bytes of weights that a multiprocessor has asked for: in decode a group of 16 output channels in every warp; else None.

    A fused product has asked for the `ahead` next rounds of 16 output channels too.  That a prefetch brings all 128 bytes of a
    line of L2 is an assumption.  Of weights in two blocks of input channels those of the first, which has so many `columns`;
    None: enough for a round.
    """
    at = DETAILS.get(variant.kernel)
    if at is None:
        return None
    bits, _, _, group = variant.literals[at : at + 4]
    if not isinstance(bits, int) or not isinstance(group, int):
        return None
    return int(blocks * asked(bits, group, threads // WARP, 0 if variant.kernel == "matvec" else ahead, columns))


def asked(bits: int, group: int, warps: int, ahead: int, columns: int | None = None) -> int:
    """Bytes of weights that a block of threads has asked for: groups that its warps multiply, and `ahead` rounds."""
    most = math.inf if columns is None else columns
    channels = int(min(warps * max(32, group), most) + ahead * min(channels_of_round(group, warps), most))
    return FEW_ROWS * channels * bits // 8


def channels_of_round(group: int, warps: int) -> int:
    """Input channels whose quantized input a fused product makes at once."""
    return warps * max(32, group) * (2 if group == 128 else 4)


def bytes_needed(device: DeviceSpec) -> int | None:
    """Bytes that each multiprocessor must have asked for to keep the memory busy."""
    return round(device.bandwidth / device.multiprocessors * LATENCY) if device.multiprocessors else None
