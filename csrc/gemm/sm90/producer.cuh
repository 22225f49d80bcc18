// Fills the pipeline: one thread loads weights, a warp or a warpgroup loads rows of X.
//
// All wait for the same empty slot and complete on the same full barrier. The weight thread's
// arrival announces the bytes of every bulk copy, so weights can start streaming while X is still
// being written by the previous kernel (programmatic dependent launch).
#pragma once

#include "csrc/common/counters.cuh"
#include "csrc/common/launch.h"
#include "csrc/gemm/sm90/products.cuh"
#include "csrc/gemm/sm90/tile.cuh"
#include "csrc/kernels/slot_plan.cuh"

namespace jaxmoe {

// True if 64-row block `block` of a tile holds up rows, where they are apart from gate rows.
// Elsewhere the two kinds of blocks are treated alike.
__device__ __forceinline__ constexpr bool IsUpBlock(int block) { return block % 2 != 0; }

// Index of weight row `row`, in block `block`, in the array that holds it: w or w_up.
__device__ __forceinline__ int RowInArray(const MoeGemmArgs& args, int row, int block) {
  return IsUpBlock(block) ? row - args.up_origin : row;
}

// First weight row of 64-row block `block` of weight tile `w_tile`.
template <class T>
__device__ __forceinline__ int WeightRow(const MoeGemmArgs& args, int w_tile, int block) {
  const int pair = w_tile * (T::kWeightTile / 128) + block / 2;
  if constexpr (T::kProducts == Products::kUngated) return pair * 128 + block % 2 * 64;
  return pair * args.pair_rows + args.block_base[block % 2];
}

// True if consumer warpgroup `pair` of weight tile `w_tile` has output features: the last tile may
// end before the second one's. Its blocks are then neither loaded nor multiplied, but those of
// promoted sums, whose warpgroups exchange what they find.
template <class T>
__device__ __forceinline__ bool HasFeatures(const MoeGemmArgs& args, int w_tile, int pair) {
  if constexpr (T::kSplit != Split::kWeights || T::kTokensOnM) return true;
  return (w_tile * (T::kWeightTile / 128) + pair) * (T::IsGated(args) ? 64 : 128) < args.n_out;
}

// Number of boxes that cover a tile's rows, at least one. A tile without rows (the second CTA of a
// cluster) loads a box too: a stage that is full without the warp that loads X could pass a whole
// phase of its empty barrier before that warp looks.
template <class T>
__device__ __forceinline__ int TokenBoxes(int rows) {
  return max((rows + T::kBoxRows - 1) / T::kBoxRows, 1);
}

// L2 policy of weights. A weight that one token tile reads must not push rows of X out of L2. A
// weight that several token tiles read is kept like anything else.
__device__ __forceinline__ uint64_t WeightPolicy(const MoeGemmArgs& args) {
  return args.stream_weights ? ptx::CreatePolicy<ptx::CachePolicy::kEvictFirst>()
                             : ptx::CreatePolicy<ptx::CachePolicy::kEvictNormal>();
}

// Whether threads copy the rows of X of such a tile.
template <class T>
__device__ __forceinline__ bool IsCopied(const MoeGemmArgs& args, int rows) {
  return T::kMostBoxes < T::kTokenTile && args.gather && rows > T::kMostBoxes;
}

// Bytes of X that bulk copies bring to a step of this tile.
template <class T>
__device__ __forceinline__ uint32_t BulkTokenBytes(const MoeGemmArgs& args, int rows) {
  if (args.gather) return IsCopied<T>(args, rows) ? 0 : rows * T::kTokenStepBytes;
  return TokenBoxes<T>(rows) * T::kBoxRows * T::kTokenStepBytes;
}

// Loads the weight blocks of a tile, as one thread. Each k step reads 128 bytes of a weight row.
// DRAM is faster if the adjacent 128 are requested together, so decode tiles issue two steps at
// once; wide tiles have no stages to spare, and if asked bring the second step into L2. Where n is
// contiguous, the blocks of a step are adjacent anyway.
template <class T>
__device__ __forceinline__ void LoadPlainTile(const MoeGemmArgs& args,
                                              const SharedStorage<T>& smem,
                                              const TileInfo& info,
                                              uint64_t policy,
                                              StageOf<T>& stage) {
  // Each CTA of a cluster loads a part of the weight tile into the shared memory of all.
  constexpr bool kKMajor = T::kMajor == cute::SM90::GMMA::Major::K;
  constexpr bool kPairs = kKMajor && T::kDecode;
  constexpr int kBlocks = T::kWeightBlocks / T::kMulticast;
  static_assert(kBlocks % 2 == 0, "a CTA loads gate and up blocks in turn");
  const int first_block = T::kMulticast > 1 ? ptx::ClusterRank() * kBlocks : 0;
  const CUtensorMap* const up_map = args.up_origin != 0 ? &args.w_up_map : &args.w_map;
  const StepRange steps = StepsOf<T>(args.num_k_steps);
  const bool whole = HasFeatures<T>(args, info.w_tile, 1);
  const uint32_t bytes = T::kWeightBytes / (whole ? 1 : 2) + BulkTokenBytes<T>(args, info.rows);
  bool narrow = false;
  if constexpr (T::kFlexible && kKMajor) narrow = stage.narrow != 0;
  int row[kBlocks];
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    row[b] = RowInArray(args, WeightRow<T>(args, info.w_tile, first_block + b), b);
  }

  for (int step = steps.first; step < steps.last; ++step) {
    uint64_t* full = smem.full(stage.index);
    ptx::BarrierWait(smem.empty(stage.index), stage.parity ^ 1);
    if ((kPairs || narrow) && (step - steps.first) % 2 == 0 && step + 1 < steps.last) {
      StageOf<T> next = stage;
      next.Advance();
      ptx::BarrierWait(smem.empty(next.index), next.parity ^ 1);
    }
    ptx::BarrierArriveExpectTx(full, bytes);
    const int k = step * T::kStepK;
    uint8_t* dst = WeightsAt(smem, stage) + first_block * T::kBlockBytes;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      if (first_block + b >= 2 && !whole) continue;
      const CUtensorMap* const map = IsUpBlock(b) ? up_map : &args.w_map;
      const int c0 = kKMajor ? k : row[b];
      const int c1 = kKMajor ? row[b] : k;
      if constexpr (T::kMulticast > 1) {
        constexpr uint16_t kAll = (1 << T::kMulticast) - 1;
        ptx::TmaLoad3DMulticast(
            dst + b * T::kBlockBytes, map, full, c0, c1, info.weight, kAll, policy);
      } else {
        ptx::TmaLoad3D(dst + b * T::kBlockBytes, map, full, c0, c1, info.weight, policy);
      }
    }
    if constexpr (kKMajor && !T::kDecode && T::kMulticast == 1) {
      if (args.prefetch_weights && !narrow && step % 2 == 0 && step + 1 < steps.last) {
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
          if (first_block + b >= 2 && !whole) continue;
          const CUtensorMap* const map = IsUpBlock(b) ? up_map : &args.w_map;
          ptx::TmaPrefetch3D(map, k + T::kStepK, row[b], info.weight, policy);
        }
      }
    }
    stage.Advance();
  }
}

// Loads blocks of packed weights: values of 64 rows by a step of k are adjacent in memory, and so
// are their scales, so neither needs a tensor map. The last steps of a superblock are one copy with
// them. See StagePlaces.
template <class T>
__device__ __forceinline__ void LoadPackedTile(const MoeGemmArgs& args,
                                               const SharedStorage<T>& smem,
                                               const TileInfo& info,
                                               uint64_t policy,
                                               StageOf<T>& stage) {
  constexpr int kStep = T::kStageSteps;
  const PackedArgs& packed = args.packed;
  const int last_row = args.n - args.up_origin;
  const StepRange steps = StepsOf<T>(args.num_k_steps);
  const uint8_t* block[T::kWeightBlocks];  // null past the last row, where nothing is stored
  int blocks = 0;
#pragma unroll
  for (int b = 0; b < T::kWeightBlocks; ++b) {
    const int row = RowInArray(args, WeightRow<T>(args, info.w_tile, b), b);
    const uint8_t* w = IsUpBlock(b) && args.up_origin != 0 ? packed.w_up : packed.w;
    const bool exists = row < last_row;
    block[b] =
        !exists ? nullptr : w + info.weight * packed.weight_bytes + row / 64 * packed.block_bytes;
    blocks += exists ? 1 : 0;
  }
  const uint32_t token_bytes = BulkTokenBytes<T>(args, info.rows);
  const int per_superblock = packed.superblock_steps;
  const bool joined = per_superblock == 1;  // each step has a strip of its own
  const bool whole = per_superblock <= kStep;
  int superblock = steps.first / per_superblock;
  int part = steps.first % per_superblock;
  for (int step = steps.first; step < steps.last; step += kStep) {
    uint64_t* full = smem.full(stage.index);
    ptx::BarrierWait(smem.empty(stage.index), stage.parity ^ 1);
    const int count = kStep == 1 ? 1 : min(kStep, steps.last - step);
    const int strips = joined ? count : 1;
    const uint32_t bytes = count * T::kValueBytes + strips * packed.strip_bytes;
    ptx::BarrierArriveExpectTx(full, count * token_bytes + blocks * bytes);
    const int64_t at = superblock * packed.superblock_bytes;
    const int64_t strip = at + per_superblock * T::kValueBytes;
    // NOTE: of several steps a stage the last ones too, if that took no register more.
    const bool beside_strip = whole || (kStep == 1 && part + 1 == per_superblock);
    uint8_t* dst = smem.weights(stage.index);
#pragma unroll
    for (int b = 0; b < T::kWeightBlocks; ++b) {
      if (block[b] == nullptr) continue;
      uint8_t* to = dst + b * T::kBlockBytes;
      const uint8_t* from = block[b] + at + part * T::kValueBytes;
      if (beside_strip) {
        ptx::BulkLoad(to, from, bytes, full, policy);
        continue;
      }
      ptx::BulkLoad(to, from, count * T::kValueBytes, full, policy);
      if (packed.strip_bytes == 0) continue;
      ptx::BulkLoad(
          to + kStep * T::kValueBytes, block[b] + strip, packed.strip_bytes, full, policy);
    }
    if (joined) {
      superblock += kStep;
    } else if ((part += kStep) >= per_superblock) {
      part = 0;
      ++superblock;
    }
    stage.Advance();
  }
}

template <class T>
__device__ __forceinline__ void LoadWeightTile(const MoeGemmArgs& args,
                                               const SharedStorage<T>& smem,
                                               const TileInfo& info,
                                               uint64_t policy,
                                               StageOf<T>& stage) {
  if constexpr (T::kPacked) {
    LoadPackedTile<T>(args, smem, info, policy, stage);
  } else {
    LoadPlainTile<T>(args, smem, info, policy, stage);
  }
}

// The whole life of the thread that loads weights.
template <class T, class Args>
__device__ void RunWeightProducer(const Args& args, const SharedStorage<T>& smem) {
  const uint64_t policy = WeightPolicy(First(args));
  StageOf<T> stage;
  ForEachTile(smem, [&](const TileInfo& info, const auto& slot) {
    ReadShape(smem, stage);
    LoadWeightTile<T>(ProductOf(args, info), smem, InProduct(args, info), policy, stage);
    slot.Release();
  });
}

// How the warp that loads X finds rows.
template <class T>
struct TokenSource {
  bool one_row_boxes;  // gathered: a box each
  bool planned;        // through the plan that this kernel made, else through row_index
  int token_of_row;    // of row `lane` of that plan
  uint64_t policy;

  __device__ TokenSource(const MoeGemmArgs& args, int lane)
      : one_row_boxes(args.gather && !T::kGatherByThreads),
        planned(args.plans && one_row_boxes),
        token_of_row(planned ? SlotPlan(args.plan, lane).TokenOfRow() : 0),
        policy(ptx::CreatePolicy<ptx::CachePolicy::kEvictLast>()) {}
};

// Copies rows of X of a tile, 16 bytes at a time, as kThreads threads: eight a row, swizzled by
// hand. `source_of(r)`: the row of X that row r of the tile is, which all lanes of a warp ask
// together; one outside of X gives a row of zeros, as it does when the copy engine gathers.
template <class T, int kThreads, class SourceOf>
__device__ __forceinline__ void CopyTokenTile(const MoeGemmArgs& args,
                                              const SharedStorage<T>& smem,
                                              const TileInfo& info,
                                              int thread,
                                              const SourceOf& source_of,
                                              StageOf<T>& stage) {
  constexpr int kChunks = T::kTokenStepBytes / 16;
  constexpr int kRowsPerPass = kThreads / kChunks;
  constexpr int kPasses = T::kTokenTile / kRowsPerPass;
  // A thread's rows have that many places in the swizzle pattern of eight rows.
  constexpr int kPlaces = kRowsPerPass < 8 ? 8 / kRowsPerPass : 1;
  static_assert(T::kTokenTile % kRowsPerPass == 0, "passes cover the tile");
  static_assert(kRowsPerPass * kPlaces % 8 == 0, "rows come to the same places again");
  static_assert(T::kSplitK == 1, "source pointers start at the first step");
  const int chunk = thread % kChunks;
  const int first_row = thread / kChunks;
  uint32_t place[kPlaces];
#pragma unroll
  for (int i = 0; i < kPlaces; ++i) {
    const int r = first_row + i * kRowsPerPass;
    place[i] = first_row * T::kTokenStepBytes + ((chunk ^ (r % 8)) * 16);
  }
  const int row_chunks = args.k * static_cast<int>(sizeof(typename T::Token)) / 16;
  const uint4* source[kPasses];
  unsigned exists = 0;  // bit i: row i of this thread is one of X
#pragma unroll
  for (int i = 0; i < kPasses; ++i) {
    int64_t row = source_of(first_row + i * kRowsPerPass);
    if (static_cast<uint64_t>(row) < static_cast<uint64_t>(args.x_rows)) {
      exists |= 1u << i;
    } else {
      row = 0;
    }
    source[i] = static_cast<const uint4*>(args.x) + row * row_chunks + chunk;
  }
  for (int step = 0; step < args.num_k_steps; ++step) {
    ptx::BarrierWait(smem.empty(stage.index), stage.parity ^ 1);
    const uint32_t dst = ptx::SmemAddress(TokensAt(smem, stage));
    const bool inside = step * kChunks + chunk < row_chunks;  // past the end of k: zeros
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      if (first_row + i * kRowsPerPass < info.rows) {
        ptx::CopyAsync16(dst + place[i % kPlaces] + i * kRowsPerPass * T::kTokenStepBytes,
                         source[i],
                         inside && (exists >> i & 1));
      }
      source[i] += inside ? kChunks : 0;
    }
    ptx::CopyAsyncArrive(smem.full(stage.index));
    stage.Advance();
  }
}

// Loads rows of X of a tile, as a warp: by bulk copies, of boxes of consecutive rows or, when
// gathering, of one row each; or row by row, where boxes would be too many.
//
// Rows past the group's end are neither loaded nor zeroed: a garbage column of X changes only its
// own column of the accumulators, which is never stored.
template <class T>
__device__ __forceinline__ void LoadTokenTile(const MoeGemmArgs& args,
                                              const SharedStorage<T>& smem,
                                              const TileInfo& info,
                                              const TokenSource<T>& from,
                                              int lane,
                                              StageOf<T>& stage) {
  constexpr int kRowsPerLane = T::kGatherByThreads ? 1 : (T::kTokenTile + 31) / 32;
  const StepRange steps = StepsOf<T>(args.num_k_steps);
  const int boxes = TokenBoxes<T>(info.rows);
  int source[kRowsPerLane];
#pragma unroll
  for (int i = 0; i < kRowsPerLane; ++i) {
    const int r = lane + 32 * i;
    if (from.planned) {
      source[i] = __shfl_sync(0xffffffffu, from.token_of_row, info.row + r);
    } else {
      source[i] = from.one_row_boxes && r < info.rows ? args.row_index[info.row + r] : 0;
    }
  }
  if constexpr (T::kGatherByWarp) {
    if (from.one_row_boxes && IsCopied<T>(args, info.rows)) {
      static_assert(kRowsPerLane == 1);
      const auto source_of = [&](int r) { return __shfl_sync(0xffffffffu, source[0], r); };
      CopyTokenTile<T, 32>(args, smem, info, lane, source_of, stage);
      return;
    }
  }
  for (int step = steps.first; step < steps.last; step += T::kStageSteps) {
    ptx::BarrierWait(smem.empty(stage.index), stage.parity ^ 1);
    __syncwarp();  // a lane without a box must not fall a phase behind lanes with one
    uint64_t* full = smem.full(stage.index);
#pragma unroll
    for (int part = 0; part < T::kStageSteps; ++part) {
      if (part > 0 && step + part == steps.last) break;
      uint8_t* dst = TokensAt(smem, stage) + part * T::kTokenPart;
      const int k = (step + part) * T::kStepK;
      if (from.one_row_boxes) {
#pragma unroll
        for (int i = 0; i < kRowsPerLane; ++i) {
          const int r = lane + 32 * i;
          // The swizzle follows the shared-memory address, so one-row boxes assemble a tile.
          if (r < info.rows) {
            ptx::TmaLoad2D(
                dst + r * T::kTokenStepBytes, &args.x_map, full, k, source[i], from.policy);
          }
        }
      } else if (lane < boxes) {
        ptx::TmaLoad2D(dst + lane * T::kBoxRows * T::kTokenStepBytes,
                       &args.x_map,
                       full,
                       k,
                       info.row + lane * T::kBoxRows,
                       from.policy);
      }
    }
    if constexpr (T::kGatherByWarp) ptx::BarrierArrive(full);
    stage.Advance();
  }
}

// Waits until the gate-up product has stored the rows that a tile of the down product reads.
__device__ __forceinline__ void WaitForRows(const MoeGemmArgs&, const TileInfo&, int) {}
__device__ __forceinline__ void WaitForRows(const MoeLayerArgs& args,
                                            const TileInfo& info,
                                            int lane) {
  if (lane == 0) {
    while ((ptx::LoadAcquire(args.stored + info.row) & args.count_mask) < args.complete) {
    }
  }
  __syncwarp();
  ptx::FenceProxyAsyncGlobal();
}

// The whole life of the warp that loads X.
template <class T, class Args>
__device__ void RunTokenProducer(const Args& args, const SharedStorage<T>& smem, int lane) {
  GridDependencyWait();  // X is the previous kernel's output
  const TokenSource<T> source(First(args), lane);
  StageOf<T> stage;
  ForEachTile(smem, lane, [&](const TileInfo& info, const auto& slot) {
    TokenSource<T> from = source;
    ReadShape(smem, stage);
    if (IsSecond(args, info)) {
      WaitForRows(args, info, lane);
      from.one_row_boxes = from.planned = false;  // rows are in order
    }
    LoadTokenTile<T>(ProductOf(args, info), smem, InProduct(args, info), from, lane, stage);
    slot.Release();
  });
  if constexpr (T::kGatherByWarp) ptx::CopyAsyncWaitAll();  // no copy outlives its thread
}

// Gathers rows of X, as a warpgroup.
template <class T>
__device__ void RunGatherProducer(const MoeGemmArgs& args,
                                  const SharedStorage<T>& smem,
                                  int thread) {
  GridDependencyWait();
  StageOf<T> stage;
  ForEachTile(smem, thread % 32, [&](const TileInfo& info, const auto& slot) {
    ReadShape(smem, stage);
    const auto source_of = [&](int r) { return r < info.rows ? args.row_index[info.row + r] : 0; };
    CopyTokenTile<T, 128>(args, smem, info, thread, source_of, stage);
    slot.Release();
  });
  ptx::CopyAsyncWaitAll();  // no copy outlives its thread
}

}  // namespace jaxmoe
