// From a problem to a launched weight-gradient kernel: the table of variants, unknown rows refused.
#include <algorithm>
#include <climits>

#include "csrc/common/tensor_map.h"
#include "csrc/weight_grad/kernel.cuh"

namespace jaxmoe {
namespace {

using Launch = cudaError_t (*)(const TgmmArgs&, int grid, bool pdl, cudaStream_t);

struct TgmmVariant {
  DType dtype;
  int m;
  int n;
  int cluster;
  int step_rows;
  Launch launch;
};

template <class T>
TgmmVariant MakeTgmmVariant(DType dtype) {
  return {dtype,
          T::kM,
          T::kN,
          T::kCluster,
          T::kStepRows,
          [](const TgmmArgs& args, int grid, bool pdl, cudaStream_t stream) {
            return LaunchClusters(&TgmmKernel<T>,
                                  dim3(grid),
                                  dim3(T::kThreads),
                                  T::kCluster,
                                  T::kDynamicBytes,
                                  stream,
                                  pdl,
                                  args);
          }};
}

const TgmmVariant* FindVariant(DType dtype, const TgmmConfig& config) {
  // Step rows, stages, lead, cluster.
  static const TgmmVariant variants[] = {
      MakeTgmmVariant<TgmmTile<__nv_bfloat16, 64, 4, 2, 1>>(DType::kBFloat16),
      MakeTgmmVariant<TgmmTile<__nv_bfloat16, 64, 4, 2, 2>>(DType::kBFloat16),
      MakeTgmmVariant<TgmmTile<__half, 64, 4, 2, 1>>(DType::kFloat16),
      MakeTgmmVariant<TgmmTile<__half, 64, 4, 2, 2>>(DType::kFloat16),
  };
  for (const TgmmVariant& v : variants) {
    if (v.dtype == dtype && v.cluster == config.cluster) return &v;
  }
  return nullptr;
}

}  // namespace

const char* LaunchTgmm(const TgmmProblem& p, const TgmmConfig& config, cudaStream_t stream) {
  const TgmmVariant* variant = FindVariant(p.dtype, config);
  if (variant == nullptr) return "no weight-gradient kernel of this dtype and cluster";
  if (p.num_weights == 0 || p.k == 0 || p.n == 0) return nullptr;
  if (p.k % 8 != 0 || p.n % 8 != 0) return "k and n must be multiples of 8 (16-byte rows)";
  const int64_t batches = p.num_groups == 0 ? 0 : CeilDiv(p.num_groups, p.groups_per_batch);
  const int64_t rows = batches * p.rows_per_batch;
  if (rows > INT_MAX - variant->step_rows) return "too many rows";
  if (p.num_groups > p.num_weights && p.num_groups % p.num_weights != 0) {
    return "every weight must have as many groups";
  }

  TgmmArgs args{};
  args.m = p.k;
  args.n = p.n;
  if (rows > 0) {
    const char* error = EncodeRowsMap(p.dtype, p.x, rows, p.k, variant->step_rows, &args.m_map);
    if (error != nullptr) return error;
    error = EncodeRowsMap(p.dtype, p.dy, rows, p.n, variant->step_rows, &args.n_map);
    if (error != nullptr) return error;
  }
  args.group_starts = p.group_starts;
  args.group_sizes = p.group_sizes;
  args.tile_counter = p.tile_counter;
  args.out = p.dw;
  args.num_weights = p.num_weights;
  args.num_groups = p.num_groups;
  args.groups_per_batch = p.groups_per_batch;
  args.rows_per_batch = p.rows_per_batch;
  args.num_m_tiles = static_cast<int>(CeilDiv(args.m, variant->m * variant->cluster));
  args.num_n_tiles = static_cast<int>(CeilDiv(args.n, variant->n));
  const int64_t tiles = static_cast<int64_t>(args.num_m_tiles) * args.num_n_tiles * p.num_weights;
  if (tiles > INT_MAX / 2 || args.num_m_tiles * variant->cluster > TgmmPlace::kMaxTiles ||
      args.num_n_tiles > TgmmPlace::kMaxTiles) {
    return "too many tiles";
  }
  args.num_tiles = static_cast<int>(tiles);
  args.out_f32 = p.out_f32;
  args.accumulate = p.accumulate;

  int sm_count = 0;
  if (cudaError_t status = GetSmCount(&sm_count); status != cudaSuccess) {
    return cudaGetErrorString(status);
  }
  const int clusters = std::min(args.num_tiles, sm_count / variant->cluster);
  const cudaError_t status = variant->launch(args, clusters * variant->cluster, p.pdl, stream);
  return status == cudaSuccess ? nullptr : cudaGetErrorString(status);
}

}  // namespace jaxmoe
