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

__device__ __forceinline__ void StoreReleaseSystem(uint64_t* address, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

__device__ __forceinline__ uint64_t LoadAcquireSystem(const uint64_t* address) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
}

// Two words of data, each with a number beside it in the same 8 bytes, which arrive together.
__device__ __forceinline__ void StorePairs(uint4* address, uint2 data, uint32_t number) {
  asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address),
               "r"(data.x),
               "r"(number),
               "r"(data.y),
               "r"(number)
               : "memory");
}

// 16 bytes of a line of 128, see lines.cuh. All lanes of the line store theirs in one instruction.
__device__ __forceinline__ void StoreLine(uint4* address, uint4 data) {
  asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address),
               "r"(data.x),
               "r"(data.y),
               "r"(data.z),
               "r"(data.w)
               : "memory");
}

// What lies there now, whoever has written it.
__device__ __forceinline__ uint4 LoadNow(const uint4* address) {
  uint4 data;
  asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(data.x), "=r"(data.y), "=r"(data.z), "=r"(data.w)
               : "l"(address)
               : "memory");
  return data;
}

// Nanoseconds.
__device__ __forceinline__ uint64_t GlobalTimer() {
  uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

}  // namespace jaxmoe
