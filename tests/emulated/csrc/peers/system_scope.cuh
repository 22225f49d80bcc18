// The words of csrc/peers/system_scope.cuh on a CPU.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
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

inline std::atomic_ref<uint64_t> HalfOf16(const uint4* address, int half) {
  return std::atomic_ref<uint64_t>(
      *(reinterpret_cast<uint64_t*>(const_cast<uint4*>(address)) + half));
}

// The last 16 bytes of a line are there when all others are, and no sooner. These come one by one.
inline void StoreLine(uint4* address, uint4 data) {
  const bool is_last = threadIdx.x % 8 == 7;
  if (is_last) emulated::here.line->barrier.arrive_and_wait();
  std::this_thread::yield();
  HalfOf16(address, 0).store(static_cast<uint64_t>(data.y) << 32 | data.x);
  HalfOf16(address, 1).store(static_cast<uint64_t>(data.w) << 32 | data.z);
  if (!is_last) emulated::here.line->barrier.arrive_and_wait();
}

// Lanes of a line do not read at once: what the last one finds may have come after the others have
// read. Where it begins anew it waits a while for just that, so however fast the machine is, some
// line comes between their reading and its own; not with JAXMOE_EMULATED_AT_ONCE, where what lies
// there from before is to be read.
inline uint4 LoadNow(const uint4* address) {
  emulated::BeginReading();
  std::this_thread::yield();
  static thread_local const uint4* const first = address;
  static const bool waits = std::getenv("JAXMOE_EMULATED_AT_ONCE") == nullptr;
  if (threadIdx.x % 8 == 7 && address == first && waits) {
    const auto before = HalfOf16(address, 0).load();
    for (int ms = 0; ms < 20 && HalfOf16(address, 0).load() == before; ++ms) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
  const uint64_t words[2] = {HalfOf16(address, 0).load(), HalfOf16(address, 1).load()};
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
