// Device code of finalize: the weighted sum of each token's expert rows.
//
// Problem: y[t,h] = sum_k weights[t,k] * rows[slot_to_row[t,k], h] + residual[t,h]; fp32, k = 0
//   first, residual last, one rounding. Slots outside [0,R) are skipped, so that whatever their row
//   or weight would be (NaN too) cannot reach the sum.
// Threads: one per 16-byte piece of a row of y (one per element where rows are not such multiples),
//   flattened over (t, piece). Row loads in flight a thread: 2, 4 or 8 by K, with fewer registers
//   and so more threads for the small ones: 48 to 96 KiB an SM. No shared memory.
// Bytes: (R + T) H s plus T H s of a residual; at 4.3 TB/s qwen3 T = 4096 35 us (measured 40), T =
//   16384 140 (143), deepseek 123 (128), gpt-oss 27 (38 with 8 loads and 24 warps an SM; 32
//   predicted with 4 and 40). At T <= 64 the time is three dependent trips to memory: 2 us.
// Why this shape: a block per token leaves most SMs idle at T = 1; scatter with atomics would save
//   the read of rows and lose the order of the sum.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "csrc/common/launch.h"
#include "csrc/kernels/finalize.h"

namespace jaxmoe {

inline constexpr int kFinalizeMaxThreads = 256;

// Blocks that registers must leave room for: 40, 48 or 80 registers.
constexpr int FinalizeBlocksPerSm(int unroll) { return unroll <= 2 ? 6 : unroll <= 4 ? 5 : 3; }

// What a thread moves of a row: 16 bytes, or one element.
template <typename T, int kSize>
struct Piece;

template <typename T>
struct Piece<T, 16 / sizeof(T)> {
  static_assert(sizeof(T) == 2 || sizeof(T) == 4, "a 32-bit word holds one or two elements");
  static constexpr int kPerWord = 4 / sizeof(T);
  using Bits = uint4;

  // Rows are used once: L2 only. NOTE: not __ldg, see GridDependencyWait.
  static __device__ __forceinline__ Bits Load(const Bits* address) { return __ldcg(address); }

  // NOTE: rows stay packed until they are added; unpacked early, 8 of them spill.
  static __device__ __forceinline__ void Unpack(Bits bits, float* values) {
    const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (std::is_same_v<T, float>) {
        values[i] = __uint_as_float(words[i]);
      } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
        values[2 * i] = __uint_as_float(words[i] << 16);
        values[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
      } else {
        __half2_raw raw{static_cast<uint16_t>(words[i]), static_cast<uint16_t>(words[i] >> 16)};
        float2 pair = __half22float2(__half2(raw));
        values[2 * i] = pair.x;
        values[2 * i + 1] = pair.y;
      }
    }
  }

  static __device__ __forceinline__ Bits Pack(const float* values) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (std::is_same_v<T, float>) {
        words[i] = __float_as_uint(values[i]);
      } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
        __nv_bfloat162_raw raw = __floats2bfloat162_rn(values[2 * i], values[2 * i + 1]);
        words[i] = raw.x | static_cast<uint32_t>(raw.y) << 16;
      } else {
        __half2_raw raw = __floats2half2_rn(values[2 * i], values[2 * i + 1]);
        words[i] = raw.x | static_cast<uint32_t>(raw.y) << 16;
      }
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
  }
};

template <typename T>
struct Piece<T, 1> {
  using Bits = T;

  static __device__ __forceinline__ Bits Load(const Bits* address) { return *address; }

  static __device__ __forceinline__ void Unpack(Bits bits, float* values) {
    *values = static_cast<float>(bits);
  }

  static __device__ __forceinline__ Bits Pack(const float* values) { return T(*values); }
};

// T: element type. kSize: elements a thread sums. kUnroll: row loads in flight.
template <typename T, int kSize, int kUnroll>
__global__ void __launch_bounds__(kFinalizeMaxThreads, FinalizeBlocksPerSm(kUnroll))
    FinalizeKernel(FinalizeParams params, unsigned row_pieces) {
  using P = Piece<T, kSize>;
  using Bits = typename P::Bits;
  GridDependencyWait();
  GridDependencyLaunch();

  const int64_t index = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t token = index / row_pieces;
  const unsigned column = static_cast<unsigned>(index % row_pieces);
  if (token >= params.num_tokens) return;
  const Bits* rows = static_cast<const Bits*>(params.rows) + column;  // row stride: row_pieces
  const int top_k = static_cast<int>(params.top_k);
  const unsigned num_rows = static_cast<unsigned>(params.num_rows);  // negative slots are larger
  const int32_t* slots = params.slot_to_row + token * top_k;
  const float* weights = params.weights + token * top_k;

  Bits residual{};  // read early, added last
  if (params.residual != nullptr) {
    residual = P::Load(static_cast<const Bits*>(params.residual) + index);
  }
  float sum[kSize];
  float term[kSize];
#pragma unroll
  for (int i = 0; i < kSize; ++i) sum[i] = 0.0f;
  for (int k = 0; k < top_k; k += kUnroll) {
    bool valid[kUnroll];
    float weight[kUnroll];
    Bits bits[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      int row = k + u < top_k ? slots[k + u] : -1;
      weight[u] = k + u < top_k ? weights[k + u] : 0.0f;
      valid[u] = static_cast<unsigned>(row) < num_rows;
      bits[u] = Bits{};
      if (valid[u]) bits[u] = P::Load(rows + static_cast<int64_t>(row) * row_pieces);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (!valid[u]) continue;
      P::Unpack(bits[u], term);
#pragma unroll
      for (int i = 0; i < kSize; ++i) sum[i] = fmaf(weight[u], term[i], sum[i]);
    }
  }
  if (params.residual != nullptr) {
    P::Unpack(residual, term);
#pragma unroll
    for (int i = 0; i < kSize; ++i) sum[i] += term[i];
  }
  static_cast<Bits*>(params.y)[index] = P::Pack(sum);
}

}  // namespace jaxmoe
