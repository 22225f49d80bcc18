// A piece of a row of floats: loaded at once, unpacked to float32, packed again.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace jaxmoe {

// Part of a row that a thread moves at once: 16 bytes, or one element.
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

}  // namespace jaxmoe
