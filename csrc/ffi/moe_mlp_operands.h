// What the handlers of the fused layer have in common: operands, and how they are checked.
#pragma once

#include "csrc/ffi/moe_mlp_attrs.h"
#include "csrc/gemm/moe_mlp.h"

namespace jaxmoe {

// T tokens, K choices, R = T * K rows, H hidden, I intermediate, N = 2 I when gated, else I.
// Scales, xq, hq and floats have no elements if the format does not quantize tokens.
struct MoeMlpOperands {
  In x;               // [T,H], perhaps quantized
  In x_scales;        // of quantized x, see TokenScales
  In expert_ids;      // [T,K]
  In w_gate_up;       // [E1,H,N] or [E1,N,H]; with w_up the gate half
  In gate_up_scales;  // see WeightScales
  In w_up;            // the up half, or absent
  In w_down;          // [E2,I,H] or [E2,H,I]
  In down_scales;
  In b_gate_up;   // [E1,N] or absent
  In b_down;      // [E2,H] or absent
  In expert_map;  // [num_experts] or absent
  In x_scale;     // [1] or absent: static scales
  In h_scale;     // [1] or [E_l] or absent
  In act;         // [R,I]; from here on scratch
  In xq;          // see MoeMlpParams
  In hq;          // [R,I]
  In floats;      // [MlpFloats::size]
  In index;       // [MlpIndex::size]
};

// Those that other operands share.
struct MoeMlpDims {
  Dim T, K, H;
};

// All of a layer but rows, weights, residual and result, unless `take` fails.
MoeMlpParams TakeMoeMlp(const MoeMlpOperands& operands,
                        const MoeMlpAttrs& attrs,
                        MoeMlpDims* dims,
                        Operands* take);

}  // namespace jaxmoe
