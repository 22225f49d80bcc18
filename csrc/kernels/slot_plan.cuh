// The plan of up to 32 slots, made by every warp that needs it, in registers: decoding one token,
// the launch of a plan kernel would take a tenth of the layer.
#pragma once

#include "csrc/kernels/local_expert.cuh"

namespace jaxmoe {

// Lane r holds slot r = token * top_k + k. Rows are the slots sorted by local expert, stably, as
// plan sorts them; slots of no local expert have no row. All lanes of a warp construct the plan and
// call its members.
class SlotPlan {
 public:
  __device__ SlotPlan(const PlanParams& plan, int lane) : plan_(plan), lane_(lane) {
    num_slots_ = static_cast<int>(plan.num_tokens * plan.top_k);
    if (lane < num_slots_) expert_ = LocalExpert(plan, __ldcg(plan.expert_ids + lane));
    for (int r = 0; r < num_slots_; ++r) {
      const int other = __shfl_sync(kAll, expert_, r);
      if (other == kPlanNoExpert) continue;
      smaller_ += other < expert_;
      equal_ += other == expert_;
      equal_before_ += other == expert_ && r < lane;
    }
  }

  __device__ int expert() const { return expert_; }
  __device__ int first_row() const { return smaller_; }
  // Row of slot `lane`, or -1.
  __device__ int row() const { return Placed() ? smaller_ + equal_before_ : -1; }
  // Rows of the expert on the lane of the expert's first slot, 0 on every other lane.
  __device__ int num_rows() const { return Placed() && equal_before_ == 0 ? equal_ : 0; }

  // Token of row `lane`; 0 past the last.
  __device__ int TokenOfRow() const {
    int slot = 0;
    for (int r = 0; r < num_slots_; ++r) {
      if (__shfl_sync(kAll, row(), r) == lane_) slot = r;
    }
    return slot / static_cast<int>(plan_.top_k);
  }

  // Writes what later kernels read: slot_to_row and the number of rows.
  __device__ void Write() const {
    if (lane_ < num_slots_) plan_.slot_to_row[lane_] = row();
    const int rows = __popc(__ballot_sync(kAll, Placed()));
    if (lane_ == 0) plan_.expert_offsets[plan_.num_local_experts] = rows;
  }

 private:
  static constexpr unsigned kAll = 0xffffffffu;

  __device__ bool Placed() const { return expert_ != kPlanNoExpert; }

  const PlanParams& plan_;
  const int lane_;
  int num_slots_;
  int expert_ = kPlanNoExpert;
  int smaller_ = 0;       // slots of smaller experts
  int equal_ = 0;         // slots of this expert
  int equal_before_ = 0;  // slots of this expert before this slot
};

}  // namespace jaxmoe
