// Tensor maps of bulk copies: 128 bytes of neighbouring columns, swizzled by 128 bytes.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "csrc/common/types.h"

namespace jaxmoe {

// Each encoder returns null, or the reason why the driver refused the array.

// [count, rows, cols] in boxes of `box_rows` rows of one matrix. Coordinates: column, row, matrix.
const char* EncodeMatricesMap(DType dtype,
                              const void* base,
                              int64_t count,
                              int64_t rows,
                              int64_t cols,
                              int box_rows,
                              CUtensorMap* map);

// [rows, cols] in boxes of `box_rows` rows. Coordinates: column, row.
const char* EncodeMatrixMap(
    DType dtype, const void* base, int64_t rows, int64_t cols, int box_rows, CUtensorMap* map);

// [rows, cols] in boxes of `box_rows` rows whose first few a load may leave out: those become zeros
// and are not read. The second and the third coordinate both step by a row: the third is the first
// row that is taken, the second minus the number of rows left out, which puts those out of bounds.
const char* EncodeRowsMap(
    DType dtype, const void* base, int64_t rows, int64_t cols, int box_rows, CUtensorMap* map);

}  // namespace jaxmoe
