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
  shape.table_rows = shape.chunks;
  shape.table_rows_per_chunk = 1;
  return shape;
}

// Places behind the kernel that counts; the first of a pair of our own, so that they may overlap.
cudaError_t LaunchPlaceByTable(const PlanParams& params,
                               const PlanShape& shape,
                               cudaStream_t stream) {
  if (params.batch * shape.chunks > kMaxGrid) return cudaErrorInvalidConfiguration;
  return LaunchKernel(PlanPlaceKernel<PlanTotals::kTable>,
                      dim3(static_cast<unsigned>(params.batch * shape.chunks)),
                      dim3(static_cast<unsigned>(shape.threads)),
                      PlanScratchBytes(PlanTotals::kTable, shape),
                      stream,
                      true,
                      params,
                      shape);
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
  return LaunchPlaceByTable(params, shape, stream);
}

cudaError_t LaunchPlanPlace(const PlanParams& params, int64_t table_tokens, cudaStream_t stream) {
  int64_t rows = params.num_tokens * params.top_k;
  if (rows > kMaxGrid || params.batch > kMaxGrid) return cudaErrorInvalidValue;
  if (params.batch == 0 || rows == 0) return cudaErrorInvalidValue;
  int64_t table_slots = table_tokens * params.top_k;
  int64_t per_chunk = CeilDiv(PlanChunkRows(rows), table_slots);
  PlanShape shape = MakeShape(rows, per_chunk * table_slots, params.num_local_experts);
  shape.table_rows = static_cast<int>(CeilDiv(params.num_tokens, table_tokens));
  shape.table_rows_per_chunk = static_cast<int>(per_chunk);
  shape.fresh_ids = true;
  return LaunchPlaceByTable(params, shape, stream);
}

}  // namespace jaxmoe
