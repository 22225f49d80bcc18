// What kernels of csrc/peers need of CUDA, on the threads of a CPU: a thread for each thread of a
// grid, barriers for warps and CTAs. Slow, for tests of what kernels say to each other.
#pragma once

#include <atomic>
#include <barrier>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#define __device__
#define __global__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)

using cudaStream_t = void*;
using cudaEvent_t = void*;
enum cudaError_t { cudaSuccess };
struct cudaIpcMemHandle_t {
  char reserved[64];
};

struct uint2 {
  unsigned x, y;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }

struct uint4 {
  unsigned x, y, z, w;
};
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

namespace emulated {

struct Index {
  unsigned x;
};

// Threads that meet, and what they tell each other there.
struct Group {
  explicit Group(unsigned size) : barrier(size) {}

  unsigned Or(unsigned value) {
    word.fetch_or(value);
    barrier.arrive_and_wait();
    const unsigned all = word.load();
    barrier.arrive_and_wait();
    word.store(0);  // by all of them, before any can give a value again
    barrier.arrive_and_wait();
    return all;
  }

  std::barrier<> barrier;
  std::atomic<unsigned> word{0};
};

struct Here {
  Index thread, block, grid, size;
  Group* line;  // 8 lanes of a warp
  Group* warp;
  Group* cta;
  const std::function<void()>* before_reading;  // what others send, once; or null
  bool reads;                                   // it by __ldcg
};
inline thread_local Here here;
// What the last of several CTAs waits for before it begins, in what this thread launches; or null.
inline thread_local const std::function<void()>* before_last = nullptr;

// Runs a kernel to its end. Threads that read what others send call `before_reading` where they
// first do: where that carries flags, all of them may, else those of CTAs from `readers` on, by
// __ldcg.
inline void Launch(unsigned ctas,
                   unsigned threads,
                   const std::function<void()>& kernel,
                   const std::function<void()>* before_reading = nullptr,
                   unsigned readers = 0) {
  std::vector<std::unique_ptr<Group>> groups;
  std::vector<std::thread> running;
  for (unsigned block = 0; block < ctas; ++block) {
    groups.push_back(std::make_unique<Group>(threads));
    Group* cta = groups.back().get();
    Group* line = nullptr;
    Group* warp = nullptr;
    for (unsigned thread = 0; thread < threads; ++thread) {
      if (thread % 8 == 0) {
        groups.push_back(std::make_unique<Group>(8));
        line = groups.back().get();
      }
      if (thread % 32 == 0) {
        groups.push_back(std::make_unique<Group>(32));
        warp = groups.back().get();
      }
      const auto* begins = block > 0 && block == ctas - 1 ? before_last : nullptr;
      running.emplace_back([=, &kernel] {
        if (begins != nullptr) (*begins)();
        const bool reads = readers > 0 && block >= readers;
        here = {{thread}, {block}, {ctas}, {threads}, line, warp, cta, before_reading, reads};
        kernel();
      });
    }
  }
  for (std::thread& thread : running) thread.join();
}

inline void BeginReading() {
  if (const auto* before = std::exchange(here.before_reading, nullptr)) (*before)();
}

}  // namespace emulated

#define threadIdx (emulated::here.thread)
#define blockIdx (emulated::here.block)
#define gridDim (emulated::here.grid)
#define blockDim (emulated::here.size)

inline void __syncthreads() { emulated::here.cta->barrier.arrive_and_wait(); }
inline int __syncthreads_or(int value) { return emulated::here.cta->Or(value != 0); }
inline void __syncwarp() { emulated::here.warp->barrier.arrive_and_wait(); }
inline int __any_sync(unsigned, int value) { return emulated::here.warp->Or(value != 0); }
inline unsigned __reduce_or_sync(unsigned, unsigned value) {
  return emulated::here.warp->Or(value);
}
inline unsigned __ballot_sync(unsigned, int value) {
  return emulated::here.warp->Or(value != 0 ? 1u << threadIdx.x % 32 : 0u);
}
inline unsigned __shfl_sync(unsigned, unsigned value, int lane) {
  return emulated::here.warp->Or(static_cast<int>(threadIdx.x % 32) == lane ? value : 0u);
}
inline int __ffs(unsigned value) { return __builtin_ffs(static_cast<int>(value)); }

// Atomic operations below order what they should; a fence adds nothing that is relied on.
inline void __threadfence_system() {}
inline void __threadfence() {}

inline uint32_t atomicAdd(uint32_t* address, uint32_t value) {
  return std::atomic_ref<uint32_t>(*address).fetch_add(value);
}

inline uint32_t atomicExch(uint32_t* address, uint32_t value) {
  return std::atomic_ref<uint32_t>(*address).exchange(value);
}

template <class T>
T __ldcg(const T* address) {
  if (emulated::here.reads) emulated::BeginReading();
  return *address;
}

template <class T>
T __ldcv(const T* address) {
  return *static_cast<const volatile T*>(address);
}

inline uint32_t __float_as_uint(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

inline float __uint_as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}
