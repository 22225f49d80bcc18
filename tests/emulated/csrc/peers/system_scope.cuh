// The words of csrc/peers/system_scope.cuh on a CPU.
#pragma once

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

inline uint64_t GlobalTimer() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

}  // namespace jaxmoe
