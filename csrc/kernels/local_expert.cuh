// Global expert ids to those of this device's window or map.
#pragma once

#include "csrc/kernels/plan.h"

namespace jaxmoe {

inline constexpr int kPlanNoExpert = -1;

// Local expert of a global id, kPlanNoExpert if it has none here. Reads from L2: a kernel that
// began early must not see what an SM has kept in L1 of the layer before.
__device__ __forceinline__ int LocalExpert(const PlanParams& p, int id) {
  if (id < 0 || id >= p.num_experts) return kPlanNoExpert;
  int64_t local = p.expert_map != nullptr ? __ldcg(p.expert_map + id) : id - p.expert_offset;
  return local >= 0 && local < p.num_local_experts ? static_cast<int>(local) : kPlanNoExpert;
}

}  // namespace jaxmoe
