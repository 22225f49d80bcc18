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

// [rows, cols] in boxes of 64 elements by `box_rows` rows of which a load may leave out the first
// few, as many as it likes: they are zeros, and are not read. The second and the third coordinate
// both step by a row: the third is the first row that is taken, the second minus the rows left out,
// which makes those out of bounds.
const char* EncodeRowsMap(
    DType dtype, const void* base, int64_t rows, int64_t cols, int box_rows, CUtensorMap* map);

}  // namespace jaxmoe
