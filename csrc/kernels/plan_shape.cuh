// How plan cuts its slots into chunks, and what the block of a chunk has in shared memory.
#pragma once

#include <cstdint>

#include "csrc/kernels/plan.h"

namespace jaxmoe {

inline constexpr int kWarpSize = 32;
inline constexpr unsigned kFullMask = 0xffffffffu;

inline constexpr int kPlanMaxThreads = 1024;
inline constexpr int kPlanTileIters = 2;  // slots a lane holds
inline constexpr int kPlanTileRows = kPlanTileIters * kPlanMaxThreads;
inline constexpr int kPlanWindow = 1024;     // experts at a time; thread e takes the e-th of them
inline constexpr int kPlanSharedBlocks = 8;  // that count ids for each other
inline constexpr int kPlanStagedExperts = 1024;  // of a map that is copied to shared memory
static_assert(kPlanWindow <= kPlanMaxThreads, "one thread an expert");
static_assert(kPlanSharedExperts <= kPlanWindow, "blocks tell each other of one window");
static_assert(kPlanSharedRows <= 128 * kPlanTileRows, "and of one tile");

// Source of a block's counts of each expert in other chunks.
enum class PlanTotals {
  kDirect,   // it counts their ids
  kShared,   // it counts some of their ids, and the other blocks of its cluster the rest
  kTable,    // from params.scratch, [B][chunks][E_l], which the kernel before has filled
  kCluster,  // the other blocks of its cluster tell it
};

// How a batch entry is cut. Grid: batch * chunks blocks, chunks fastest.
struct PlanShape {
  int chunks;
  int chunk_rows;
  int cluster;    // blocks that tell each other what they count: a power of two
  int row_warps;  // warps that hold slots of a tile
  int iters;      // slots a lane holds, <= kPlanTileIters
  int width;      // experts in a window
  int threads;    // of a placing block
};

// True if blocks of a cluster tell each other their counts.
constexpr bool PlanTells(PlanTotals totals) {
  return totals == PlanTotals::kShared || totals == PlanTotals::kCluster;
}

// Ints of an expert that a block tells another.
constexpr int PlanToldInts(PlanTotals totals) { return totals == PlanTotals::kShared ? 2 : 1; }

// How many ints PlanScratch::sums has.
constexpr int PlanSums(PlanTotals totals, const PlanShape& shape) {
  if (PlanTells(totals)) return shape.cluster * PlanToldInts(totals) * shape.width;
  return 2 * kPlanWindow;
}

// Shared memory of PlaceSlots, carved in this order from PlanScratchBytes bytes.
struct PlanScratch {
  int* sums;         // [PlanSums]
  int* base;         // [width], next row of each expert of the window
  uint16_t* counts;  // [row_warps][width]
};

inline int64_t PlanScratchBytes(PlanTotals totals, const PlanShape& shape) {
  int64_t counts = int64_t{shape.row_warps} * shape.width;
  return (PlanSums(totals, shape) + shape.width) * int64_t{sizeof(int)} +
         RoundUp(counts * sizeof(uint16_t), sizeof(int));
}

// `smem` is aligned to 8 bytes.
__device__ __forceinline__ PlanScratch MakePlanScratch(PlanTotals totals,
                                                       const PlanShape& shape,
                                                       void* smem) {
  PlanScratch scratch;
  scratch.sums = static_cast<int*>(smem);
  scratch.base = scratch.sums + PlanSums(totals, shape);
  scratch.counts = reinterpret_cast<uint16_t*>(scratch.base + shape.width);
  return scratch;
}

// One batch entry with 32-bit sizes; R < 2^31.
struct PlanView {
  const int32_t* expert_ids;  // [R]
  const int32_t* expert_map;  // [E] or nullptr
  int32_t* expert_offsets;    // [E_l+1]
  int32_t* row_to_token;      // [R]
  int32_t* slot_to_row;       // [R]
  int rows;                   // R
  int local_experts;          // E_l
  unsigned top_k;             // K
};

__device__ __forceinline__ PlanView PlanBatchEntry(const PlanParams& p, int64_t b) {
  int64_t rows = p.num_tokens * p.top_k;
  PlanView v;
  v.expert_ids = p.expert_ids + b * rows;
  v.expert_map = p.expert_map;
  v.expert_offsets = p.expert_offsets + b * (p.num_local_experts + 1);
  v.row_to_token = p.row_to_token + b * rows;
  v.slot_to_row = p.slot_to_row + b * rows;
  v.rows = static_cast<int>(rows);
  v.local_experts = static_cast<int>(p.num_local_experts);
  v.top_k = static_cast<unsigned>(p.top_k);
  return v;
}

// The part of a batch entry that this block places.
struct PlanChunk {
  int64_t batch;  // b
  int chunk;
  unsigned first_row;
  unsigned end_row;
};

__device__ __forceinline__ PlanChunk PlanBlockChunk(const PlanShape& shape, int rows) {
  PlanChunk c;
  c.batch = blockIdx.x / static_cast<unsigned>(shape.chunks);
  c.chunk = static_cast<int>(blockIdx.x % static_cast<unsigned>(shape.chunks));
  // Unsigned: the end of the last chunk may pass 2^31.
  c.first_row = static_cast<unsigned>(c.chunk) * static_cast<unsigned>(shape.chunk_rows);
  c.end_row = min(c.first_row + shape.chunk_rows, static_cast<unsigned>(rows));
  return c;
}

}  // namespace jaxmoe
