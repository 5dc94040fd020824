"""The emulator itself: what it computes, and that it finds what a GPU would not forgive."""

from __future__ import annotations

import numpy as np
import pytest

from edgeq.errors import DeviceError
from edgeq.targets.cuda.device.device import upload
from edgeq.targets.cuda.supply.pack import Generated, Parameter, Variant
from tests.cuda.emulated import BACKWARD, CHECKED, FORWARD, SHUFFLED, EmulatedDevice

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("needs_emulator")]

ORDERS = (FORWARD, BACKWARD, SHUFFLED)
MMA_F16 = """
__forceinline__ __device__ void mma(float& d0, float& d1, float& d2, float& d3, uint a0, uint a1, uint a2, uint a3, uint b0, uint b1) {
  float c0 = d0, c1 = d1, c2 = d2, c3 = d3;
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};" : "=f"(d0), "=f"(d1), "=f"(d2), "=f"(d3) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(c0), "f"(c1), "f"(c2), "f"(c3));
}
"""  # noqa: E501


def kernel(body: str, threads: int = 64, name: str = "k", before: str = "") -> Generated:
    """A kernel over `in` and `out`, arrays of 32-bit words."""
    declared = f"__launch_bounds__({threads}) {name}(uint* __restrict__ out, uint* __restrict__ in)"
    text = f'{before}extern "C" __global__ void {declared} {{{body}}}'
    parameters = Parameter("pointer", "out"), Parameter("pointer", "in")
    return Generated(Variant(name), name, text, parameters, ("blocks", 1, 1), (threads, 1, 1))


def run(generated: Generated, data: np.ndarray, words: int, order: int = FORWARD, blocks: int = 1) -> np.ndarray:
    device = EmulatedDevice(order)
    loaded = device.load([generated])[generated.variant]
    given, taken = upload(device, data), device.allocate(4 * words)
    device.launch(loaded, *generated.bind({"in": given.address, "out": taken.address, "blocks": blocks}))
    device.synchronize()
    result = np.zeros(words, np.uint32)
    device.read(taken.address, result)
    return result


def test_blocks_and_threads_have_their_numbers() -> None:
    body = "out[blockIdx.x * 64 + threadIdx.x] = in[threadIdx.x] + blockIdx.x;"
    for order in ORDERS:
        result = run(kernel(body), np.arange(64, dtype=np.uint32), 192, order, blocks=3)
        assert np.array_equal(result, np.arange(64)[None].repeat(3, 0).ravel() + np.arange(3).repeat(64))


def test_shuffles() -> None:
    body = """
      uint v = in[threadIdx.x];
      out[threadIdx.x] = __shfl_xor_sync(0xffffffffu, v, 5, 32);
      out[64 + threadIdx.x] = __shfl_sync(0xffffffffu, v, 3, 32);"""
    lanes = np.arange(64)
    result = run(kernel(body), lanes.astype(np.uint32), 128, SHUFFLED)
    assert np.array_equal(result[:64], lanes ^ 5)
    assert np.array_equal(result[64:], lanes // 32 * 32 + 3)


def test_bytes_that_a_selector_names() -> None:
    """Written out: bytes 0 to 3 are of the first word, 4 to 7 of the second, and 8 more is the sign of one over and over."""
    inline = """
__forceinline__ __device__ void prmt(uint& d, uint a, uint b, uint c) {
  asm volatile("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
}
"""
    body = "uint d; prmt(d, in[0], in[1], in[2 + threadIdx.x]); out[threadIdx.x] = d;"
    words = [0x33221180, 0x77665544, 0x3210, 0x7531, 0x6420, 0x9008, 0xFFFF0047]
    result = run(kernel(body, 32, "bytes", inline), np.array(words + [0] * 27, np.uint32), 32)
    assert result[:5].tolist() == [0x33221180, 0x77553311, 0x66442280, 0x008080FF, 0x80804477]


def test_bits_that_a_table_names_and_pairs_that_are_multiplied_and_added() -> None:
    """Written out: (a & b) | c is the table 0xEA; 1024 + 16 * 11 and 1024 + 16 * 5, times 1 / 16, less 72, are 3 and -3."""
    inline = """
__forceinline__ __device__ void lop3(uint& d, uint a, uint b, uint c) {
  asm volatile("lop3.b32 %0, %1, %2, %3, 234;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
}
__forceinline__ __device__ void fma2(uint& d, uint a, uint b, uint c) {
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
}
"""
    body = """
      lop3(out[threadIdx.x], in[0], 0x00F000F0u, 0x64006400u);
      fma2(out[32 + threadIdx.x], out[threadIdx.x], 0x2C002C00u, 0xD480D480u);"""
    result = run(kernel(body, 32, "pairs", inline), np.array([0x12B73459], np.uint32), 64)
    assert result[0] == 0x64B06450
    assert result[32:33].view(np.float16).tolist() == [-3, 3]


def test_the_fragments_of_an_mma() -> None:
    """Against the matrices, with the layout of the PTX manual written out: A 16 x 16 by row, B 16 x 8 by column."""
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((16, 16)).astype(np.float16), rng.standard_normal((16, 8)).astype(np.float16)
    words = np.zeros((32, 6), np.uint32)
    for lane in range(32):
        g, t = lane // 4, lane % 4
        for i, (row, column) in enumerate(((g, 2 * t), (g + 8, 2 * t), (g, 2 * t + 8), (g + 8, 2 * t + 8))):
            words[lane, i] = a[row, column : column + 2].view(np.uint32)[0]
        for i, row in enumerate((2 * t, 2 * t + 8)):
            words[lane, 4 + i] = np.ascontiguousarray(b[row : row + 2, g]).view(np.uint32)[0]
    body = """
      uint l = threadIdx.x; const uint* w = in + l * 6; float d[4] = {0.f, 0.f, 0.f, 0.f};
      mma(d[0], d[1], d[2], d[3], w[0], w[1], w[2], w[3], w[4], w[5]);
      memcpy(out + l * 4, d, 16);"""
    result = run(kernel(body, 32, "mma_f16", MMA_F16), words, 128).view(np.float32).reshape(8, 4, 2, 2)
    wanted = a.astype(np.float32) @ b.astype(np.float32)
    found = result.transpose(2, 0, 1, 3).reshape(16, 8)  # rows g and g + 8, columns 2t and 2t + 1
    assert np.allclose(found, wanted, atol=1e-5)


def test_what_was_never_written_is_nan() -> None:
    body = "__shared__ float s[64]; float v = s[threadIdx.x]; memcpy(out + threadIdx.x, &v, 4);"
    assert np.isnan(run(kernel(body), np.zeros(64, np.uint32), 64).view(np.float32)).all()
    assert np.isnan(run(kernel(""), np.zeros(64, np.uint32), 64).view(np.float32)).all()


def test_freed_memory_is_nan() -> None:
    device = EmulatedDevice()
    memory = upload(device, np.ones(8, np.float32))
    address, free, found = memory.address, device.memory()[1], np.zeros(8, np.float32)
    device.read(address, found)
    assert (found == 1).all()
    del memory
    device.read(address, found)
    assert np.isnan(found).all() and device.memory()[1] == free + 32


FAILURES: dict[str, tuple[str, str]] = {
    "divergence": ("if (threadIdx.x % 2) __syncwarp();", "not all lanes reach"),
    "two_operations": ("if (threadIdx.x % 2) __syncwarp(); else __shfl_sync(~0u, 1, 0);", "at different operations"),
    "half_a_barrier": ("if (threadIdx.x < 32) __syncthreads();", "not all threads reach"),
    "overrun": ("out[32 + threadIdx.x] = 1;", "past the end"),
}


@pytest.mark.parametrize("name", FAILURES)
@pytest.mark.parametrize("order", ORDERS)
def test_a_failure_is_an_error_and_the_emulator_goes_on(name: str, order: int) -> None:
    body, message = FAILURES[name]
    with pytest.raises(DeviceError, match=message):
        run(kernel(body, name=name), np.zeros(64, np.uint32), 64, order)
    assert run(kernel("out[threadIdx.x] = 7;", name="after"), np.zeros(64, np.uint32), 64, order).tolist() == [7] * 64


BAD_ACCESSES: dict[str, tuple[str, str]] = {
    "read_past_the_end": ("out[threadIdx.x] = in[threadIdx.x + 1];", "outside of every allocation"),
    "write_before_the_start": ("out[(int)threadIdx.x - 1] = 1;", "outside of every allocation"),
    "misaligned": ("uint4 v = *(uint4*)(in + 1 + threadIdx.x % 2); out[threadIdx.x] = v.x;", "no multiple of its bytes"),
    "past_an_array": (
        "__shared__ uint s[60]; s[threadIdx.x] = in[threadIdx.x]; out[threadIdx.x] = s[0];",
        "outside of its array",
    ),
}


@pytest.mark.parametrize("name", BAD_ACCESSES)
def test_a_bad_access_is_noticed_where_all_are_checked(name: str) -> None:
    body, message = BAD_ACCESSES[name]
    with pytest.raises(DeviceError, match=message):
        run(kernel(body, name=name), np.zeros(64, np.uint32), 64, CHECKED)
    good = """
      __shared__ uint s[64]; s[threadIdx.x] = in[threadIdx.x];
      __syncthreads();
      uint4 v = *(uint4*)(in + 60); out[threadIdx.x] = s[63] + v.w;"""
    assert run(kernel(good, name="good"), np.full(64, 4, np.uint32), 64, CHECKED).tolist() == [8] * 64


def test_a_grid_without_blocks_is_refused() -> None:
    with pytest.raises(DeviceError, match="grid"):
        run(kernel(""), np.zeros(64, np.uint32), 64, blocks=0)


def test_an_unknown_instruction_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="ex2.approx"):
        run(kernel('asm volatile("ex2.approx.f32 %0, %1;" : "=f"(a) : "f"(b));'), np.zeros(64, np.uint32), 64)
