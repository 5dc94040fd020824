"""Vectors of sixteen float32 as Numba values, and the scalar memory access that kernels need.

Everything here is plain LLVM vector IR: LLVM makes one AVX-512 instruction of it, or two of AVX2, or four of NEON.  What an
instruction set must do in its own way (integer dot products) lies in `isa/`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from edgeq.targets.cpu.jit.deferred import Type, cgutils, intrinsic, types

LANES = 16


class BFloat(ir.Type):  # type: ignore[misc]
    """bfloat, which llvmlite does not know and LLVM does."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloat)

    def __hash__(self) -> int:
        return hash(BFloat)


I8, I16, I32, I64 = (ir.IntType(n) for n in (8, 16, 32, 64))
F16, F32 = ir.HalfType(), ir.FloatType()
VF32 = ir.VectorType(F32, LANES)
BF16 = BFloat()
VI32 = ir.VectorType(I32, LANES)
VF16 = ir.VectorType(F16, LANES)


f32x16 = Type("f32x16")
"""Sixteen float32 in a register."""


def constant(vector: ir.VectorType, value: Any) -> ir.Constant:
    return ir.Constant(vector, [value] * vector.count)


def load(b: Any, address: Any, kind: ir.Type, align: int = 1) -> Any:
    value = b.load(b.inttoptr(address, kind.as_pointer()))
    value.align = align
    return value


def store(b: Any, value: Any, address: Any, align: int = 1) -> None:
    b.store(value, b.inttoptr(address, value.type.as_pointer())).align = align


def scatter(b: Any, value: Any, address: Any, stride: Any, align: int = 1) -> None:
    """Store the elements of a vector `stride` bytes apart."""
    for i in range(value.type.count):
        store(b, b.extract_element(value, ir.Constant(I32, i)), b.add(address, b.mul(stride, ir.Constant(I64, i))), align)


def splat(b: Any, scalar: Any, vector: ir.VectorType) -> Any:
    undefined = ir.Constant(vector, ir.Undefined)
    one = b.insert_element(undefined, scalar, ir.Constant(I32, 0))
    return b.shuffle_vector(one, undefined, constant(ir.VectorType(I32, vector.count), 0))


def call(b: Any, name: str, result: ir.Type, *arguments: Any) -> Any:
    """Call an LLVM intrinsic or a C function by name."""
    signature = ir.FunctionType(result, [a.type for a in arguments])
    return b.call(cgutils.get_or_insert_function(b.module, signature, name), arguments)


def prefetch(b: Any, address: Any, nbytes: int, write: bool = False, level: int = 1) -> None:
    """Start to bring the lines of `nbytes` bytes into the cache of that level, to read or to write; any address is allowed."""
    read, keep, data = (ir.Constant(I32, i) for i in (int(write), 4 - level, 1))
    for line in range(0, nbytes, 64):
        at = b.inttoptr(b.add(address, ir.Constant(I64, line)), I8.as_pointer())
        call(b, "llvm.prefetch.p0", ir.VoidType(), at, read, keep, data)


def primitive(result: Any, *arguments: Any) -> Callable[[Any], Any]:
    """Make a Numba function of fixed types from a function that emits its IR: emit(builder, *values) -> value or None."""

    def decorate(emit: Any) -> Any:
        def codegen(context: Any, b: Any, signature: Any, values: Any) -> Any:
            value = emit(b, *values)
            return context.get_dummy_value() if value is None else value

        names = ", ".join(f"a{i}" for i in range(len(arguments)))
        scope: dict[str, Any] = {"signature": lambda: result(*arguments), "codegen": codegen}
        # Numba reads the number of arguments from the signature of the function it is given.
        exec(f"def typing(context, {names}):\n    return signature(), codegen", scope)
        typing = scope["typing"]
        typing.__name__, typing.__doc__, typing.__module__ = emit.__name__, emit.__doc__, emit.__module__
        return intrinsic(typing)

    return decorate


ADDRESS = types.intp
VOID = types.void


@primitive(types.int64, ADDRESS)
def get_i64(b: Any, address: Any) -> Any:
    return load(b, address, I64, 8)


@primitive(types.int32, ADDRESS)
def get_i32(b: Any, address: Any) -> Any:
    return load(b, address, I32, 4)


@primitive(types.float32, ADDRESS)
def get_f32(b: Any, address: Any) -> Any:
    return load(b, address, F32, 4)


@primitive(types.float64, ADDRESS)
def get_f64(b: Any, address: Any) -> Any:
    return load(b, address, ir.DoubleType(), 8)


@primitive(types.float32, ADDRESS)
def get_f16(b: Any, address: Any) -> Any:
    return b.fpext(load(b, address, F16, 2), F32)


@primitive(types.float32, ADDRESS)
def get_bf16(b: Any, address: Any) -> Any:
    bits = b.shl(b.zext(load(b, address, I16, 2), I32), ir.Constant(I32, 16))
    return b.bitcast(bits, F32)


@primitive(types.int64, ADDRESS)
def get_u8(b: Any, address: Any) -> Any:
    return b.zext(load(b, address, I8), I64)


@primitive(VOID, ADDRESS, types.float32)
def put_f32(b: Any, address: Any, value: Any) -> None:
    store(b, value, address, 4)


@primitive(VOID, ADDRESS, types.int32)
def put_i32(b: Any, address: Any, value: Any) -> None:
    store(b, value, address, 4)


@primitive(VOID, ADDRESS, types.int64)
def put_i64(b: Any, address: Any, value: Any) -> None:
    store(b, value, address, 8)


@primitive(VOID, ADDRESS, types.float32)
def put_f16(b: Any, address: Any, value: Any) -> None:
    store(b, b.fptrunc(value, F16), address, 2)


@primitive(VOID, ADDRESS, types.int64)
def put_i8(b: Any, address: Any, value: Any) -> None:
    store(b, b.trunc(value, I8), address)


@primitive(f32x16, ADDRESS)
def vload(b: Any, address: Any) -> Any:
    return load(b, address, VF32, 4)


@primitive(VOID, ADDRESS, f32x16)
def vstore(b: Any, address: Any, value: Any) -> None:
    store(b, value, address, 4)


@primitive(f32x16, ADDRESS)
def vload_i8(b: Any, address: Any) -> Any:
    return b.sitofp(load(b, address, ir.VectorType(I8, LANES)), VF32)


@primitive(f32x16, types.float32)
def vsplat(b: Any, value: Any) -> Any:
    return splat(b, value, VF32)


@primitive(f32x16, f32x16, f32x16)
def vadd(b: Any, x: Any, y: Any) -> Any:
    return b.fadd(x, y)


@primitive(f32x16, f32x16, f32x16)
def vsub(b: Any, x: Any, y: Any) -> Any:
    return b.fsub(x, y)


@primitive(f32x16, f32x16, f32x16)
def vmul(b: Any, x: Any, y: Any) -> Any:
    return b.fmul(x, y)


@primitive(f32x16, f32x16, f32x16)
def vdiv(b: Any, x: Any, y: Any) -> Any:
    return b.fdiv(x, y)


@primitive(f32x16, f32x16, f32x16)
def vmax(b: Any, x: Any, y: Any) -> Any:
    return b.select(b.fcmp_ordered(">", x, y), x, y)


@primitive(f32x16, f32x16)
def vabs(b: Any, x: Any) -> Any:
    return call(b, "llvm.fabs.v16f32", VF32, x)


@primitive(f32x16, f32x16, f32x16, f32x16)
def vfma(b: Any, x: Any, y: Any, z: Any) -> Any:
    """x * y + z, fused where the processor can."""
    return call(b, "llvm.fmuladd.v16f32", VF32, x, y, z)


def _halves(b: Any, x: Any, join: Callable[[Any, Any], Any]) -> Any:
    """Fold the lanes pairwise in a fixed order: 16 -> 8 -> 4 -> 2 -> 1."""
    count = LANES
    while count > 1:
        count //= 2
        undefined = ir.Constant(x.type, ir.Undefined)
        low, high = (
            b.shuffle_vector(x, undefined, ir.Constant(ir.VectorType(I32, count), list(range(start, start + count))))
            for start in (0, count)
        )
        x = join(low, high)
    return b.extract_element(x, ir.Constant(I32, 0))


@primitive(types.float32, f32x16)
def vsum(b: Any, x: Any) -> Any:
    return _halves(b, x, b.fadd)


@primitive(types.float32, f32x16)
def vmaximum(b: Any, x: Any) -> Any:
    return _halves(b, x, lambda p, q: b.select(b.fcmp_ordered(">", p, q), p, q))


@primitive(types.float32, f32x16)
def vminimum(b: Any, x: Any) -> Any:
    return _halves(b, x, lambda p, q: b.select(b.fcmp_ordered("<", p, q), p, q))


@primitive(f32x16, f32x16, types.int64, types.int64)
def vkeep(b: Any, x: Any, start: Any, stop: Any) -> Any:
    """x in lanes start <= i < stop, elsewhere a number whose exponential is zero."""
    lanes = ir.Constant(ir.VectorType(I64, LANES), list(range(LANES)))
    vector = ir.VectorType(I64, LANES)
    inside = b.and_(b.icmp_signed(">=", lanes, splat(b, start, vector)), b.icmp_signed("<", lanes, splat(b, stop, vector)))
    return b.select(inside, x, constant(VF32, -1e30))


@primitive(f32x16, f32x16)
def vexp(b: Any, x: Any) -> Any:
    """exp(x) to 2 ulp for x <= 88; 0 below -87.

    Cody-Waite reduction by multiples of ln 2, then the Cephes polynomial of degree 6 (S. Moshier, expf.c).
    """
    low, high = constant(VF32, -87.33), constant(VF32, 88.0)
    small = b.fcmp_ordered("<", x, low)
    x = b.select(small, low, x)
    x = b.select(b.fcmp_ordered(">", x, high), high, x)

    def fma(p: Any, q: Any, r: Any) -> Any:
        return call(b, "llvm.fmuladd.v16f32", VF32, p, q, r)

    n = call(b, "llvm.rint.v16f32", VF32, b.fmul(x, constant(VF32, 1.44269504088896341)))
    r = fma(n, constant(VF32, -0.693359375), x)
    r = fma(n, constant(VF32, 2.12194440e-4), r)
    p = constant(VF32, 1.9875691500e-4)
    for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = fma(p, r, constant(VF32, c))
    p = fma(p, b.fmul(r, r), b.fadd(r, constant(VF32, 1.0)))
    exponent = b.shl(b.add(b.fptosi(n, VI32), constant(VI32, 127)), constant(VI32, 23))
    return b.select(small, constant(VF32, 0.0), b.fmul(p, b.bitcast(exponent, VF32)))


@primitive(f32x16, f32x16)
def vrint(b: Any, x: Any) -> Any:
    """Nearest integer, ties to even."""
    return call(b, "llvm.rint.v16f32", VF32, x)


@primitive(types.float32, types.float32)
def rint(b: Any, x: Any) -> Any:
    """Nearest integer, ties to even."""
    return call(b, "llvm.rint.f32", F32, x)


@primitive(VOID, f32x16, ADDRESS, types.intp)
def put_quads_i8(b: Any, x: Any, address: Any, stride: Any) -> None:
    """Sixteen whole numbers as int8: four quads of four channels, `stride` bytes apart."""
    quads = b.bitcast(b.trunc(b.fptosi(x, VI32), ir.VectorType(I8, LANES)), ir.VectorType(I32, 4))
    scatter(b, quads, address, stride, 4)


@primitive(VOID, f32x16, ADDRESS, types.intp)
def put_bytes_i16(b: Any, x: Any, address: Any, stride: Any) -> None:
    """Sixteen whole numbers 256 * high + low, both int8: four times four of low and four of high, `stride` bytes apart."""
    whole, octets = b.fptosi(x, VI32), ir.VectorType(I8, LANES)
    high = b.ashr(b.add(whole, constant(VI32, 128)), constant(VI32, 8))
    order = [LANES * byte + 4 * quad + channel for quad in range(4) for byte in range(2) for channel in range(4)]
    pair = b.trunc(whole, octets), b.trunc(high, octets)
    quads = b.shuffle_vector(*pair, ir.Constant(ir.VectorType(I32, 2 * LANES), order))
    scatter(b, b.bitcast(quads, ir.VectorType(I64, 4)), address, stride, 8)


@primitive(VOID, f32x16, ADDRESS, types.intp)
def put_pairs_i16(b: Any, x: Any, address: Any, stride: Any) -> None:
    """Sixteen whole numbers as int16: four quads of channels in the order 0 2 1 3, `stride` bytes apart.

    That order pairs with the even and odd bytes of a quad of weights.
    """
    words = b.trunc(b.fptosi(x, VI32), ir.VectorType(I16, LANES))
    order = [4 * quad + channel for quad in range(4) for channel in (0, 2, 1, 3)]
    words = b.shuffle_vector(words, ir.Constant(words.type, ir.Undefined), ir.Constant(ir.VectorType(I32, LANES), order))
    quads = b.bitcast(words, ir.VectorType(I64, 4))
    scatter(b, quads, address, stride, 8)


@primitive(VOID, f32x16, ADDRESS, types.intp)
def put_lanes(b: Any, x: Any, address: Any, stride: Any) -> None:
    """Sixteen float32, `stride` bytes apart."""
    scatter(b, x, address, stride, 4)


@primitive(f32x16, f32x16, f32x16)
def vmin(b: Any, x: Any, y: Any) -> Any:
    return b.select(b.fcmp_ordered("<", x, y), x, y)


@primitive(f32x16, f32x16, types.int64)
def vfirst(b: Any, x: Any, count: Any) -> Any:
    """x in the first `count` lanes, 0 in the others."""
    vector = ir.VectorType(I64, LANES)
    inside = b.icmp_signed("<", ir.Constant(vector, list(range(LANES))), splat(b, count, vector))
    return b.select(inside, x, constant(VF32, 0.0))


@primitive(f32x16, f32x16)
def vround_f16(b: Any, x: Any) -> Any:
    """x rounded to f16, ties to even."""
    return b.fpext(b.fptrunc(x, VF16), VF32)


@primitive(VOID, ADDRESS, f32x16)
def put_f16s(b: Any, address: Any, x: Any) -> None:
    store(b, b.fptrunc(x, VF16), address, 2)


@primitive(VOID, ADDRESS, f32x16)
def put_octets(b: Any, address: Any, x: Any) -> None:
    """Sixteen whole numbers from -128 to 255 as bytes."""
    store(b, b.trunc(b.fptosi(x, VI32), ir.VectorType(I8, LANES)), address)


@primitive(f32x16, ADDRESS)
def get_f16s(b: Any, address: Any) -> Any:
    return b.fpext(load(b, address, VF16, 2), VF32)


@primitive(f32x16, ADDRESS)
def get_u8s(b: Any, address: Any) -> Any:
    return b.uitofp(load(b, address, ir.VectorType(I8, LANES)), VF32)


@primitive(f32x16, ADDRESS, types.int64)
def lane_bytes(b: Any, address: Any, index: Any) -> Any:
    """Byte `index` of each of sixteen words of 32 bits, as floats: input channel `index` of a quad for a whole block."""
    bits = b.shl(b.trunc(index, I32), ir.Constant(I32, 3))
    shifted = b.lshr(load(b, address, VI32, 4), splat(b, bits, VI32))
    return b.sitofp(b.and_(shifted, constant(VI32, 255)), VF32)


@primitive(f32x16, ADDRESS, types.int64)
def lane_f16(b: Any, address: Any, index: Any) -> Any:
    """Half `index` of each of sixteen words of 32 bits, an f16."""
    bits = b.shl(b.trunc(index, I32), ir.Constant(I32, 4))
    halves = b.trunc(b.lshr(load(b, address, VI32, 4), splat(b, bits, VI32)), ir.VectorType(I16, LANES))
    return b.fpext(b.bitcast(halves, VF16), VF32)


@primitive(f32x16, ADDRESS, types.int64)
def lane_bf16(b: Any, address: Any, index: Any) -> Any:
    """Half `index` of each of sixteen words of 32 bits, a bf16."""
    bits = b.shl(b.trunc(index, I32), ir.Constant(I32, 4))
    halves = b.lshr(load(b, address, VI32, 4), splat(b, bits, VI32))
    return b.bitcast(b.shl(halves, constant(VI32, 16)), VF32)
