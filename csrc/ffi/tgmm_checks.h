// What both handlers of the weight gradient check, and how they launch it.
#pragma once

#include "csrc/ffi/checks.h"
#include "csrc/kernels/zero_rows.h"
#include "csrc/weight_grad/tgmm.h"

namespace jaxmoe {

inline constexpr char kTgmmOp[] = "grouped_gemm";

// int32 scratch: the tile counter. gmm_scratch_size in jaxmoe/_heuristics.py.
inline constexpr int64_t kTgmmScratchInts = 4;

// What both handlers check: all but the shapes of x, dy and dw.
inline ffi::Error CheckTgmm(const ffi::AnyBuffer& x,
                            const ffi::AnyBuffer& dy,
                            const ffi::AnyBuffer& starts,
                            const ffi::AnyBuffer& sizes,
                            const ffi::AnyBuffer& dw,
                            const ffi::AnyBuffer& scratch) {
  JAXMOE_RETURN_IF_ERROR(CheckDtype(kTgmmOp, "x", x, {ffi::DataType::BF16, ffi::DataType::F16}));
  JAXMOE_RETURN_IF_ERROR(CheckDtype(kTgmmOp, "dy", dy, {x.element_type()}));
  JAXMOE_RETURN_IF_ERROR(CheckDtype(kTgmmOp, "dw", dw, {x.element_type(), ffi::DataType::F32}));
  for (const ffi::AnyBuffer& integers : {starts, sizes, scratch}) {
    JAXMOE_RETURN_IF_ERROR(CheckDtype(kTgmmOp, "index operand", integers, {ffi::DataType::S32}));
  }
  return CheckShape(kTgmmOp, "scratch", scratch, {kTgmmScratchInts});
}

// Fills in the dtypes and clears the counter before the kernel, on which that then depends.
inline ffi::Error LaunchTgmmFfi(TgmmProblem gemm,
                                const ffi::AnyBuffer& x,
                                const ffi::AnyBuffer& dw,
                                const ffi::AnyBuffer& scratch,
                                int64_t cluster,
                                cudaStream_t stream) {
  if (dw.element_count() == 0) return ffi::Error::Success();
  JAXMOE_RETURN_IF_ERROR(CheckRange(kTgmmOp, "cluster", cluster, 1, 2));
  ZeroRowsParams zero{};
  zero.zero_counters = static_cast<int32_t*>(scratch.untyped_data());
  zero.num_zero_counters = kTgmmScratchInts;
  JAXMOE_RETURN_IF_ERROR(CudaStatus(kTgmmOp, LaunchZeroRows(zero, stream)));
  gemm.dtype = ToDType(x.element_type());
  gemm.out_f32 = dw.element_type() == ffi::DataType::F32;
  gemm.tile_counter = zero.zero_counters;
  gemm.pdl = true;
  TgmmConfig config;
  config.cluster = static_cast<int>(cluster);
  if (const char* error = LaunchTgmm(gemm, config, stream)) return InvalidArgument(kTgmmOp, error);
  return ffi::Error::Success();
}

}  // namespace jaxmoe
