// Words that other GPUs see change, and the time.
#pragma once

#include <cstdint>

namespace jaxmoe {

// Whoever loads the value by LoadAcquireSystem sees all that this thread has written and seen
// before.
__device__ __forceinline__ void StoreReleaseSystem(uint32_t* address, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

__device__ __forceinline__ uint32_t LoadAcquireSystem(const uint32_t* address) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

// Nanoseconds.
__device__ __forceinline__ uint64_t GlobalTimer() {
  uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

}  // namespace jaxmoe
