// Launches the plan kernels: one for small problems, two for large ones.
#include <algorithm>

#include "csrc/kernels/plan.cuh"

namespace jaxmoe {

namespace {

constexpr int64_t kMaxGrid = 0x7fffffff;

PlanShape MakeShape(int64_t rows, int64_t chunk_rows, int64_t local_experts) {
  int64_t block_rows = std::min(rows, chunk_rows);
  int64_t tile_rows = std::min<int64_t>(block_rows, kPlanTileRows);
  int64_t iters = CeilDiv(tile_rows, kPlanMaxThreads);
  int64_t width = std::min<int64_t>(local_experts, kPlanWindow);
  PlanShape shape{};
  shape.chunks = static_cast<int>(std::max<int64_t>(CeilDiv(rows, chunk_rows), 1));
  shape.chunk_rows = static_cast<int>(chunk_rows);
  shape.iters = static_cast<int>(iters);
  shape.row_warps = iters > 0 ? static_cast<int>(CeilDiv(tile_rows, iters * kWarpSize)) : 0;
  shape.width = static_cast<int>(width);
  // Several chunks: many threads to count the others with. One: a thread per slot and per expert.
  int64_t threads = std::max<int64_t>(shape.row_warps * kWarpSize, RoundUp(width, kWarpSize));
  shape.threads = static_cast<int>(
      shape.chunks > 1 ? kPlanMaxThreads : std::clamp<int64_t>(threads, 128, kPlanMaxThreads));
  return shape;
}

}  // namespace

cudaError_t LaunchPlan(const PlanParams& params, cudaStream_t stream) {
  int64_t rows = params.num_tokens * params.top_k;
  if (rows > kMaxGrid || params.batch > kMaxGrid) return cudaErrorInvalidValue;
  if (params.batch == 0) return cudaSuccess;
  PlanShape shape = MakeShape(rows, PlanChunkRows(rows), params.num_local_experts);
  if (params.batch * shape.chunks > kMaxGrid) return cudaErrorInvalidConfiguration;
  dim3 grid(static_cast<unsigned>(params.batch * shape.chunks));
  if (rows <= kPlanDirectRows) {
    return LaunchKernel(PlanPlaceKernel<PlanTotals::kDirect>,
                        grid,
                        dim3(static_cast<unsigned>(shape.threads)),
                        PlanScratchBytes(PlanTotals::kDirect, shape),
                        stream,
                        params.pdl,
                        params,
                        shape);
  }
  JAXMOE_RETURN_IF_CUDA_ERROR(LaunchKernel(
      PlanCountKernel, grid, dim3(kPlanCountThreads), 0, stream, params.pdl, params, shape));
  // The second of our own, so that they may overlap.
  return LaunchKernel(PlanPlaceKernel<PlanTotals::kTable>,
                      grid,
                      dim3(static_cast<unsigned>(shape.threads)),
                      PlanScratchBytes(PlanTotals::kTable, shape),
                      stream,
                      true,
                      params,
                      shape);
}

}  // namespace jaxmoe
