// Launches a product of low rank.
#include <algorithm>

#include "csrc/kernels/low_rank.cuh"

namespace jaxmoe {
namespace {

// Blocks that share a tile's k: so many that the rounds in which they run take the least time. A
// block takes as long to begin and to end as to multiply kFixedK of k.
int ClusterOf(int64_t k, int64_t blocks, int64_t at_once) {
  constexpr int kMostClusters = 8, kLeastK = 512, kFixedK = 256;
  const auto time = [&](int cluster) {
    return CeilDiv(blocks * cluster, at_once) * (k / cluster + kFixedK);
  };
  int best = 1;
  for (int cluster = 2; cluster <= kMostClusters && k >= cluster * kLeastK; cluster *= 2) {
    if (time(cluster) < time(best)) best = cluster;
  }
  return best;
}

// Tiles of so many rows. Of groups of many rows the last is half full; others have one.
int64_t UsualTiles(const LowRankParams& p, int64_t tile_rows) {
  const int64_t groups = std::min(p.num_groups, p.rows);
  return std::max(groups, p.rows / tile_rows + groups / 2);
}

template <class Stage>
cudaError_t LaunchTiles(const LowRankParams& p, int sm_count, cudaStream_t stream) {
  constexpr int64_t kMaxGridY = 65535;
  const int64_t most = p.rows / Stage::kRows + std::min(p.num_groups, p.rows);
  const int64_t columns = CeilDiv(p.rank, kLowRankColumns);
  if (most > kMaxInt / 8 || columns > kMaxGridY) return cudaErrorInvalidValue;
  const int64_t blocks = UsualTiles(p, Stage::kRows) * columns;
  const int cluster = ClusterOf(p.k, blocks, Stage::kBlocksPerSm * sm_count);
  return LaunchClusters(LowRankKernel<Stage>,
                        dim3(static_cast<unsigned>(most * cluster), static_cast<unsigned>(columns)),
                        dim3(kLowRankThreads),
                        cluster,
                        Stage::kAllBytes,
                        stream,
                        p.pdl,
                        p);
}

}  // namespace

cudaError_t LaunchLowRank(const LowRankParams& p, cudaStream_t stream) {
  if (p.rows == 0) return cudaSuccess;
  const bool early_index = p.row_index != nullptr && p.early_groups && !p.early_x;
  if (p.rows > kMaxInt || p.k > kMaxInt || p.k % 8 != 0 || p.rank % 8 != 0 || p.rank == 0 ||
      early_index) {
    return cudaErrorInvalidValue;
  }
  int sm_count = 0;
  JAXMOE_RETURN_IF_CUDA_ERROR(GetSmCount(&sm_count));
  using Few = LowRankStage<32, 5>;
  using Deep = LowRankStage<64, 3>;
  using Many = LowRankStage<64, 2>;
  // Most groups of 22 rows on average have at most 32.
  if (p.rows <= 22 * p.num_groups) return LaunchTiles<Few>(p, sm_count, stream);
  const int64_t blocks = UsualTiles(p, Deep::kRows) * CeilDiv(p.rank, kLowRankColumns);
  if (blocks <= Deep::kBlocksPerSm * sm_count) return LaunchTiles<Deep>(p, sm_count, stream);
  return LaunchTiles<Many>(p, sm_count, stream);
}

}  // namespace jaxmoe
