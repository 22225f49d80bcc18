// Launcher of route and plan as one: the experts of every token, and the order of rows by expert.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "csrc/kernels/plan.h"
#include "csrc/kernels/route.h"

namespace jaxmoe {

// Entries of at most this many tokens take one kernel if their rows and experts fit in a cluster.
inline constexpr int64_t kRoutePlanClusterTokens = 256;

// Blocks that route the tokens of an entry and count them, where a table holds the counts.
inline constexpr int64_t kRoutePlanTableRows = 128;
inline constexpr int64_t kRoutePlanTableExperts = 1024;

// Tokens of one row of the table.
constexpr int64_t RoutePlanTableTokens(int64_t num_tokens) {
  return CeilDiv(num_tokens, kRoutePlanTableRows);
}

constexpr bool RoutePlanHasTable(int64_t rows, int64_t local_experts) {
  return rows > kPlanDirectRows && local_experts <= kRoutePlanTableExperts;
}

// int32 elements of scratch. The same formula is `scratch_size` in jaxmoe/route_and_plan.py.
constexpr int64_t RoutePlanScratchInts(int64_t batch,
                                       int64_t num_tokens,
                                       int64_t columns,
                                       int64_t local_experts) {
  int64_t rows = num_tokens * columns;
  if (!RoutePlanHasTable(rows, local_experts)) return PlanScratchInts(batch, rows, local_experts);
  return batch * CeilDiv(num_tokens, RoutePlanTableTokens(num_tokens)) * local_experts;
}

// `route` has the tokens of all `plan.batch` entries and the arrays that both know, `plan` the
// rest: expert_ids, num_tokens of an entry, top_k with the columns of shared experts. plan.scratch
// is [RoutePlanScratchInts]; plan.zero_counters must be nullptr.
cudaError_t LaunchRoutePlan(const RouteParams& route, const PlanParams& plan, cudaStream_t stream);

}  // namespace jaxmoe
