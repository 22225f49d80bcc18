// Device code that counts the slots of other chunks by expert, see plan.cuh.
#pragma once

#include <cstdint>

#include "csrc/kernels/local_expert.cuh"
#include "csrc/kernels/plan_shape.cuh"

namespace jaxmoe {

// Adds some of the slots outside of [hole_begin, hole_end) whose expert is in the window: of their
// sequence the part [begin, end), to `low` those before the hole, to `high` those behind it. All
// threads of the block call it.
__device__ __forceinline__ void CountSlots(const PlanParams& p,
                                           const PlanView& v,
                                           const int* staged,
                                           unsigned begin,
                                           unsigned end,
                                           unsigned hole_begin,
                                           unsigned hole_end,
                                           int window,
                                           int width,
                                           int* low,
                                           int* high) {
  constexpr int kUnroll = 8;
  for (unsigned base = begin + threadIdx.x; base < end; base += kUnroll * blockDim.x) {
    int id[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      unsigned at = base + i * blockDim.x;
      unsigned row = at < hole_begin ? at : at + (hole_end - hole_begin);
      id[i] = at < end ? __ldcg(v.expert_ids + row) : kPlanNoExpert;
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) id[i] = LocalExpert(p, id[i], staged);
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      unsigned column = id[i] - window;  // of kPlanNoExpert: more than any
      int* counts = base + i * blockDim.x < hole_begin ? low : high;
      if (column < static_cast<unsigned>(width)) atomicAdd(counts + column, 1);
    }
  }
}

// The same for the quads [begin, end) of slots; quads do not straddle the hole.
template <bool kMapped>
__device__ __forceinline__ void CountQuads(const PlanParams& p,
                                           const int4* quads,
                                           const int* staged,
                                           unsigned begin,
                                           unsigned end,
                                           unsigned hole_begin,
                                           unsigned hole_end,
                                           int window,
                                           int width,
                                           int* low,
                                           int* high) {
  constexpr int kUnroll = 4;
  __shared__ int nowhere;  // for slots of other experts: a branch costs more than counting them
  for (unsigned base = begin + threadIdx.x; base < end; base += kUnroll * blockDim.x) {
    int4 quad[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      unsigned at = base + i * blockDim.x;
      unsigned from = at < hole_begin ? at : at + (hole_end - hole_begin);
      if (at < end) quad[i] = __ldcg(quads + from);
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      unsigned at = base + i * blockDim.x;
      if (at >= end) break;
      int* counts = at < hole_begin ? low : high;
      const int id[4] = {quad[i].x, quad[i].y, quad[i].z, quad[i].w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        unsigned column = LocalExpertOf<kMapped>(p, id[j], staged) - window;
        atomicAdd(column < static_cast<unsigned>(width) ? counts + column : &nowhere, 1);
      }
    }
  }
}

// Counts this block's share, as one of kBlocks, of the slots outside of their chunks. `staged`: see
// LocalExpertOf.
template <unsigned kBlocks>
__device__ __forceinline__ void CountShare(const PlanParams& p,
                                           const PlanView& v,
                                           const PlanShape& shape,
                                           const int* staged,
                                           int chunk,
                                           int member,
                                           int window,
                                           int width,
                                           int* low,
                                           int* high) {
  unsigned rows = v.rows;
  unsigned begin = static_cast<unsigned>(chunk - member) * shape.chunk_rows;
  unsigned end = min(begin + kBlocks * shape.chunk_rows, rows);
  unsigned others = rows - (end - begin);
  // Ids are read by fours if the entry is aligned to 16 bytes. Chunks are then, and only the last
  // slots may be left over.
  bool aligned = reinterpret_cast<uintptr_t>(v.expert_ids) % sizeof(int4) == 0;
  unsigned quads = aligned ? others / 4 : 0;
  unsigned share = (quads + kBlocks - 1) / kBlocks;
  unsigned first = member * share;
  unsigned last = min(first + share, quads);
  auto* ids = reinterpret_cast<const int4*>(v.expert_ids);
  if (p.expert_map != nullptr) {
    CountQuads<true>(p, ids, staged, first, last, begin / 4, end / 4, window, width, low, high);
  } else {
    CountQuads<false>(p, ids, staged, first, last, begin / 4, end / 4, window, width, low, high);
  }
  unsigned rest = others - 4 * quads;
  share = (rest + kBlocks - 1) / kBlocks;
  first = others - rest + member * share;
  last = min(first + share, others);
  CountSlots(p, v, staged, first, last, begin, end, window, width, low, high);
}

// Thread e gets the sums of the column window + e of the table: of the rows before those of
// `chunk`, and of all. `table` is this batch entry's, `sums` is shared [2][kPlanWindow].
__device__ __forceinline__ void SumTable(const int32_t* table,
                                         const PlanShape& shape,
                                         const PlanView& v,
                                         int chunk,
                                         int window,
                                         int width,
                                         int* sums,
                                         int* before,
                                         int* total) {
  constexpr int kUnroll = 16;
  // A warp sums 32 columns over every `parts`-th chunk.
  int lane = threadIdx.x % kWarpSize;
  int warp = threadIdx.x / kWarpSize;
  int column_groups = max(1, static_cast<int>(CeilDiv(width, kWarpSize)));
  int columns = column_groups * kWarpSize;
  int parts = static_cast<int>(blockDim.x / kWarpSize) / column_groups;
  int part = warp / column_groups;
  int column = warp % column_groups * kWarpSize + lane;
  if (part < parts && column < width) {
    int part_before = 0;
    int part_total = 0;
    for (int first = part; first < shape.chunks; first += kUnroll * parts) {
      int count[kUnroll];
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        int c = first + i * parts;
        const int32_t* address = table + static_cast<int64_t>(c) * v.local_experts;
        count[i] = c < shape.chunks ? __ldcg(address + window + column) : 0;
      }
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        part_total += count[i];
        if (first + i * parts < chunk) part_before += count[i];
      }
    }
    sums[part * columns + column] = part_before;
    sums[kPlanWindow + part * columns + column] = part_total;
  }
  __syncthreads();
  *before = 0;
  *total = 0;
  if (static_cast<int>(threadIdx.x) >= width) return;
  for (int i = 0; i < parts; ++i) {
    *before += sums[i * columns + threadIdx.x];
    *total += sums[kPlanWindow + i * columns + threadIdx.x];
  }
}

}  // namespace jaxmoe
