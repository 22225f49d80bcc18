// Encodes the tensor maps of the grouped GEMM's operands.
#pragma once

#include <cuda.h>

#include "csrc/moe_gemm/moe_gemm.h"

namespace jaxmoe {

// [num_weights, n, k] or [num_weights, k, n]: boxes of 64 x 64 elements of one weight. Null on
// success, otherwise the reason.
const char* EncodeWeightMap(const MoeGemmProblem& problem, CUtensorMap* map);

// [x_rows, k]: boxes of 64 elements by `box_rows` rows.
const char* EncodeTokenMap(const MoeGemmProblem& problem, int box_rows, CUtensorMap* map);

}  // namespace jaxmoe
