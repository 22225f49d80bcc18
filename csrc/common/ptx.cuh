// Bulk tensor copies, wgmma, stmatrix: the Hopper instructions the kernel is made of.
//
// wgmma comes from CUTLASS's architecture atoms (light headers: no cute tensors, no collectives).
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cutlass/arch/reg_reconfig.h>

#include <cstdint>
#include <cute/arch/mma_sm90_gmma.hpp>
#include <utility>

#include "csrc/common/copy_async.cuh"
#include "csrc/common/mbarrier.cuh"
#include "csrc/common/wgmma_shapes.cuh"

namespace jaxmoe::ptx {

__device__ __forceinline__ void NamedBarrierSync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ---- bulk tensor copies ---------------------------------------------------------------------

__device__ __forceinline__ void PrefetchTensorMap(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(reinterpret_cast<uint64_t>(map)) : "memory");
}

enum class CachePolicy { kEvictFirst, kEvictNormal, kEvictLast };

template <CachePolicy kPolicy>
__device__ __forceinline__ uint64_t CreatePolicy() {
  uint64_t policy;
  if constexpr (kPolicy == CachePolicy::kEvictFirst) {
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  } else if constexpr (kPolicy == CachePolicy::kEvictNormal) {
    asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  } else {
    asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  }
  return policy;
}

__device__ __forceinline__ void TmaLoad2D(
    void* dst, const CUtensorMap* map, uint64_t* bar, int c0, int c1, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(SmemAddress(dst)),
      "l"(reinterpret_cast<uint64_t>(map)),
      "r"(SmemAddress(bar)),
      "r"(c0),
      "r"(c1),
      "l"(policy)
      : "memory");
}

__device__ __forceinline__ void TmaLoad3D(
    void* dst, const CUtensorMap* map, uint64_t* bar, int c0, int c1, int c2, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(SmemAddress(dst)),
      "l"(reinterpret_cast<uint64_t>(map)),
      "r"(SmemAddress(bar)),
      "r"(c0),
      "r"(c1),
      "r"(c2),
      "l"(policy)
      : "memory");
}

// Brings the box into L2.
__device__ __forceinline__ void TmaPrefetch3D(
    const CUtensorMap* map, int c0, int c1, int c2, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.prefetch.tensor.3d.L2.global.tile.L2::cache_hint [%0, {%1, %2, %3}], %4;" ::
          "l"(reinterpret_cast<uint64_t>(map)),
      "r"(c0),
      "r"(c1),
      "r"(c2),
      "l"(policy)
      : "memory");
}

// Writes the box to the same place in every CTA of the cluster whose bit is set, and completes on
// the barrier at the same place in each.
__device__ __forceinline__ void TmaLoad3DMulticast(void* dst,
                                                   const CUtensorMap* map,
                                                   uint64_t* bar,
                                                   int c0,
                                                   int c1,
                                                   int c2,
                                                   uint16_t ctas,
                                                   uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster.L2::cache_hint [%0], [%1, {%3, %4, %5}], [%2], %6, %7;" ::"r"(
          SmemAddress(dst)),
      "l"(reinterpret_cast<uint64_t>(map)),
      "r"(SmemAddress(bar)),
      "r"(c0),
      "r"(c1),
      "r"(c2),
      "h"(ctas),
      "l"(policy)
      : "memory");
}

// Copies `bytes` consecutive bytes, a multiple of 16 from and to multiples of 16.
__device__ __forceinline__ void BulkLoad(
    void* dst, const void* src, uint32_t bytes, uint64_t* bar, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], %4;" ::"r"(SmemAddress(dst)),
      "l"(src),
      "r"(bytes),
      "r"(SmemAddress(bar)),
      "l"(policy)
      : "memory");
}

// ---- proxies ---------------------------------------------------------------------------------

// Makes shared memory written by threads visible to wgmma, and keeps bulk copies that overwrite it
// behind what threads have read.
__device__ __forceinline__ void FenceProxyAsync() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Makes global memory written by threads visible to bulk copies that this thread starts.
__device__ __forceinline__ void FenceProxyAsyncGlobal() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

// ---- wgmma ----------------------------------------------------------------------------------

// Descriptor of a 128-byte-swizzled operand whose 8-row (or 8-k) groups are 1024 bytes apart.
// MN-major and wider than 64: its blocks of 64 are kBlockBytes apart.
template <int kBlockBytes = 16>
__device__ __forceinline__ constexpr uint64_t Swizzle128Descriptor(uint32_t smem_address) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  constexpr uint64_t kStride = uint64_t{1024 >> 4} << 32;
  constexpr uint64_t kLeading = uint64_t{kBlockBytes >> 4} << 16;  // else unused
  return kSwizzle128 | kStride | kLeading | ((smem_address & 0x3FFFF) >> 4);
}

// The same of rows of 32 bytes, k along them, swizzled by halves: 8 of them are 256 bytes.
__device__ __forceinline__ constexpr uint64_t Swizzle32Descriptor(uint32_t smem_address) {
  constexpr uint64_t kSwizzle32 = uint64_t{3} << 62;
  constexpr uint64_t kStride = uint64_t{256 >> 4} << 32;
  constexpr uint64_t kLeading = uint64_t{1} << 16;  // unused
  return kSwizzle32 | kStride | kLeading | ((smem_address & 0x3FFFF) >> 4);
}

// A descriptor moved by bytes. Addresses of shared memory never carry into the fields above them.
__device__ __forceinline__ uint64_t MoveDescriptor(uint64_t descriptor, uint32_t bytes) {
  constexpr uint64_t kFields = 0xFFFFFFFF00000000u;
  return (descriptor & kFields) | (static_cast<uint32_t>(descriptor) + (bytes >> 4));
}

template <class Atom, int kSize, int... kIs>
__device__ __forceinline__ void WgmmaCall(uint64_t a,
                                          uint64_t b,
                                          float (&acc)[kSize],
                                          bool accumulate,
                                          std::integer_sequence<int, kIs...>) {
  Atom::fma(a,
            b,
            acc[kIs]...,
            accumulate ? cute::SM90::GMMA::ScaleOut::One : cute::SM90::GMMA::ScaleOut::Zero);
}

template <class Element, int kN, cute::SM90::GMMA::Major kMajorA, cute::SM90::GMMA::Major kMajorB>
struct WgmmaAtom;

#define JAXMOE_WGMMA_ATOM(N, BF16_ATOM, FP16_ATOM)                            \
  template <cute::SM90::GMMA::Major kMajorA, cute::SM90::GMMA::Major kMajorB> \
  struct WgmmaAtom<__nv_bfloat16, N, kMajorA, kMajorB> {                      \
    using type = BF16_ATOM<kMajorA, kMajorB>;                                 \
  };                                                                          \
  template <cute::SM90::GMMA::Major kMajorA, cute::SM90::GMMA::Major kMajorB> \
  struct WgmmaAtom<__half, N, kMajorA, kMajorB> {                             \
    using type = FP16_ATOM<kMajorA, kMajorB>;                                 \
  }
#define JAXMOE_CUTLASS_ATOM(N)                                        \
  JAXMOE_WGMMA_ATOM(N,                                                \
                    cute::SM90::GMMA::MMA_64x##N##x16_F32BF16BF16_SS, \
                    cute::SM90::GMMA::MMA_64x##N##x16_F32F16F16_SS)
#define JAXMOE_OWN_ATOM(N) JAXMOE_WGMMA_ATOM(N, Mma64x##N##x16F32BF16BF16, Mma64x##N##x16F32F16F16)
JAXMOE_CUTLASS_ATOM(8);
JAXMOE_CUTLASS_ATOM(16);
JAXMOE_CUTLASS_ATOM(32);
JAXMOE_OWN_ATOM(48);
JAXMOE_CUTLASS_ATOM(64);
JAXMOE_OWN_ATOM(80);
JAXMOE_CUTLASS_ATOM(96);
JAXMOE_OWN_ATOM(112);
JAXMOE_CUTLASS_ATOM(128);
JAXMOE_OWN_ATOM(144);
JAXMOE_OWN_ATOM(160);
JAXMOE_CUTLASS_ATOM(256);
#undef JAXMOE_OWN_ATOM
#undef JAXMOE_CUTLASS_ATOM
#undef JAXMOE_WGMMA_ATOM

// FP8: tokens are e4m3, weights either. No transposed operands.
#define JAXMOE_FP8_ATOM(N, E4M3_ATOM, E5M2_ATOM)                                               \
  template <>                                                                                  \
  struct WgmmaAtom<__nv_fp8_e4m3, N, cute::SM90::GMMA::Major::K, cute::SM90::GMMA::Major::K> { \
    using type = E4M3_ATOM;                                                                    \
  };                                                                                           \
  template <>                                                                                  \
  struct WgmmaAtom<__nv_fp8_e5m2, N, cute::SM90::GMMA::Major::K, cute::SM90::GMMA::Major::K> { \
    using type = E5M2_ATOM;                                                                    \
  }
#define JAXMOE_CUTLASS_ATOM(N)                                           \
  JAXMOE_FP8_ATOM(N,                                                     \
                  cute::SM90::GMMA::MMA_64x##N##x32_F32E4M3E4M3_SS_TN<>, \
                  cute::SM90::GMMA::MMA_64x##N##x32_F32E5M2E4M3_SS_TN<>)
#define JAXMOE_OWN_ATOM(N) JAXMOE_FP8_ATOM(N, Mma64x##N##x32F32E4M3E4M3, Mma64x##N##x32F32E5M2E4M3)
JAXMOE_CUTLASS_ATOM(8);
JAXMOE_CUTLASS_ATOM(16);
JAXMOE_CUTLASS_ATOM(32);
JAXMOE_OWN_ATOM(48);
JAXMOE_CUTLASS_ATOM(64);
JAXMOE_OWN_ATOM(80);
JAXMOE_CUTLASS_ATOM(96);
JAXMOE_OWN_ATOM(112);
JAXMOE_CUTLASS_ATOM(128);
JAXMOE_OWN_ATOM(144);
JAXMOE_OWN_ATOM(160);
#undef JAXMOE_OWN_ATOM
#undef JAXMOE_CUTLASS_ATOM
#undef JAXMOE_FP8_ATOM

// acc[64 x kN] (+)= A[64 x k] * B[kN x k]^T, both operands in shared memory, 32 bytes of k. Uses
// the first kN columns of an accumulator that may have more.
template <class Element,
          int kN,
          cute::SM90::GMMA::Major kMajorA,
          cute::SM90::GMMA::Major kMajorB = cute::SM90::GMMA::Major::K,
          int kSize>
__device__ __forceinline__ void Wgmma(uint64_t a,
                                      uint64_t b,
                                      float (&acc)[kSize],
                                      bool accumulate) {
  static_assert(kN / 2 <= kSize, "the accumulator is too small");
  using Atom = typename WgmmaAtom<Element, kN, kMajorA, kMajorB>::type;
  WgmmaCall<Atom>(a, b, acc, accumulate, std::make_integer_sequence<int, kN / 2>{});
}

// The same of tokens [64 x k], which are e4m3, and 128 FP8 weight rows.
template <class Weight>
__device__ __forceinline__ void WgmmaTokensOnM(uint64_t tokens,
                                               uint64_t weights,
                                               float (&acc)[64],
                                               bool accumulate) {
  using Atom = std::conditional_t<std::is_same_v<Weight, __nv_fp8_e5m2>,
                                  cute::SM90::GMMA::MMA_64x128x32_F32E4M3E5M2_SS_TN<>,
                                  cute::SM90::GMMA::MMA_64x128x32_F32E4M3E4M3_SS_TN<>>;
  WgmmaCall<Atom>(tokens, weights, acc, accumulate, std::make_integer_sequence<int, 64>{});
}

// wgmma whose A is in registers: row lane / 4 + 8 (j % 2) of a warp's 16, k 2 (lane % 4) + 8 (j /
// 2) and the next of a[j].
template <class Element, int kN>
struct WgmmaRegistersAtom;

// Of e4m3 k 4 (lane % 4) + 16 (j / 2) and the next three.
#define JAXMOE_CUTLASS_ATOM(N)                                          \
  template <>                                                           \
  struct WgmmaRegistersAtom<__nv_fp8_e4m3, N> {                         \
    using type = cute::SM90::GMMA::MMA_64x##N##x32_F32E4M3E4M3_RS_TN<>; \
  };
JAXMOE_CUTLASS_ATOM(64)
JAXMOE_CUTLASS_ATOM(96)
JAXMOE_CUTLASS_ATOM(128)
#undef JAXMOE_CUTLASS_ATOM
#define JAXMOE_CUTLASS_ATOM(N)                                                                 \
  template <>                                                                                  \
  struct WgmmaRegistersAtom<__nv_bfloat16, N> {                                                \
    using type = cute::SM90::GMMA::MMA_64x##N##x16_F32BF16BF16_RS<cute::SM90::GMMA::Major::K,  \
                                                                  cute::SM90::GMMA::Major::K>; \
  };                                                                                           \
  template <>                                                                                  \
  struct WgmmaRegistersAtom<__half, N> {                                                       \
    using type = cute::SM90::GMMA::MMA_64x##N##x16_F32F16F16_RS<cute::SM90::GMMA::Major::K,    \
                                                                cute::SM90::GMMA::Major::K>;   \
  }
#define JAXMOE_OWN_ATOM(N)                           \
  template <>                                        \
  struct WgmmaRegistersAtom<__nv_bfloat16, N> {      \
    using type = Mma64x##N##x16F32BF16BF16Registers; \
  };                                                 \
  template <>                                        \
  struct WgmmaRegistersAtom<__half, N> {             \
    using type = Mma64x##N##x16F32F16F16Registers;   \
  }
JAXMOE_CUTLASS_ATOM(32);
JAXMOE_OWN_ATOM(48);
JAXMOE_CUTLASS_ATOM(64);
JAXMOE_CUTLASS_ATOM(96);
JAXMOE_CUTLASS_ATOM(128);
JAXMOE_OWN_ATOM(160);
#undef JAXMOE_CUTLASS_ATOM
#undef JAXMOE_OWN_ATOM

template <class Atom, int kSize, int... kIs>
__device__ __forceinline__ void WgmmaRegistersCall(const uint32_t (&a)[4],
                                                   uint64_t b,
                                                   float (&acc)[kSize],
                                                   bool accumulate,
                                                   std::integer_sequence<int, kIs...>) {
  Atom::fma(a[0],
            a[1],
            a[2],
            a[3],
            b,
            acc[kIs]...,
            accumulate ? cute::SM90::GMMA::ScaleOut::One : cute::SM90::GMMA::ScaleOut::Zero);
}

// acc[64 x kN] (+)= A[64 x k] * B[kN x k]^T, k 16 or of FP8 32, A in registers, B in shared memory
// with k along its rows.
template <class Element, int kN, int kSize>
__device__ __forceinline__ void WgmmaRegisters(const uint32_t (&a)[4],
                                               uint64_t b,
                                               float (&acc)[kSize],
                                               bool accumulate) {
  static_assert(kN / 2 <= kSize, "the accumulator is too small");
  using Atom = typename WgmmaRegistersAtom<Element, kN>::type;
  WgmmaRegistersCall<Atom>(a, b, acc, accumulate, std::make_integer_sequence<int, kN / 2>{});
}

// acc[16 x 8] += A[16 x 16] * B[8 x 16]^T of one warp: A as WgmmaRegisters has it, accumulators as
// wgmma has 8 columns of a warp's rows.
template <class Element>
__device__ __forceinline__ void MmaWarp(const uint32_t (&a)[4],
                                        uint32_t b0,
                                        uint32_t b1,
                                        float* acc) {
  static_assert(std::is_same_v<Element, __nv_bfloat16> || std::is_same_v<Element, __half>);
  if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// Loads four 8x8 matrices of 16-bit elements; lanes 8 i to 8 i + 7 give the addresses of the rows
// of matrix i.
__device__ __forceinline__ void LoadMatrix4(uint32_t row, uint32_t (&m)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(row)
               : "memory");
}

// The same of transposed matrices.
__device__ __forceinline__ void LoadMatrix4Transposed(uint32_t row, uint32_t (&m)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(row)
               : "memory");
}

// Hides how a value was computed, so that it is kept and not computed again.
__device__ __forceinline__ void KeepInRegister(int& value) { asm volatile("" : "+r"(value)); }

// Keeps registers that wgmma reads from being moved across its issue or its end.
template <int kSize>
__device__ __forceinline__ void FenceRegisters(uint32_t (&a)[kSize]) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    asm volatile("" : "+r"(a[i])::"memory");
  }
}

template <int kSize>
__device__ __forceinline__ void FenceAccumulator(float (&acc)[kSize]) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    asm volatile("" : "+f"(acc[i])::"memory");
  }
}

// ---- stores ---------------------------------------------------------------------------------

// Stores two 8x8 matrices of 16-bit elements, each transposed: lane i of the first 8 gives the
// address of row i of the first matrix, lanes 8-15 those of the second.
__device__ __forceinline__ void StoreMatrix2Transposed(void* row, uint32_t a, uint32_t b) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(SmemAddress(row)),
      "r"(a),
      "r"(b)
      : "memory");
}

// Stores four of them as they are: lanes 8 i to 8 i + 7 give the addresses of the rows of matrix i.
__device__ __forceinline__ void StoreMatrix4(
    void* row, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(SmemAddress(row)),
      "r"(a),
      "r"(b),
      "r"(c),
      "r"(d)
      : "memory");
}

template <class Element>
__device__ __forceinline__ uint32_t Pack2(float lo, float hi);

template <>
__device__ __forceinline__ uint32_t Pack2<__nv_bfloat16>(float lo, float hi) {
  __nv_bfloat162 v = __floats2bfloat162_rn(lo, hi);
  return reinterpret_cast<uint32_t&>(v);
}

template <>
__device__ __forceinline__ uint32_t Pack2<__half>(float lo, float hi) {
  __half2 v = __floats2half2_rn(lo, hi);
  return reinterpret_cast<uint32_t&>(v);
}

// Floats to e4m3; beyond 448 they become 448, NaN stays NaN.
__device__ __forceinline__ uint16_t PackE4M3(float a, float b) {
  return __nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE, __NV_E4M3);
}

__device__ __forceinline__ uint32_t PackE4M3(float a, float b, float c, float d) {
  return PackE4M3(a, b) | static_cast<uint32_t>(PackE4M3(c, d)) << 16;
}

__device__ __forceinline__ float ToFloat(__nv_bfloat16 v) { return __bfloat162float(v); }
__device__ __forceinline__ float ToFloat(__half v) { return __half2float(v); }
__device__ __forceinline__ float ToFloat(float v) { return v; }

template <class Element>
__device__ __forceinline__ Element FromFloat(float v);
template <>
__device__ __forceinline__ __nv_bfloat16 FromFloat<__nv_bfloat16>(float v) {
  return __float2bfloat16_rn(v);
}
template <>
__device__ __forceinline__ __half FromFloat<__half>(float v) {
  return __float2half_rn(v);
}

}  // namespace jaxmoe::ptx
