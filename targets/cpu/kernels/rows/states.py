"""What kernels of states share."""

from __future__ import annotations

from edgeq.targets.cpu.jit.deferred import inline
from edgeq.targets.cpu.jit.simd import get_i64
from edgeq.targets.rows import PAGE

POSITIONS = PAGE


@inline
def snapshot_after(args, session, slot):
    """Address of this layer's part of the snapshot that is taken after `slot`, or 0; `args`: of StateArgs."""
    if slot % POSITIONS != POSITIONS - 1:
        return 0
    snapshot = get_i64(get_i64(args.snapshots + 8 * session) + 8 * (slot // POSITIONS))
    return snapshot + args.snapshot_offset if snapshot != 0 else 0
