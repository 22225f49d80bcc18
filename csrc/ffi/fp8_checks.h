// Checks of the scales of FP8 operands.
#pragma once

#include "csrc/ffi/checks.h"
#include "csrc/gemm/moe_gemm.h"
#include "csrc/kernels/quantize.h"

namespace jaxmoe {

using Floats = ffi::Buffer<ffi::F32>;

// Scales of [count, n, k] weights or, with count = 0, of [n, k] tokens.
inline ffi::Error CheckScales(const char* op,
                              const char* arg,
                              const Floats& scales,
                              ScaleFormat format,
                              int64_t count,
                              int64_t n,
                              int64_t k) {
  const bool weights = count > 0;
  const int64_t k_blocks = CeilDiv(k, kQuantBlock);
  switch (format) {
    case ScaleFormat::kTensor:
      return weights ? CheckShape(op, arg, scales, {count}) : CheckShape(op, arg, scales, {});
    case ScaleFormat::kChannel:
      return weights ? CheckShape(op, arg, scales, {count, n}) : CheckShape(op, arg, scales, {n});
    case ScaleFormat::kBlock:
      return weights ? CheckShape(op, arg, scales, {count, CeilDiv(n, kQuantBlock), k_blocks})
                     : CheckShape(op, arg, scales, {n, k_blocks});
  }
  return ffi::Error::Internal("unreachable: `format` has been checked");
}

}  // namespace jaxmoe
