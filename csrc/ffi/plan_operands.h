// Operands of the handlers that plan.
#pragma once

#include "csrc/ffi/checks.h"
#include "csrc/kernels/plan.h"

namespace jaxmoe {

// B examples, T tokens, K choices, R = T * K rows, E experts of which E_l are local.
struct PlanOperands {
  In expert_ids;      // [B,T,K]
  In expert_map;      // [E] or absent
  In expert_offsets;  // [B,E_l+1]
  In row_to_token;    // [B,R]
  In slot_to_row;     // [B,T,K]
  In scratch;         // [PlanScratchInts] or more
};

inline PlanParams TakePlan(const PlanOperands& given,
                           int64_t num_experts,
                           int64_t expert_offset,
                           Operands* take) {
  Dim B, T, K, offsets, S;
  PlanParams plan{};
  take->Range("num_experts", num_experts, 0, kMaxInt);
  take->Range("expert_offset", expert_offset, 0, kMaxInt);
  plan.expert_ids = take->Ints("expert_ids", given.expert_ids, {B, T, K});
  plan.expert_map = take->IntsOrNull("expert_map", given.expert_map, {num_experts});
  plan.expert_offsets = take->Ints("expert_offsets", given.expert_offsets, {B, offsets});
  plan.row_to_token = take->Ints("row_to_token", given.row_to_token, {B, T * K});
  plan.slot_to_row = take->Ints("slot_to_row", given.slot_to_row, {B, T, K});
  plan.scratch = take->Ints("scratch", given.scratch, {S});
  plan.batch = B;
  plan.num_tokens = T;
  plan.top_k = K;
  plan.num_experts = num_experts;
  plan.expert_offset = expert_offset;
  plan.num_local_experts = offsets - 1;
  take->Range("T * K", T * K, 0, kMaxInt);
  take->Range("expert_offsets.shape[1]", offsets, 1, kMaxInt);
  if (take->failed()) return plan;
  take->Range("scratch.shape[0]", S, PlanScratchInts(B, T * K, plan.num_local_experts), kMaxInt);
  return plan;
}

}  // namespace jaxmoe
