"""The kernels, in native TIRx, by name: functions from literals to a PrimFunc.

This folder alone imports tvm.  Sizes are scalars of a launch; only what changes an inner loop is a literal, so a new model
generates nothing.  A vector load wants its multiple visible where it is: `buffer[unit * 8 + v]`.
"""

from collections.abc import Sequence

from edgeq.targets.cuda.kernels.attention import attend
from edgeq.targets.cuda.kernels.cache import cache_write, cache_write_int4, cache_write_int8
from edgeq.targets.cuda.kernels.draw import draw
from edgeq.targets.cuda.kernels.experts import gated_add, gather_add, route, route_by_sigmoids, scatter
from edgeq.targets.cuda.kernels.factors import array_scale, gate, limit, row_mean, scale_shift, share_scale, soft_cap
from edgeq.targets.cuda.kernels.floats import embed_float, float_product
from edgeq.targets.cuda.kernels.fused import fused_activate, fused_heads, fused_rows
from edgeq.targets.cuda.kernels.gates import gated_norm
from edgeq.targets.cuda.kernels.heads import head_rotate, rope
from edgeq.targets.cuda.kernels.largest import largest
from edgeq.targets.cuda.kernels.low_rank import low_rank, low_rank_add
from edgeq.targets.cuda.kernels.norms import head_norm, layer_norm, rms_norm, value_norm
from edgeq.targets.cuda.kernels.product import matmul, matvec
from edgeq.targets.cuda.kernels.quantize_input import quantize_input, quantize_input_static, quantize_input_token
from edgeq.targets.cuda.kernels.read import read_memory
from edgeq.targets.cuda.kernels.requantize import add_squares, requantize
from edgeq.targets.cuda.kernels.row_before import row_before
from edgeq.targets.cuda.kernels.rows import activate, activate_clamped, embed, inject, scale, select
from edgeq.targets.cuda.kernels.short_conv import short_conv
from edgeq.targets.cuda.kernels.state_scan import state_keep, state_scan
from edgeq.targets.cuda.kernels.transform import arrange, butterflies, split_row

FUNCTIONS = {
    function.__name__: function
    for function in (
        matvec, matmul, fused_rows, fused_activate, fused_heads, quantize_input, quantize_input_token,
        quantize_input_static, float_product, embed, embed_float,
        rms_norm, layer_norm, head_norm, value_norm, gated_norm, activate, activate_clamped, scale, array_scale, soft_cap,
        gate, limit, row_mean, scale_shift, inject, select, rope, head_rotate, cache_write, cache_write_int8,
        cache_write_int4, attend, arrange, butterflies, split_row, add_squares, requantize, route, route_by_sigmoids,
        share_scale, scatter, gather_add, gated_add, largest, draw, low_rank, low_rank_add, read_memory, short_conv,
        row_before, state_scan, state_keep,
    )
}  # fmt: skip
RESIDENT = {
    "matvec": 6,
    "matmul": 2,
    "fused_rows": 5,
    "fused_activate": 5,
    "fused_heads": 4,
    "attend": 2,
    "cache_write_int8": 6,
    "largest": 4,
    "short_conv": 8,
    "state_scan": 4,
}
"""Blocks that a multiprocessor is to hold.  Left to itself, the compiler aimed at 12 of most or 3 of `matmul`, and
spilled registers of some variants for them."""


def rolled(kernel: str, literals: Sequence[object]) -> bool:
    """Whether loops of a constant length reach the compiler as loops, which it unrolls.

    The text of `matmul` is a tenth as long then, and is made and compiled in less than half of the time, with the same
    instructions.  In groups of 16 and odd bits the compiler leaves loops, and an array in memory.  All other kernels come
    unrolled: some take more registers as loops (`attend` up to 250 where it took 193), and fused products take as long.
    """
    return kernel == "matmul" and literals[-1] != 16
