// Products of low rank: 64 or 32 rows of a group by 16 columns a block, whose warps share k.
//
// Reading rows is what takes time, so several blocks share an SM, whose warps keep stages of copies
// in flight, each its own, and wait for each other at the end alone: many blocks where there are
// more than run at once, else many stages. Where there are few tiles, the blocks of a cluster share
// k as well. Sums are added up in order.
#pragma once

#include "csrc/common/launch.h"
#include "csrc/common/ptx.cuh"
#include "csrc/common/types.h"
#include "csrc/kernels/low_rank.h"

namespace jaxmoe {

inline constexpr int kLowRankThreads = 128;
inline constexpr int kLowRankColumns = 16;  // of a block

// Shared memory: stages of each warp, of 32 of k, and behind them, in the same place, sums.
template <int kRows_, int kCount_>
struct LowRankStage {
  static constexpr int kRows = kRows_;
  static constexpr int kCount = kCount_;
  static constexpr int kK = 32;
  static constexpr int kXPitch = 2 * kK;  // of a row of x
  static constexpr int kAPitch = 2 * kLowRankColumns;
  static constexpr int kXBytes = kRows * kXPitch;
  static constexpr int kBytes = kXBytes + kK * kAPitch;
  static constexpr int kAllBytes = kLowRankThreads / 32 * kCount * kBytes;
  static constexpr int kBlocksPerSm = 227 * 1024 / (kAllBytes + 1024);

  uint32_t base;

  // Eight of k of a row, and eight columns of one of k: swizzled, so that eight of either that
  // ldmatrix takes at once lie in different banks.
  __device__ __forceinline__ uint32_t X(int row, int piece) const {
    return base + row * kXPitch + (piece ^ (row / 2 % 4)) * 16;
  }
  __device__ __forceinline__ uint32_t A(int k, int half) const {
    return base + kXBytes + k * kAPitch + (half ^ (k / 4 % 2)) * 16;
  }
};

// Rows of a group that a block multiplies.
struct LowRankTile {
  int group;
  int64_t row;
  int rows;  // 0: there are fewer tiles
};

// Tile `number` of all groups, found by the whole block.
template <int kRows>
__device__ __forceinline__ LowRankTile FindLowRankTile(const int32_t* offsets,
                                                       int num_groups,
                                                       int number) {
  constexpr int kWarps = kLowRankThreads / 32;
  __shared__ int of_warp[kWarps];
  __shared__ int found[3];
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  int before = 0;  // tiles of the groups already looked at
  for (int base = 0; base < num_groups; base += kLowRankThreads) {
    const int group = base + static_cast<int>(threadIdx.x);
    const int start = group < num_groups ? __ldcg(offsets + group) : 0;
    const int size = group < num_groups ? __ldcg(offsets + group + 1) - start : 0;
    const int tiles = (size + kRows - 1) / kRows;
    int up_to = tiles;  // of the groups up to this one, of this warp
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int other = __shfl_up_sync(0xffffffffu, up_to, distance);
      if (lane >= distance) up_to += other;
    }
    if (lane == 31) of_warp[warp] = up_to;
    __syncthreads();
    int first = before + up_to - tiles;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      if (w < warp) first += of_warp[w];
      before += of_warp[w];
    }
    if (first <= number && number < first + tiles) {
      const int skipped = (number - first) * kRows;
      found[0] = group;
      found[1] = start + skipped;
      found[2] = min(size - skipped, kRows);
    }
    __syncthreads();
    if (number < before) return {found[0], found[1], found[2]};
  }
  return {0, 0, 0};
}

// What a warp copies: pieces of its lane's rows, and of a.
template <class Stage>
class LowRankSource {
 public:
  __device__ __forceinline__ LowRankSource(const LowRankParams& p,
                                           const LowRankTile& tile,
                                           int lane)
      : p_(p), tile_(tile), lane_(lane), column_(blockIdx.y * kLowRankColumns + lane % 2 * 8) {
#pragma unroll
    for (int i = 0; i < kRowsOfLane; ++i) {
      const int row = lane / 4 + 8 * i;
      int64_t of_x = row < tile.rows ? tile.row + row : -1;
      if (p.row_index != nullptr && of_x >= 0) of_x = __ldcg(p.row_index + of_x);
      rows_[i] = of_x >= 0 && of_x < p.x_rows ? static_cast<int>(of_x) : -1;
    }
  }

  // Begins to copy 32 of k from `first` on: of rows of x.
  __device__ __forceinline__ void FetchX(const Stage& stage, int first) const {
    const auto* const x = static_cast<const uint16_t*>(p_.x);
    const int k = first + lane_ % 4 * 8;
#pragma unroll
    for (int i = 0; i < kRowsOfLane; ++i) {
      const int row = lane_ / 4 + 8 * i;
      if (row >= tile_.rows) break;
      const bool exists = rows_[i] >= 0 && k < p_.k;
      const uint16_t* const from = exists ? x + rows_[i] * p_.k + k : x;
      ptx::CopyAsync16(stage.X(row, lane_ % 4), from, exists);
    }
  }

  // Begins to copy the same of a.
  __device__ __forceinline__ void FetchA(const Stage& stage, int first) const {
    const auto* const a = static_cast<const uint16_t*>(p_.a);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int of_k = lane_ / 2 + 16 * i;
      const bool exists = first + of_k < p_.k && column_ < p_.rank;
      const int64_t row = tile_.group * p_.k + first + of_k;
      ptx::CopyAsync16(stage.A(of_k, lane_ % 2), exists ? a + row * p_.rank + column_ : a, exists);
    }
  }

 private:
  static constexpr int kRowsOfLane = Stage::kRows / 8;

  const LowRankParams& p_;
  const LowRankTile& tile_;
  const int lane_;
  const int column_;
  int rows_[kRowsOfLane];
};

template <int kRows>
using LowRankSums = float[kRows / 16][2][4];  // [16 rows][8 columns]

template <class Stage>
__device__ __forceinline__ void MultiplyLowRank(const Stage& stage,
                                                int rows,
                                                int lane,
                                                LowRankSums<Stage::kRows>& acc) {
  const int matrix = lane / 8;  // of the four that a load brings: this lane's
  const int i = lane % 8;
#pragma unroll
  for (int step = 0; step < Stage::kK / 16; ++step) {
    uint32_t a[4];
    ptx::LoadMatrix4Transposed(stage.A(16 * step + 8 * (matrix % 2) + i, matrix / 2), a);
#pragma unroll
    for (int m = 0; m < Stage::kRows / 16; ++m) {
      if (16 * m < rows) {
        uint32_t x[4];
        ptx::LoadMatrix4(stage.X(16 * m + 8 * (matrix % 2) + i, 2 * step + matrix / 2), x);
        ptx::MmaWarp<__nv_bfloat16>(x, a[0], a[1], acc[m][0]);
        ptx::MmaWarp<__nv_bfloat16>(x, a[2], a[3], acc[m][1]);
      }
    }
  }
}

// NOTE: nothing is read through the read-only path, see GridDependencyWait, nor what was written
// before an early start through L1, which may hold that of the layer before.
template <class Stage>
__global__ void __launch_bounds__(kLowRankThreads, Stage::kBlocksPerSm)
    LowRankKernel(const __grid_constant__ LowRankParams p) {
  constexpr int kRows = Stage::kRows;
  constexpr int kWarps = kLowRankThreads / 32;
  using Sums = float4[kRows][kLowRankColumns / 4];
  extern __shared__ __align__(128) uint8_t raw_smem[];
  static_assert((kWarps + 1) * sizeof(Sums) <= Stage::kAllBytes);
  if (!p.early_groups) GridDependencyWait();
  const int rank = ptx::ClusterRank(), size = ptx::ClusterSize();
  const LowRankTile tile = FindLowRankTile<kRows>(
      p.group_offsets, static_cast<int>(p.num_groups), static_cast<int>(blockIdx.x) / size);
  if (tile.rows == 0) {
    GridDependencyWait();
    GridDependencyLaunch();
    return;
  }
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const LowRankSource<Stage> source(p, tile, lane);
  const auto stage = [&](int i) {
    const int of_warp = warp * Stage::kCount + i % Stage::kCount;
    return Stage{ptx::SmemAddress(raw_smem) + of_warp * Stage::kBytes};
  };
  // Steps of this block, of which every fourth is this warp's.
  const int num_steps = static_cast<int>(CeilDiv(p.k, Stage::kK));
  const int first = num_steps * rank / size + warp, last = num_steps * (rank + 1) / size;
  const auto fetch_a = [&](int i) {
    if (first + i * kWarps < last) source.FetchA(stage(i), (first + i * kWarps) * Stage::kK);
  };
  const auto fetch_x = [&](int i) {
    if (first + i * kWarps < last) source.FetchX(stage(i), (first + i * kWarps) * Stage::kK);
    ptx::CopyAsyncCommit();
  };
  // What the previous kernel does not write is fetched before it ends.
#pragma unroll
  for (int i = 0; i < Stage::kCount - 1; ++i) fetch_a(i);
  const auto wait = [] {
    GridDependencyWait();
    GridDependencyLaunch();
  };
  if (!p.early_x) wait();
#pragma unroll
  for (int i = 0; i < Stage::kCount - 1; ++i) fetch_x(i);
  if (p.early_x) wait();  // the next kernel reads what the previous one writes
  LowRankSums<kRows> acc = {};
  for (int i = 0; first + i * kWarps < last; ++i) {
    ptx::CopyAsyncWaitGroups<Stage::kCount - 2>();
    __syncwarp();  // copies of all lanes are there, and the stage before has been read
    fetch_a(i + Stage::kCount - 1);
    fetch_x(i + Stage::kCount - 1);
    MultiplyLowRank(stage(i), tile.rows, lane, acc);
  }
  __syncthreads();  // every warp has read its stages

  auto* const sums = reinterpret_cast<Sums*>(raw_smem);
#pragma unroll
  for (int m = 0; m < kRows / 16; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      auto* const row = reinterpret_cast<float2*>(sums[warp][16 * m + 8 * half + lane / 4]);
#pragma unroll
      for (int octet = 0; octet < 2; ++octet) {
        row[4 * octet + lane % 4] =
            make_float2(acc[m][octet][2 * half], acc[m][octet][2 * half + 1]);
      }
    }
  }
  __syncthreads();
  const auto add = [](const float4& a, const float4& b) {
    return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
  };
  // Of four columns, of a thread.
  constexpr int kPieces = kRows * (kLowRankColumns / 4) / kLowRankThreads;
  constexpr int kThreadsOfRow = kLowRankColumns / 4 / kPieces;
  const int row = threadIdx.x / kThreadsOfRow;
  const int first_piece = threadIdx.x % kThreadsOfRow * kPieces;
  float4 sum[kPieces];
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const int piece = first_piece + i;
    sum[i] = sums[0][row][piece];
    for (int w = 1; w < kWarps; ++w) sum[i] = add(sum[i], sums[w][row][piece]);
    if (size > 1) sums[kWarps][row][piece] = sum[i];
  }
  if (size > 1) {
    ptx::ClusterSync();
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const float4* const mine = &sums[kWarps][row][first_piece + i];
      for (int other = 1; rank == 0 && other < size; ++other) {
        sum[i] = add(sum[i], ptx::LoadFrom(mine, other));
      }
    }
    ptx::ClusterSync();  // this block's sums have been read
    if (rank != 0) return;
  }
  if (row >= tile.rows) return;
  const float scale = p.divisors == nullptr ? p.scale : p.scale / p.divisors[tile.group];
  auto* const out = static_cast<uint16_t*>(p.out) + (tile.row + row) * p.rank;
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const int column = blockIdx.y * kLowRankColumns + 4 * (first_piece + i);
    if (column >= p.rank) return;
    uint2 packed;
    packed.x = ptx::Pack2<__nv_bfloat16>(sum[i].x * scale, sum[i].y * scale);
    packed.y = ptx::Pack2<__nv_bfloat16>(sum[i].z * scale, sum[i].w * scale);
    *reinterpret_cast<uint2*>(out + column) = packed;
  }
}

}  // namespace jaxmoe
