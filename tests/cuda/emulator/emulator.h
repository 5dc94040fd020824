// What the text of a generated CUDA kernel needs to compile and run on a CPU.
//
// Every CUDA thread is a fiber.  The lanes of a warp run one after another until each has arrived at a warp operation (a shuffle,
// an mma, a barrier of the warp); the last to arrive computes it for all of them.  Warps run one after another until each waits at
// the barrier of the block.  emulated.py translates inline assembly into the functions `ptx_...`; what is not here does not compile.
#pragma once
// C headers: those of C++ take longer to read than a kernel to compile.
#include <math.h>
#include <stdint.h>
#include <string.h>

#define __global__
#define __device__
#define __forceinline__ inline
#define __restrict__ __restrict
#define __launch_bounds__(...)
// All static shared memory lies in one section, so that it can be poisoned before every block.
#define __shared__ static __attribute__((section("emulated_shared")))
#define uint unsigned int
#define uchar unsigned char
#define ushort unsigned short

struct Index { unsigned x, y, z; };

union Operands {
  uint32_t words[16];
  float floats[16];
};

struct Lane {  // the part of a thread that kernels see
  Index thread, block;
  Operands in, out;
};

extern "C" {
extern Lane *emulated_lane;
void emulated_meet(int operation);
void emulated_barrier();
void emulated_copy_later(void *to, const void *from);
void emulated_copies_commit();
void emulated_copies_wait(int pending);
void emulated_arrive(const void *counter);
void emulated_fence();
void emulated_fail(const char *message);
}
enum { SHUFFLE, SHUFFLE_XOR, SYNC_WARP, MMA_F16, MMA_U8S8 };

#define threadIdx (emulated_lane->thread)
#define blockIdx (emulated_lane->block)

struct half {
  uint16_t bits;
  half() = default;
#if defined(__F16C__)
  half(float v) {
    typedef float Floats __attribute__((vector_size(16)));
    typedef short Shorts __attribute__((vector_size(16)));
    Shorts rounded = __builtin_ia32_vcvtps2ph(Floats{v}, 0);
    bits = uint16_t(rounded[0]);
  }
  operator float() const {
    typedef short Shorts __attribute__((vector_size(16)));
    return __builtin_ia32_vcvtph2ps(Shorts{short(bits)})[0];
  }
#else
  half(float v) { __fp16 h = v; memcpy(&bits, &h, 2); }
  operator float() const { __fp16 h; memcpy(&h, &bits, 2); return h; }
#endif
};
struct alignas(4) half2 { half x, y; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };

template <class T> inline T max(T a, T b) { return a < b ? b : a; }
template <class T> inline T min(T a, T b) { return b < a ? b : a; }
inline float max(float a, float b) { return fmaxf(a, b); }
inline float min(float a, float b) { return fminf(a, b); }

inline void __syncthreads() { emulated_barrier(); }
inline void __syncwarp(unsigned = ~0u) { emulated_meet(SYNC_WARP); }

template <class T> inline T exchanged(T value, unsigned from, int operation) {
  static_assert(sizeof(T) == 4, "shuffles of four bytes");
  Lane *lane = emulated_lane;
  memcpy(&lane->in.words[0], &value, 4);
  lane->in.words[1] = from;
  emulated_meet(operation);
  memcpy(&value, &lane->out.words[0], 4);
  return value;
}
template <class T> inline T __shfl_sync(unsigned, T value, int from, int = 32) { return exchanged(value, from, SHUFFLE); }
template <class T> inline T __shfl_xor_sync(unsigned, T value, int mask, int = 32) { return exchanged(value, mask, SHUFFLE_XOR); }

extern char __start_emulated_shared[] __attribute__((weak, visibility("hidden")));
extern char __stop_emulated_shared[] __attribute__((weak, visibility("hidden")));
inline unsigned __cvta_generic_to_shared(const void *p) { return unsigned((const char *)p - __start_emulated_shared); }

// Kernels have hundreds of these three: as calls they take g++ half as long.
#define CALLED __attribute__((noinline)) inline
CALLED uint32_t sub_f16x2(uint32_t a, uint32_t b) {
  half x[2], y[2];
  memcpy(x, &a, 4), memcpy(y, &b, 4);
  for (int i = 0; i < 2; ++i) x[i] = half(float(x[i]) - float(y[i]));
  memcpy(&a, x, 4);
  return a;
}
CALLED uint32_t fma_f16x2(uint32_t a, uint32_t b, uint32_t c) {
  half x[2], y[2], z[2];
  memcpy(x, &a, 4), memcpy(y, &b, 4), memcpy(z, &c, 4);
  // A float holds products of two numbers of 11 bits, and the sums that kernels make of them; others are rounded twice.
  for (int i = 0; i < 2; ++i) x[i] = half(__builtin_fmaf(float(x[i]), float(y[i]), float(z[i])));
  memcpy(&a, x, 4);
  return a;
}
// Each bit is that of the table which the three bits of a, b and c name.
CALLED uint32_t lop3(uint32_t a, uint32_t b, uint32_t c, int table) {
  uint32_t found = 0;
  for (int i = 0; i < 8; ++i)
    if (table >> i & 1) found |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
  return found;
}
inline void ptx_sub_rn_f16x2(uint32_t &d, uint32_t a, uint32_t b) { d = sub_f16x2(a, b); }
inline void ptx_fma_rn_f16x2(uint32_t &d, uint32_t a, uint32_t b, uint32_t c) { d = fma_f16x2(a, b, c); }
inline void ptx_lop3_b32(uint32_t &d, uint32_t a, uint32_t b, uint32_t c, int table) { d = lop3(a, b, c, table); }
inline void ptx_mov_s32(int32_t &d, int32_t a) { d = a; }
// Blocks run one after another, so what one adds the next finds.  It is how a block tells that it has come.
template <typename T> T atomicAdd(T *address, T value) {
  emulated_arrive(address);
  T old = *address;
  return *address = old + value, old;
}
inline void __threadfence() { emulated_fence(); }
inline void ptx_add_rn_f32(float &d, float a, float b) { d = a + b; }
inline void ptx_sub_rn_f32(float &d, float a, float b) { d = a - b; }
// Each of the four bytes is that of the eight of a and b which four bits of the selector name, or its sign over and over.
inline void ptx_prmt_b32(uint32_t &d, uint32_t a, uint32_t b, uint32_t selector) {
  uint64_t bytes = uint64_t(b) << 32 | a;
  uint32_t found = 0;
  for (int i = 0; i < 4; ++i) {
    uint32_t which = selector >> 4 * i & 15, byte = uint32_t(bytes >> 8 * (which & 7)) & 255;
    found |= (which & 8 ? (byte & 128 ? 255u : 0u) : byte) << 8 * i;
  }
  d = found;
}
inline void ptx_prefetch_global_L2(const void *) {}
inline void ptx_mul_rn_f32(float &d, float a, float b) { d = a * b; }
inline void ptx_fma_rn_f32(float &d, float a, float b, float c) { d = __builtin_fmaf(a, b, c); }
inline void ptx_cp_async_commit_group() { emulated_copies_commit(); }
inline void ptx_cp_async_wait_group(int pending) { emulated_copies_wait(pending); }
inline void ptx_cp_async_cg_shared_global(unsigned to, const void *from, int bytes) {
  if (bytes != 16) emulated_fail("cp.async of other than 16 bytes");
  emulated_copy_later(__start_emulated_shared + to, from);
}
inline void ptx_mma_sync_aligned_m16n8k16_row_col_f32_f16_f16_f32(
    float &d0, float &d1, float &d2, float &d3, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1,
    float c0, float c1, float c2, float c3) {
  Lane *lane = emulated_lane;
  lane->in = {{a0, a1, a2, a3, b0, b1}};
  float *c = lane->in.floats + 6;
  c[0] = c0, c[1] = c1, c[2] = c2, c[3] = c3;
  emulated_meet(MMA_F16);
  const float *d = lane->out.floats;
  d0 = d[0], d1 = d[1], d2 = d[2], d3 = d[3];
}
inline void ptx_mma_sync_aligned_m16n8k32_row_col_s32_u8_s8_s32(
    uint32_t &d0, uint32_t &d1, uint32_t &d2, uint32_t &d3, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
    uint32_t b1, uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3) {
  Lane *lane = emulated_lane;
  lane->in = {{a0, a1, a2, a3, b0, b1, c0, c1, c2, c3}};
  emulated_meet(MMA_U8S8);
  const uint32_t *d = lane->out.words;
  d0 = d[0], d1 = d[1], d2 = d[2], d3 = d[3];
}
