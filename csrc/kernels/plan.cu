// Launches the plan kernels: one for small problems, three for large ones.
#include <algorithm>

#include "csrc/kernels/plan.cuh"

namespace jaxmoe {

namespace {

constexpr int64_t kMaxGrid = 0x7fffffff;

cudaError_t LaunchPlanSmall(const PlanParams& p, cudaStream_t stream) {
  int64_t rows = p.num_tokens * p.top_k;
  int64_t iters = CeilDiv(rows, kPlanSmallMaxThreads);  // slots per thread
  int64_t row_warps = iters > 0 ? CeilDiv(rows, iters * kWarpSize) : 0;
  // One thread per slot and one per expert.
  int64_t threads = std::max<int64_t>(row_warps * kWarpSize, RoundUp(p.num_local_experts, 32));
  threads = std::clamp<int64_t>(threads, 128, kPlanSmallMaxThreads);
  int64_t counts_bytes = RoundUp(row_warps * p.num_local_experts * sizeof(uint16_t), 16);
  return LaunchKernel(PlanSmallKernel,
                      dim3(static_cast<unsigned>(p.batch)),
                      dim3(static_cast<unsigned>(threads)),
                      counts_bytes + rows * sizeof(int32_t),
                      stream,
                      p.pdl,
                      p,
                      static_cast<int>(row_warps),
                      static_cast<int>(iters),
                      static_cast<int>(counts_bytes));
}

cudaError_t LaunchPlanLarge(const PlanParams& p, cudaStream_t stream) {
  int64_t rows = p.num_tokens * p.top_k;
  int64_t chunk_rows = PlanChunkRows(rows);
  int chunks = static_cast<int>(std::max<int64_t>(1, CeilDiv(rows, chunk_rows)));
  int64_t expert_blocks = CeilDiv(p.num_local_experts, kWarpSize);
  if (p.batch * chunks > kMaxGrid || p.batch * expert_blocks > kMaxGrid) {
    return cudaErrorInvalidConfiguration;
  }
  dim3 chunk_grid(static_cast<unsigned>(p.batch * chunks));
  dim3 chunk_block(kPlanLargeThreads);
  JAXMOE_RETURN_IF_CUDA_ERROR(LaunchKernel(
      PlanCountKernel, chunk_grid, chunk_block, 0, stream, p.pdl, p, chunks, chunk_rows));
  if (expert_blocks > 0) {
    JAXMOE_RETURN_IF_CUDA_ERROR(LaunchKernel(PlanScanKernel,
                                             dim3(static_cast<unsigned>(p.batch * expert_blocks)),
                                             dim3(kPlanSmallMaxThreads),
                                             0,
                                             stream,
                                             p.pdl,
                                             p,
                                             chunks,
                                             static_cast<unsigned>(expert_blocks)));
  }
  return LaunchKernel(
      PlanPlaceKernel, chunk_grid, chunk_block, 0, stream, p.pdl, p, chunks, chunk_rows);
}

}  // namespace

cudaError_t LaunchPlan(const PlanParams& params, cudaStream_t stream) {
  int64_t rows = params.num_tokens * params.top_k;
  if (rows > kMaxGrid || params.batch > kMaxGrid) return cudaErrorInvalidValue;
  if (params.batch == 0) return cudaSuccess;
  return PlanIsSmall(rows, params.num_local_experts) ? LaunchPlanSmall(params, stream)
                                                     : LaunchPlanLarge(params, stream);
}

}  // namespace jaxmoe
