// Counts executions per FFI target, so that a test can tell a recorded call from a replayed one.
#pragma once

#include <atomic>
#include <cstdint>
#include <iterator>

namespace jaxmoe {

// One entry per FFI target; kTargetNames is in the same order.
enum class Target {
  kRoute,
  kPlan,
  kRoutePlan,
  kPermute,
  kFinalize,
  kGmm,
  kMoeMlp,
  kMoeMlpRows,
  kQuantize,
  kMoeMlpFp8,
  kMoeMlpFp8Rows,
  kGmmFp8,
  kTgmm,
  kTgmmRows,
  kGateUp
};

inline constexpr const char* kTargetNames[] = {
    "jaxmoe_route_v2",
    "jaxmoe_plan_v1",
    "jaxmoe_route_plan_v1",
    "jaxmoe_permute_v1",
    "jaxmoe_finalize_v1",
    "jaxmoe_gmm_v1",
    "jaxmoe_moe_mlp_v1",
    "jaxmoe_moe_mlp_rows_v1",
    "jaxmoe_quantize_v1",
    "jaxmoe_moe_mlp_fp8_v1",
    "jaxmoe_moe_mlp_fp8_rows_v1",
    "jaxmoe_gmm_fp8_v1",
    "jaxmoe_tgmm_v1",
    "jaxmoe_tgmm_rows_v1",
    "jaxmoe_gate_up_v1",
};
inline constexpr int kNumTargets = static_cast<int>(std::size(kTargetNames));

// A command buffer runs the handler when it is recorded and not when it is replayed.
inline std::atomic<int64_t> execute_counts[kNumTargets];

// Called once by every handler, first thing in its body: CountExecution(Target::kPlan).
inline void CountExecution(Target target) {
  execute_counts[static_cast<int>(target)].fetch_add(1, std::memory_order_relaxed);
}

}  // namespace jaxmoe
