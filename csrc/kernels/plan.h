// Launcher of the plan: a stable counting sort of routed slots by local expert.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "csrc/common/types.h"

namespace jaxmoe {

// Problems of at most this many rows take one kernel, whose blocks count all ids.
inline constexpr int64_t kPlanDirectRows = 8192;

// Problems of at most this many rows take one kernel too, if the experts fit: clusters count the
// ids.
inline constexpr int64_t kPlanSharedRows = 128 * 2048;
inline constexpr int64_t kPlanSharedExperts = 1024;

// Larger problems take two kernels and scratch.
constexpr bool PlanHasTable(int64_t rows, int64_t local_experts) {
  return rows > kPlanDirectRows && (rows > kPlanSharedRows || local_experts > kPlanSharedExperts);
}

// Rows handled by one thread block of these, or of a direct problem: 512, up to 2048 to keep to 64
// blocks, more to keep to 128.
constexpr int64_t PlanChunkRows(int64_t rows) {
  int64_t of_64 = 512 * CeilDiv(rows, 512 * 64);
  int64_t of_128 = 2048 * CeilDiv(rows, 2048 * 128);
  int64_t chunk = of_64 < of_128 ? of_64 : of_128;
  return chunk > 0 ? chunk : 512;
}

constexpr int64_t PlanChunks(int64_t rows) {
  int64_t chunks = CeilDiv(rows, PlanChunkRows(rows));
  return chunks > 0 ? chunks : 1;
}

// int32 elements of scratch. The same formula is `plan_scratch_size` in jaxmoe/plan.py.
constexpr int64_t PlanScratchInts(int64_t batch, int64_t rows, int64_t local_experts) {
  return PlanHasTable(rows, local_experts) ? batch * PlanChunks(rows) * local_experts : 1;
}

// R = num_tokens * top_k rows per batch entry, E_l = num_local_experts. Experts and their offset
// are below 2^31.
struct PlanParams {
  const int32_t* expert_ids;  // [B,T,K]
  const int32_t* expert_map;  // [E] global id -> local id, or nullptr: id - expert_offset
  int32_t* expert_offsets;    // [B,E_l+1]
  int32_t* row_to_token;      // [B,R], -1 past expert_offsets[E_l]
  int32_t* slot_to_row;       // [B,T,K], -1 for slots of no local expert
  int32_t* scratch;           // [PlanScratchInts(B, R, E_l)]
  int64_t batch;
  int64_t num_tokens;
  int64_t top_k;
  int64_t num_experts;
  int64_t expert_offset;
  int64_t num_local_experts;
  int32_t* zero_counters;  // nullable; [num_zero_counters] set to 0 if B > 0
  int64_t num_zero_counters;
  bool pdl;
};

// Requires num_tokens * top_k < 2^31.
cudaError_t LaunchPlan(const PlanParams& params, cudaStream_t stream);

}  // namespace jaxmoe
