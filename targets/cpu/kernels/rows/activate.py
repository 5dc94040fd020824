"""The activations of an MLP other than SwiGLU, with a gate and without one, and the SwiGLU with limits (gpt-oss)."""

from __future__ import annotations

from typing import Any

from edgeq.targets.cpu.jit.compile import Kernel
from edgeq.targets.cpu.jit.deferred import inline
from edgeq.targets.cpu.jit.simd import (
    LANES,
    get_i64,
    vadd,
    vdiv,
    vexp,
    vfirst,
    vfma,
    vload,
    vmax,
    vmin,
    vmul,
    vsplat,
    vstore,
    vsub,
)
from edgeq.targets.cpu.kernels.rows.elementwise import ActivationArgs
from edgeq.targets.cpu.kernels.rows.quantize import place_of, share_of, write_quantized

SILU, GELU_TANH, GELU, QUICK_GELU, RELU, CLAMPED, RELU2 = range(7)
FUNCTION_CODES = {"silu": SILU, "gelu_pytorch_tanh": GELU_TANH, "gelu": GELU, "quick_gelu": QUICK_GELU, "relu": RELU}
FUNCTION_CODES |= {"relu2": RELU2}


@inline
def sigmoid_of_minus(x):
    return vdiv(vsplat(1.0), vadd(vsplat(1.0), vexp(x)))


@inline
def gelu(x):
    """max(x, 0) - |x| erfc(|x| / sqrt(2)) / 2, erfc within 1.5e-7 (Abramowitz and Stegun 1964, formula 7.1.26)."""
    size = vmax(vsub(vsplat(0.0), x), x)
    t = vdiv(vsplat(1.0), vfma(size, vsplat(0.2316418882663604), vsplat(1.0)))
    p = vfma(t, vsplat(0.5307027145), vsplat(-0.7265760135))
    p = vfma(t, p, vsplat(0.7107068705))
    p = vfma(t, p, vsplat(-0.142248368))
    p = vmul(t, vfma(t, p, vsplat(0.127414796)))
    rest = vmul(p, vexp(vmul(vmul(size, vsplat(-0.5)), size)))
    return vsub(vmax(vsplat(0.0), x), vmul(size, rest))


@inline
def active(function, x):
    """f(x) of sixteen channels.  With its operands in this order, vmax keeps NaN."""
    if function == RELU:
        return vmax(vsplat(0.0), x)
    if function == RELU2:
        return vmul(vmax(vsplat(0.0), x), vmax(vsplat(0.0), x))
    if function == GELU:
        return gelu(x)
    if function == GELU_TANH:
        # 1/2 (1 + tanh u) is the sigmoid of 2 u.
        cubic = vfma(vmul(x, vsplat(-0.07135481627260025)), vmul(x, x), vmul(x, vsplat(-1.5957691216057308)))
        return vmul(x, sigmoid_of_minus(cubic))
    if function == QUICK_GELU:
        return vmul(x, sigmoid_of_minus(vmul(x, vsplat(-1.702))))
    return vmul(x, sigmoid_of_minus(vsub(vsplat(0.0), x)))


@inline
def activated(function, gated, x, gate_bytes):
    """Sixteen channels from address x, times those `gate_bytes` after them where they are gates."""
    value = active(function, vload(x))
    if gated:
        value = vmul(value, vload(x + gate_bytes))
    return value


@inline
def clamped(args, x):
    """The clamped SwiGLU of sixteen channels from address x, and of those after them.  vmax and vmin keep NaN so."""
    limit, least = vsplat(args.limit), vsplat(-args.limit)
    g, u = vmin(limit, vload(x)), vmax(least, vmin(limit, vload(x + 4 * args.width)))
    return vmul(vmul(g, sigmoid_of_minus(vmul(g, vsplat(-args.alpha)))), vadd(u, vsplat(1.0)))


def channels_of(function: int, gated: int) -> Any:
    """A function (args, x): the results of sixteen channels from address x."""
    if function == CLAMPED:
        return clamped

    @inline
    def channels(args, x):
        return activated(function, gated, x, 4 * args.width)

    return channels


def activate(max_tile: int, function: int, gated: int) -> Kernel:
    """f(x), with `gated` times what lies after it, and the quantized activations of the result."""
    channels = channels_of(function, gated)

    def kernel(record, part, parts, thread):
        args = ActivationArgs(record)
        count, width = get_i64(args.rows), args.width
        begin, end, first, last = share_of(part, parts, count, max_tile, width)
        for r in range(begin, end):
            x, out = args.x + r * args.x_stride, args.out + r * args.out_stride + thread * args.out_of_thread
            whole = first + (last - first) // LANES * LANES
            for c in range(first, whole, LANES):
                vstore(out + 4 * c, channels(args, x + 4 * c))
            if whole < last:
                vstore(out + 4 * whole, vfirst(channels(args, x + 4 * whole), last - whole))
            write_quantized(args.quantized, out, place_of(args.quantized, r, count, max_tile), first, last)

    return kernel
