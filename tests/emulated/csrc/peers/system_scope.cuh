// The words of csrc/peers/system_scope.cuh on a CPU.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>

namespace jaxmoe {

inline void StoreReleaseSystem(uint32_t* address, uint32_t value) {
  std::atomic_ref<uint32_t>(*address).store(value, std::memory_order_release);
}

inline uint32_t LoadAcquireSystem(const uint32_t* address) {
  std::this_thread::yield();  // there are more threads than cores
  return std::atomic_ref<uint32_t>(*const_cast<uint32_t*>(address)).load(std::memory_order_acquire);
}

inline void StoreReleaseSystem(uint64_t* address, uint64_t value) {
  std::atomic_ref<uint64_t>(*address).store(value, std::memory_order_release);
}

inline uint64_t LoadAcquireSystem(const uint64_t* address) {
  std::this_thread::yield();
  return std::atomic_ref<uint64_t>(*const_cast<uint64_t*>(address)).load(std::memory_order_acquire);
}

// A word of data and a number, which are written and read at once.
inline void StorePair(uint32_t* address, uint32_t data, uint32_t number) {
  std::atomic_ref<uint64_t>(*reinterpret_cast<uint64_t*>(address))
      .store(static_cast<uint64_t>(number) << 32 | data, std::memory_order_relaxed);
}

inline void StorePairs(uint4* address, uint2 data, uint32_t number) {
  StorePair(&address->x, data.x, number);
  StorePair(&address->z, data.y, number);
}

inline uint4 LoadPairs(const uint4* address) {
  emulated::BeginReading();
  std::this_thread::yield();
  uint64_t words[2];
  for (int i = 0; i < 2; ++i) {
    auto* word = reinterpret_cast<uint64_t*>(const_cast<uint4*>(address)) + i;
    words[i] = std::atomic_ref<uint64_t>(*word).load(std::memory_order_relaxed);
  }
  return {static_cast<uint32_t>(words[0]),
          static_cast<uint32_t>(words[0] >> 32),
          static_cast<uint32_t>(words[1]),
          static_cast<uint32_t>(words[1] >> 32)};
}

inline uint64_t GlobalTimer() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

}  // namespace jaxmoe
