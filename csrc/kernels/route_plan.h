// Launcher of route and plan as one: the experts of every token, and the order of rows by expert.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "csrc/kernels/plan.h"
#include "csrc/kernels/route.h"

namespace jaxmoe {

// Entries of at most so many tokens take one kernel if their rows and experts fit in a cluster.
// With more experts the scratch of its warps would not fit in shared memory.
inline constexpr int64_t kRoutePlanClusterTokens = 128;
inline constexpr int64_t kRoutePlanExperts = 512;

// `route` has the tokens of all `plan.batch` entries and the arrays that both know, `plan` the
// rest: expert_ids, num_tokens of an entry, top_k with the columns of shared experts. plan.scratch
// is [PlanScratchInts]; plan.zero_counters must be nullptr.
cudaError_t LaunchRoutePlan(const RouteParams& route, const PlanParams& plan, cudaStream_t stream);

}  // namespace jaxmoe
