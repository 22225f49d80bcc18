// Launches the plan kernels: one for most problems, two for the largest.
#include <algorithm>

#include "csrc/kernels/plan.cuh"

namespace jaxmoe {

namespace {

// Shape of direct problems and of problems with a table.
PlanShape MakeShape(int64_t rows, int64_t local_experts) {
  int64_t chunk_rows = PlanChunkRows(rows);
  int64_t block_rows = std::min(rows, chunk_rows);
  int64_t tile_rows = std::min<int64_t>(block_rows, kPlanTileRows);
  int64_t iters = CeilDiv(tile_rows, kPlanMaxThreads);
  int64_t width = std::min<int64_t>(local_experts, kPlanWindow);
  PlanShape shape{};
  shape.chunks = static_cast<int>(PlanChunks(rows));
  shape.chunk_rows = static_cast<int>(chunk_rows);
  shape.cluster = 1;
  shape.iters = static_cast<int>(iters);
  shape.row_warps = iters > 0 ? static_cast<int>(CeilDiv(tile_rows, iters * kWarpSize)) : 0;
  shape.width = static_cast<int>(width);
  // Several chunks: many threads to count the others with. One: a thread per slot and per expert.
  int64_t threads = std::max<int64_t>(shape.row_warps * kWarpSize, RoundUp(width, kWarpSize));
  shape.threads = static_cast<int>(
      shape.chunks > 1 ? kPlanMaxThreads : std::clamp<int64_t>(threads, 128, kPlanMaxThreads));
  return shape;
}

// Shape of problems that clusters count. Blocks have 512 threads where these suffice: with few
// registers each, such a block can start beside the last blocks of the kernel before.
PlanShape MakeSharedShape(int64_t rows, int64_t local_experts) {
  constexpr int64_t kChunks = 128;  // nearly an SM each
  constexpr int64_t kMinRows = 256;
  constexpr int64_t kThreads = 512;
  int64_t chunk_rows = std::max(RoundUp(CeilDiv(rows, kChunks), kWarpSize), kMinRows);
  int64_t iters = chunk_rows <= kThreads ? 1 : kPlanTileIters;
  int64_t row_threads = RoundUp(CeilDiv(chunk_rows, iters), kWarpSize);
  PlanShape shape{};
  shape.chunks = static_cast<int>(RoundUp(CeilDiv(rows, chunk_rows), kPlanSharedBlocks));
  shape.chunk_rows = static_cast<int>(chunk_rows);
  shape.cluster = kPlanSharedBlocks;
  shape.iters = static_cast<int>(iters);
  shape.row_warps = static_cast<int>(row_threads / kWarpSize);
  shape.width = static_cast<int>(local_experts);
  shape.threads =
      static_cast<int>(std::max({kThreads, row_threads, RoundUp(local_experts, kWarpSize)}));
  return shape;
}

template <PlanTotals kTotals>
cudaError_t LaunchPlace(const PlanParams& params,
                        const PlanShape& shape,
                        bool pdl,
                        cudaStream_t stream) {
  return LaunchClusters(PlanPlaceKernel<kTotals>,
                        dim3(static_cast<unsigned>(params.batch * shape.chunks)),
                        dim3(static_cast<unsigned>(shape.threads)),
                        shape.cluster,
                        PlanScratchBytes(kTotals, shape),
                        stream,
                        pdl,
                        params,
                        shape);
}

}  // namespace

cudaError_t LaunchPlan(const PlanParams& params, cudaStream_t stream) {
  int64_t rows = params.num_tokens * params.top_k;
  if (rows > kMaxInt || params.batch > kMaxInt) return cudaErrorInvalidValue;
  if (params.batch == 0) return cudaSuccess;
  bool direct = rows <= kPlanDirectRows;
  bool table = PlanHasTable(rows, params.num_local_experts);
  PlanShape shape = direct || table ? MakeShape(rows, params.num_local_experts)
                                    : MakeSharedShape(rows, params.num_local_experts);
  if (params.batch * shape.chunks > kMaxInt) return cudaErrorInvalidConfiguration;
  if (direct) return LaunchPlace<PlanTotals::kDirect>(params, shape, params.pdl, stream);
  if (!table) return LaunchPlace<PlanTotals::kShared>(params, shape, params.pdl, stream);
  JAXMOE_RETURN_IF_CUDA_ERROR(LaunchKernel(PlanCountKernel,
                                           dim3(static_cast<unsigned>(params.batch * shape.chunks)),
                                           dim3(kPlanCountThreads),
                                           0,
                                           stream,
                                           params.pdl,
                                           params,
                                           shape));
  // The second of our own, so that they may overlap.
  return LaunchPlace<PlanTotals::kTable>(params, shape, true, stream);
}

}  // namespace jaxmoe
