// Asynchronous copies to shared memory by threads.
#pragma once

#include "csrc/common/mbarrier.cuh"

namespace jaxmoe::ptx {

// Copies the first `bytes` of 16, and writes zeros behind them.
__device__ __forceinline__ void CopyAsyncUpTo16(uint32_t dst, const void* src, int bytes) {
  // NOTE: no "memory" clobber: it would keep later index loads behind every copy.
  asm volatile(
      "cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(bytes));
}

// Copies 16 bytes, or writes zeros when `valid` is false.
__device__ __forceinline__ void CopyAsync16(uint32_t dst, const void* src, bool valid) {
  CopyAsyncUpTo16(dst, src, valid ? 16 : 0);
}

// Copies 16 bytes under an L2 policy.
__device__ __forceinline__ void CopyAsync16(uint32_t dst, const void* src, uint64_t policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(dst),
               "l"(src),
               "l"(policy));
}

// Copies four bytes.
__device__ __forceinline__ void CopyAsync4(uint32_t dst, const void* src) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(dst), "l"(src));
}

// The barrier gets this thread's arrival when all its copies so far have landed.
__device__ __forceinline__ void CopyAsyncArrive(uint64_t* bar) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(SmemAddress(bar))
               : "memory");
}

__device__ __forceinline__ void CopyAsyncWaitAll() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

// Ends a group of copies of this thread.
__device__ __forceinline__ void CopyAsyncCommit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits for all groups but the last kLeft.
template <int kLeft>
__device__ __forceinline__ void CopyAsyncWaitGroups() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}

}  // namespace jaxmoe::ptx
