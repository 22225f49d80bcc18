// Kernel launch with optional programmatic dependent launch, and its two device-side halves.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstddef>
#include <initializer_list>

#include "csrc/common/cuda_check.h"

namespace jaxmoe {

// Blocks until every grid this one depends on has finished and its writes are visible. A no-op in a
// grid launched without programmatic serialization, so kernels call it unconditionally.
// NOTE: data written by earlier grids must be read after this and never through the read-only path
// (no __ldg, no `const __restrict__`): that path may serve lines cached before the wait.
__device__ __forceinline__ void GridDependencyWait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next grid in the stream start launching. Call only after GridDependencyWait(), so that
// a grid that starts knows that everything before its predecessor has finished; see
// GridDependency for the exception.
__device__ __forceinline__ void GridDependencyLaunch() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Both, once: at the start of a kernel, or behind work for which it needs nothing of the launch
// before it. Every thread calls it in the end.
//
// `lets_start`: the next grid may start before the launch before this one has finished. Until its
// own wait, which still means that both have, it reads nothing that one writes.
class GridDependency {
 public:
  __device__ __forceinline__ explicit GridDependency(bool later, bool lets_start) : waits_(true) {
    if (lets_start) GridDependencyLaunch();
    if (!later) Meet();
  }

  // Returns whether it was not met before.
  __device__ __forceinline__ bool Meet() {
    if (!waits_) return false;
    GridDependencyWait();
    GridDependencyLaunch();
    waits_ = false;
    return true;
  }

 private:
  bool waits_;
};

// More than 48 KiB, static shared memory included, must be asked for.
// NOTE: a kernel is given all that a block can have, not what this launch needs: sizes of the
// kernels of the plan follow the shape, and a smaller one of another host thread would come in
// between.
template <typename... KernelArgs>
cudaError_t AllowSharedMemory(void (*kernel)(KernelArgs...), size_t smem_bytes) {
  constexpr size_t kDefaultSmemBytes = 40 * 1024;
  constexpr size_t kBlockSmemBytes = 227 * 1024;  // of compute capability 9.0
  if (smem_bytes <= kDefaultSmemBytes) return cudaSuccess;
  cudaFuncAttributes attributes;
  JAXMOE_RETURN_IF_CUDA_ERROR(cudaFuncGetAttributes(&attributes, kernel));
  if (smem_bytes <= static_cast<size_t>(attributes.maxDynamicSharedSizeBytes)) return cudaSuccess;
  return cudaFuncSetAttribute(kernel,
                              cudaFuncAttributeMaxDynamicSharedMemorySize,
                              static_cast<int>(kBlockSmemBytes - attributes.sharedSizeBytes));
}

// Launches `kernel`; with `pdl` it may start before the previous kernel of the stream has finished.
// `cluster` neighbouring blocks run on neighbouring SMs at the same time.
// NOTE: the first launch of an FFI handler must not have `pdl`: what it reads was written, and the
// scratch it writes was read, by kernels of which nothing is known, and later launches rely on it
// (a GEMM reads weights before its wait, and groups written two launches back).
template <typename... KernelArgs, typename... Args>
cudaError_t LaunchClusters(void (*kernel)(KernelArgs...),
                           dim3 grid,
                           dim3 block,
                           int cluster,
                           size_t smem_bytes,
                           cudaStream_t stream,
                           bool pdl,
                           Args&&... args) {
  JAXMOE_RETURN_IF_CUDA_ERROR(AllowSharedMemory(kernel, smem_bytes));
  // The most shared memory and the least L1: an SM changes this split only when it is idle, so with
  // a large L1 the blocks of a GEMM (up to 227 KiB) could not start beside a kernel's last ones.
  JAXMOE_RETURN_IF_CUDA_ERROR(cudaFuncSetAttribute(
      kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared));
  cudaLaunchAttribute attributes[2]{};
  int count = 0;
  if (pdl) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (cluster > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count++].val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  }
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = smem_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = count;
  cudaError_t status = cudaLaunchKernelEx(&config, kernel, static_cast<Args&&>(args)...);
  if (status != cudaSuccess) (void)cudaGetLastError();  // reported here, so not left for others
  return status;
}

template <typename... KernelArgs, typename... Args>
cudaError_t LaunchKernel(void (*kernel)(KernelArgs...),
                         dim3 grid,
                         dim3 block,
                         size_t smem_bytes,
                         cudaStream_t stream,
                         bool pdl,
                         Args&&... args) {
  return LaunchClusters(
      kernel, grid, block, 1, smem_bytes, stream, pdl, static_cast<Args&&>(args)...);
}

// Clusters of a kernel that the current device runs at once. Fewer than its SMs hold CTAs: those of
// a cluster lie in one GPC, and GPCs differ in size.
template <auto kKernel>
cudaError_t GetMaxClusters(dim3 block, int cluster, size_t smem_bytes, int* count) {
  constexpr int kDevices = 64;
  static std::atomic<int> known[kDevices];  // 0: not asked yet
  int device = 0;
  JAXMOE_RETURN_IF_CUDA_ERROR(cudaGetDevice(&device));
  *count = device < kDevices ? known[device].load(std::memory_order_relaxed) : 0;
  if (*count > 0) return cudaSuccess;
  JAXMOE_RETURN_IF_CUDA_ERROR(AllowSharedMemory(kKernel, smem_bytes));
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(cluster);
  config.blockDim = block;
  config.dynamicSmemBytes = smem_bytes;
  config.attrs = &attribute;
  config.numAttrs = 1;
  JAXMOE_RETURN_IF_CUDA_ERROR(cudaOccupancyMaxActiveClusters(count, kKernel, &config));
  if (device < kDevices) known[device].store(*count, std::memory_order_relaxed);
  return cudaSuccess;
}

// Loads kernels on the current device, which their first launch would do otherwise.
template <class... Kernels>
cudaError_t LoadKernels(Kernels... kernels) {
  cudaFuncAttributes attributes;
  for (const void* kernel : {reinterpret_cast<const void*>(kernels)...}) {
    JAXMOE_RETURN_IF_CUDA_ERROR(cudaFuncGetAttributes(&attributes, kernel));
  }
  return cudaSuccess;
}

// Streaming multiprocessors of the current device.
inline cudaError_t GetSmCount(int* sm_count) {
  int device = 0;
  JAXMOE_RETURN_IF_CUDA_ERROR(cudaGetDevice(&device));
  return cudaDeviceGetAttribute(sm_count, cudaDevAttrMultiProcessorCount, device);
}

}  // namespace jaxmoe
