// Global expert ids to those of this device's window or map.
#pragma once

#include "csrc/kernels/plan.h"

namespace jaxmoe {

inline constexpr int kPlanNoExpert = -1;

// Local expert of a global id, kPlanNoExpert if it has none here. kMapped: there is a map. Reads
// from L2: a kernel that began early must not see what an SM has kept in L1 of the layer before.
// `staged`: a copy of the map in shared memory, or null. Many blocks that look up many ids wait for
// the few lines of L2 that the map is.
template <bool kMapped>
__device__ __forceinline__ int LocalExpertOf(const PlanParams& p,
                                             int id,
                                             const int* staged = nullptr) {
  // Unsigned, so that one comparison sees both ends; without branches, so that several ids overlap.
  bool known = static_cast<unsigned>(id) < static_cast<unsigned>(p.num_experts);
  int local = id - static_cast<int>(p.expert_offset);
  if (kMapped && known) local = staged != nullptr ? staged[id] : __ldcg(p.expert_map + id);
  bool here = known && static_cast<unsigned>(local) < static_cast<unsigned>(p.num_local_experts);
  return here ? local : kPlanNoExpert;
}

__device__ __forceinline__ int LocalExpert(const PlanParams& p,
                                           int id,
                                           const int* staged = nullptr) {
  return p.expert_map != nullptr ? LocalExpertOf<true>(p, id, staged) : LocalExpertOf<false>(p, id);
}

}  // namespace jaxmoe
