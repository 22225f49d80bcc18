// Copies of whole arrays by all CTAs of a grid.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace jaxmoe {

// All CTAs copy an array in units, perhaps to a second place.
template <class Unit>
__device__ __forceinline__ void CopyUnits(char* to, char* also, const char* from, int64_t bytes) {
  constexpr int kUnits = 4;  // loads of a thread in flight
  const int64_t count = bytes / static_cast<int64_t>(sizeof(Unit));
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (int64_t begin = first; begin < count; begin += kUnits * stride) {
    Unit units[kUnits];
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      const int64_t at = begin + i * stride;
      if (at < count) units[i] = __ldcg(reinterpret_cast<const Unit*>(from) + at);
    }
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      const int64_t at = begin + i * stride;
      if (at >= count) continue;
      reinterpret_cast<Unit*>(to)[at] = units[i];
      if (also != nullptr) reinterpret_cast<Unit*>(also)[at] = units[i];
    }
  }
}

__device__ __forceinline__ void CopyArray(char* to, char* also, const void* from, int64_t bytes) {
  const char* own = static_cast<const char*>(from);
  if ((reinterpret_cast<uintptr_t>(own) | static_cast<uintptr_t>(bytes)) % 16 == 0) {
    CopyUnits<uint4>(to, also, own, bytes);
  } else {
    CopyUnits<uint32_t>(to, also, own, bytes);
  }
}

}  // namespace jaxmoe
