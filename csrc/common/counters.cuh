// PTX: words in global memory by which CTAs tell each other how far they are.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace jaxmoe::ptx {

// Adds one. Whoever then loads the sum by LoadAcquire sees all that this thread has written, and
// all that threads have written which it has met at a barrier.
__device__ __forceinline__ void AddRelease(int* counter) {
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(counter) : "memory");
}

// Flips bits, and returns what was there. Who is second to flip one sees all that the first wrote.
__device__ __forceinline__ int FlipBits(int* word, int bits) {
  int before;
  asm volatile("atom.acq_rel.gpu.global.xor.b32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(word), "r"(bits)
               : "memory");
  return before;
}

// Waits, as a warp, until a word is not 0, unless it is null. The compiler sees no loop here: after
// one it would take the lanes for apart, and make other code of all that the warps of a kernel do.
__device__ __forceinline__ void WaitForWord(const uint32_t* word) {
  asm volatile(
      "{\n"
      ".reg .pred waits;\n"
      ".reg .u32 value;\n"
      "setp.ne.u64 waits, %0, 0;\n"
      "@!waits bra.uni done;\n"
      "again:\n"
      "ld.acquire.sys.global.u32 value, [%0];\n"
      "setp.eq.u32 waits, value, 0;\n"
      "vote.sync.any.pred waits, waits, 0xffffffff;\n"
      "@waits bra.uni again;\n"
      "done:\n"
      "}\n" ::"l"(word)
      : "memory");
}

__device__ __forceinline__ int LoadAcquire(const int* counter) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
  return value;
}

}  // namespace jaxmoe::ptx
