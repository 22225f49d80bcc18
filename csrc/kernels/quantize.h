// FP8 quantization: scales from the largest magnitudes, or given, and the values over them.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "csrc/common/types.h"

namespace jaxmoe {

enum class ElementType : int32_t { kE4M3 = 0, kE5M2 = 1 };

constexpr int kQuantBlock = 128;
// Most floats of `partial` that a batch entry takes.
constexpr int kMaxQuantPartials = 1024;

// amax      = max |x| over the finite elements of valid rows that share the scale, 0 if none
// scale     = static_scales[..] if given (NaN outside [2^-126, 2^126]), else max(amax / M, 2^-126),
//             with e8m0 rounded up to a power of two;  M = 448 (kE4M3) or 57344 (kE5M2)
// values    = fp8(clip(x * (1 / scale), -M, M)), NaN where x or the scale is NaN
// Row r is valid if r < *num_rows (every row without num_rows). Others are not read, and neither
// their values nor, with kRow and kGroup, their scales are written.
// Row r of values is row r of x. With slot_to_row (batch = 1, not kBlock) instead row t of x goes
// to rows slot_to_row[t * top_k + k] of values for each k < top_k, nowhere where that is negative
// or at least num_out_rows; scales stay at t.
struct QuantizeParams {
  const void* x;  // [batch, rows, cols]; rows of 16-byte multiples, 16-byte aligned
  DType dtype;
  int64_t batch;
  int64_t rows;
  int64_t cols;
  Shared shared;  // of each batch entry
  ElementType element;
  bool e8m0;
  void* values;   // fp8, [batch, rows, cols]; [num_out_rows, cols] with slot_to_row
  float* scales;  // [batch] | [batch, rows] | [batch, rows, ceil(cols / 128)]
                  // | [batch, ceil(rows / 128), ceil(cols / 128)]; static ones are written too
  const float* static_scales;  // shape of scales; null: dynamic
  const int* slot_to_row;      // [rows, top_k]; null: rows stay where they are
  int64_t top_k;
  int64_t num_out_rows;
  const int* num_rows;  // [1], clamped to [0, rows]; null: rows
  float* partial;       // kTensor without static_scales: [batch, kMaxQuantPartials]
  bool pdl;             // the first launch may start before the kernel ahead of it has finished
  bool early_x;         // which did not write x, nor reads what is written here; no num_rows then
  bool lets_start;      // see GridDependency; not kBlock
};
cudaError_t LaunchQuantize(const QuantizeParams& params, cudaStream_t stream);

}  // namespace jaxmoe
