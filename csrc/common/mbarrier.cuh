// Barriers in shared memory, and the neighbours of a CTA in its cluster.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace jaxmoe::ptx {

__device__ __forceinline__ uint32_t SmemAddress(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ void BarrierInit(uint64_t* bar, uint32_t count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(SmemAddress(bar)), "r"(count));
}

__device__ __forceinline__ void BarrierInitFence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void BarrierArrive(uint64_t* bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(SmemAddress(bar)) : "memory");
}

__device__ __forceinline__ void BarrierArriveExpectTx(uint64_t* bar, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(SmemAddress(bar)),
               "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void BarrierWait(uint64_t* bar, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "WAIT_%=:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra WAIT_%=;\n"
      "}\n" ::"r"(SmemAddress(bar)),
      "r"(parity)
      : "memory");
}

// Whether the phase is over, at once: try_wait may suspend the thread until it is.
__device__ __forceinline__ bool BarrierTest(uint64_t* bar, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;\n"
      "}\n"
      : "=r"(done)
      : "r"(SmemAddress(bar)), "r"(parity)
      : "memory");
  return done != 0;
}

// Arrives at the barrier that has this one's address in CTA `rank` of the cluster.
// NOTE: not .release.cluster, nor .acquire.cluster in BarrierWait: they compile to a membar.gl
// (about a microsecond) and an invalidation of L1. So only shared memory may be handed over by
// these barriers, written by bulk copies or st.async, whose own completion makes it visible, or
// released by reads that have their results.
__device__ __forceinline__ void BarrierArriveAt(uint64_t* bar, int rank) {
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
      "}\n" ::"r"(SmemAddress(bar)),
      "r"(rank)
      : "memory");
}

__device__ __forceinline__ int ClusterRank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
}

// Every thread of every CTA of the cluster; makes the barriers visible that were initialised before
// BarrierInitFence, and nothing else: a release would cost about a microsecond.
__device__ __forceinline__ void ClusterArriveInit() {
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
}
__device__ __forceinline__ void ClusterWait() {
  asm volatile("barrier.cluster.wait;" ::: "memory");
}
__device__ __forceinline__ void ClusterSyncInit() {
  ClusterArriveInit();
  ClusterWait();
}

// CTAs of the cluster, 1 without one.
__device__ __forceinline__ int ClusterSize() {
  int size;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return size;
}

// Loads 16 bytes of shared memory of another CTA of the cluster, at the place that `address` is in
// this one's.
__device__ __forceinline__ float4 LoadFrom(const void* address, int rank) {
  float4 v;
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %4, %5;\n"
      "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [remote];\n"
      "}\n"
      : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
      : "r"(SmemAddress(address)), "r"(rank)
      : "memory");
  return v;
}

// Every thread of every CTA of the cluster.
__device__ __forceinline__ void ClusterSync() {
  asm volatile("barrier.cluster.arrive;\nbarrier.cluster.wait;" ::: "memory");
}

// Arrives at the barrier of CTA `rank`, which is to await `bytes` more.
__device__ __forceinline__ void BarrierArriveExpectTxAt(uint64_t* bar, int rank, uint32_t bytes) {
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.expect_tx.shared::cluster.b64 _, [remote], %2;\n"
      "}\n" ::"r"(SmemAddress(bar)),
      "r"(rank),
      "r"(bytes)
      : "memory");
}

// Writes 16 bytes at this address in CTA `rank` of the cluster; whoever waits at its barrier, which
// counts them, sees them.
__device__ __forceinline__ void StoreAsyncAt(void* address, uint64_t* bar, int rank, int4 value) {
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      ".reg .b32 remote_bar;\n"
      "mapa.shared::cluster.u32 remote, %0, %2;\n"
      "mapa.shared::cluster.u32 remote_bar, %1, %2;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [remote], {%3, %4, %5, %6}, "
      "[remote_bar];\n"
      "}\n" ::"r"(SmemAddress(address)),
      "r"(SmemAddress(bar)),
      "r"(rank),
      "r"(value.x),
      "r"(value.y),
      "r"(value.z),
      "r"(value.w)
      : "memory");
}

// The same for 4 bytes.
__device__ __forceinline__ void StoreAsyncAt(int* address, uint64_t* bar, int rank, int value) {
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      ".reg .b32 remote_bar;\n"
      "mapa.shared::cluster.u32 remote, %0, %2;\n"
      "mapa.shared::cluster.u32 remote_bar, %1, %2;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [remote], %3, [remote_bar];\n"
      "}\n" ::"r"(SmemAddress(address)),
      "r"(SmemAddress(bar)),
      "r"(rank),
      "r"(value)
      : "memory");
}

// The same for 8 bytes.
__device__ __forceinline__ void StoreAsyncAt(int2* address, uint64_t* bar, int rank, int2 value) {
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      ".reg .b32 remote_bar;\n"
      "mapa.shared::cluster.u32 remote, %0, %2;\n"
      "mapa.shared::cluster.u32 remote_bar, %1, %2;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [remote], {%3, %4}, "
      "[remote_bar];\n"
      "}\n" ::"r"(SmemAddress(address)),
      "r"(SmemAddress(bar)),
      "r"(rank),
      "r"(value.x),
      "r"(value.y)
      : "memory");
}

}  // namespace jaxmoe::ptx
