// Launches source_groups.
#include "csrc/common/types.h"
#include "csrc/kernels/source_groups.cuh"

namespace jaxmoe {

cudaError_t LaunchSourceGroups(const SourceGroupsParams& params, cudaStream_t stream) {
  if (params.num_ranges > kMaxSourceRanges) return cudaErrorInvalidValue;
  const int64_t groups = int64_t{params.num_ranges} * params.num_experts;
  if (groups == 0) return cudaSuccess;
  return LaunchKernel(SourceGroupsKernel,
                      dim3(static_cast<unsigned>(CeilDiv(groups, kSourceGroupsThreads))),
                      dim3(kSourceGroupsThreads),
                      0,
                      stream,
                      params.pdl,
                      params);
}

}  // namespace jaxmoe
