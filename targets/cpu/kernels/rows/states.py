"""What kernels of states and of their gates share."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from edgeq.targets.cpu.jit.deferred import inline, types
from edgeq.targets.cpu.jit.simd import ADDRESS, I32, I64, LANES, VF32, VOID, call, f32x16, get_i64, primitive, splat, vstore
from edgeq.targets.rows import PAGE

POSITIONS = PAGE


@inline
def snapshot_after(args, session, slot):
    """Address of this layer's part of the snapshot that is taken after `slot`, or 0; `args`: of StateArgs."""
    if slot % POSITIONS != POSITIONS - 1:
        return 0
    snapshot = get_i64(get_i64(args.snapshots + 8 * session) + 8 * (slot // POSITIONS))
    return snapshot + args.snapshot_offset if snapshot != 0 else 0


@inline
def put_up_to(address, x, left):
    """Store x, or its first `left` lanes where a row or a head ends in it."""
    if left >= LANES:
        vstore(address, x)
    else:
        put_first(address, x, left)


@primitive(VOID, ADDRESS, f32x16, types.int64)
def put_first(b: Any, address: Any, x: Any, count: Any) -> None:
    """Store x in the first `count` lanes; what is beside them stays as it is, for it may be another thread's."""
    vector = ir.VectorType(I64, LANES)
    inside = b.icmp_signed("<", ir.Constant(vector, list(range(LANES))), splat(b, count, vector))
    place = b.inttoptr(address, VF32.as_pointer())
    call(b, "llvm.masked.store.v16f32.p0", ir.VoidType(), x, place, ir.Constant(I32, 4), inside)
