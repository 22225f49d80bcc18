// Launcher of the plan: a stable counting sort of routed slots by local expert.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "csrc/common/types.h"

namespace jaxmoe {

// Problems up to both limits take one kernel and no scratch, larger ones three kernels.
inline constexpr int64_t kPlanSmallRows = 4096;
inline constexpr int64_t kPlanSmallExperts = 1024;
inline constexpr int64_t kPlanMaxChunks = 512;

// Rows handled by one thread block of the three-kernel path.
constexpr int64_t PlanChunkRows(int64_t rows) {
  int64_t chunk = 1024 * CeilDiv(rows, 1024 * kPlanMaxChunks);
  return chunk > 0 ? chunk : 1024;
}

constexpr bool PlanIsSmall(int64_t rows, int64_t local_experts) {
  return rows <= kPlanSmallRows && local_experts <= kPlanSmallExperts;
}

// int32 elements of scratch. The same formula is `plan_scratch_size` in jaxmoe/plan.py.
constexpr int64_t PlanScratchInts(int64_t batch, int64_t rows, int64_t local_experts) {
  if (PlanIsSmall(rows, local_experts)) return 1;
  int64_t chunks = CeilDiv(rows, PlanChunkRows(rows));
  return batch * local_experts * ((chunks > 0 ? chunks : 1) + 1);
}

// R = num_tokens * top_k rows per batch entry, E_l = num_local_experts.
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
