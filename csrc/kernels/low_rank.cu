// Launches a product of low rank.
#include <algorithm>

#include "csrc/kernels/low_rank.cuh"

namespace jaxmoe {

cudaError_t LaunchLowRank(const LowRankParams& p, cudaStream_t stream) {
  constexpr int64_t kMaxInt = 0x7fffffff, kMaxGridY = 65535;
  if (p.rows == 0 || p.rank == 0) return cudaSuccess;
  const int64_t tiles = p.rows / kLowRankRows + std::min(p.num_groups, p.rows);  // at most
  const int64_t columns = CeilDiv(p.rank, kLowRankColumns);
  if (p.rows > kMaxInt || p.k > kMaxInt || tiles > kMaxInt / 8 || columns > kMaxGridY ||
      p.k % 8 != 0 || p.rank % 8 != 0) {
    return cudaErrorInvalidValue;
  }
  int sm_count = 0;
  JAXMOE_RETURN_IF_CUDA_ERROR(GetSmCount(&sm_count));
  // Blocks that share a tile's k: as many as run at once, each with enough of it.
  constexpr int kMostClusters = 8, kBlocksPerSm = 3, kLeastK = 512;
  int cluster = 1;
  while (cluster < kMostClusters && 2 * cluster * tiles * columns <= kBlocksPerSm * sm_count &&
         p.k >= 2 * cluster * kLeastK) {
    cluster *= 2;
  }
  return LaunchClusters(
      LowRankKernel,
      dim3(static_cast<unsigned>(tiles * cluster), static_cast<unsigned>(columns)),
      dim3(kLowRankThreads),
      cluster,
      LowRankStage::kAllBytes,
      stream,
      p.pdl,
      p);
}

}  // namespace jaxmoe
