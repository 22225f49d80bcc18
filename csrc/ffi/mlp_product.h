// What the handlers of the two products of a training step share: see gate_up_ffi.cc and
// down_dgrad_ffi.cc.
#pragma once

#include <initializer_list>

#include "csrc/ffi/checks.h"
#include "csrc/ffi/gemm_attrs.h"
#include "csrc/kernels/zero_rows.h"

namespace jaxmoe {

inline constexpr char kMlpProduct[] = "moe_mlp";
inline constexpr int64_t kProductInts = 4;  // tile counter, gmm_scratch_size in _heuristics.py
inline constexpr int64_t kMaxProduct = (int64_t{1} << 31) - 1;

// What both have: rows of k elements times [n, k] or [k, n] of each expert.
inline ffi::Error CheckProduct(const ffi::AnyBuffer& x,
                               const ffi::AnyBuffer& w,
                               const ffi::AnyBuffer& starts,
                               const ffi::AnyBuffer& sizes,
                               const ffi::AnyBuffer& scratch,
                               int64_t rows,
                               int64_t n,
                               int64_t weight_layout,
                               const ActivationAttrs& activation,
                               int64_t gate_up) {
  JAXMOE_RETURN_IF_ERROR(CheckRange(kMlpProduct, "weight_layout", weight_layout, 0, 1));
  JAXMOE_RETURN_IF_ERROR(CheckRange(kMlpProduct, "gate_up", gate_up, 0, 2));
  JAXMOE_RETURN_IF_ERROR(CheckRange(kMlpProduct, "activation kind", activation.kind, 0, 4));
  JAXMOE_RETURN_IF_ERROR(CheckRank(kMlpProduct, "w", w, 3));
  JAXMOE_RETURN_IF_ERROR(CheckRank(kMlpProduct, "starts", starts, 1));
  JAXMOE_RETURN_IF_ERROR(
      CheckDtype(kMlpProduct, "x", x, {ffi::DataType::BF16, ffi::DataType::F16}));
  JAXMOE_RETURN_IF_ERROR(CheckDtype(kMlpProduct, "w", w, {x.element_type()}));
  const int64_t k = x.dimensions()[1], experts = w.dimensions()[0];
  const int64_t groups = starts.dimensions()[0];
  const bool kn = weight_layout == static_cast<int64_t>(WeightLayout::kKN);
  JAXMOE_RETURN_IF_ERROR(CheckShape(kMlpProduct, "w", w, {experts, kn ? k : n, kn ? n : k}));
  for (const ffi::AnyBuffer& integers : {starts, sizes, scratch}) {
    JAXMOE_RETURN_IF_ERROR(
        CheckDtype(kMlpProduct, "index operand", integers, {ffi::DataType::S32}));
  }
  JAXMOE_RETURN_IF_ERROR(CheckShape(kMlpProduct, "sizes", sizes, {groups}));
  JAXMOE_RETURN_IF_ERROR(CheckShape(kMlpProduct, "scratch", scratch, {kProductInts}));
  JAXMOE_RETURN_IF_ERROR(CheckRange(kMlpProduct, "rows", rows, 0, kMaxProduct));
  JAXMOE_RETURN_IF_ERROR(CheckRange(kMlpProduct, "x.shape[0]", x.dimensions()[0], 0, kMaxProduct));
  JAXMOE_RETURN_IF_ERROR(CheckRange(kMlpProduct, "groups", groups, 0, kMaxProduct));
  JAXMOE_RETURN_IF_ERROR(CheckRange(kMlpProduct, "w.shape[0]", experts, 1, kMaxProduct));
  JAXMOE_RETURN_IF_ERROR(CheckRange(kMlpProduct, "K", k, 0, kMaxProduct / 4));
  return CheckRange(kMlpProduct, "N", n, 0, kMaxProduct / 4);
}

// Rows of no group of the results become 0, and so do the counters.
inline ffi::Error ZeroRest(std::initializer_list<ffi::AnyBuffer> results,
                           const ffi::AnyBuffer& starts,
                           const ffi::AnyBuffer& sizes,
                           const ffi::AnyBuffer& scratch,
                           cudaStream_t stream) {
  const auto row_bytes = [](const ffi::AnyBuffer& rows) -> int64_t {
    return rows.dimensions()[1] * ElementSize(ToDType(rows.element_type()));
  };
  const ffi::AnyBuffer& first = *results.begin();
  ZeroRowsParams zero{};
  zero.out = first.untyped_data();
  zero.row_bytes = row_bytes(first);
  for (size_t i = 1; i < results.size(); ++i) {
    const ffi::AnyBuffer& other = results.begin()[i];
    zero.others[i - 1] = {other.untyped_data(), row_bytes(other)};
  }
  zero.starts = starts.typed_data<int32_t>();
  zero.sizes = sizes.typed_data<int32_t>();
  zero.batch = 1;
  zero.num_rows = first.dimensions()[0];
  zero.num_groups = starts.dimensions()[0];
  zero.zero_counters = scratch.typed_data<int32_t>();
  zero.num_zero_counters = kProductInts;
  return CudaStatus(kMlpProduct, LaunchZeroRows(zero, stream));
}

// Of operands that passed CheckProduct.
inline MoeGemmProblem Product(const ffi::AnyBuffer& x,
                              const ffi::AnyBuffer& w,
                              const ffi::AnyBuffer& starts,
                              const ffi::AnyBuffer& sizes,
                              const ffi::AnyBuffer& scratch,
                              int64_t rows,
                              int64_t n,
                              int64_t weight_layout,
                              const ActivationAttrs& activation) {
  MoeGemmProblem gemm;
  gemm.dtype = ToDType(x.element_type());
  gemm.out_dtype = gemm.dtype;
  gemm.layout = static_cast<WeightLayout>(weight_layout);
  gemm.x = x.untyped_data();
  gemm.w = w.untyped_data();
  gemm.group_starts = starts.typed_data<int32_t>();
  gemm.group_sizes = sizes.typed_data<int32_t>();
  gemm.tile_counter = scratch.typed_data<int32_t>();
  gemm.x_rows = x.dimensions()[0];
  gemm.num_weights = static_cast<int>(w.dimensions()[0]);
  gemm.num_groups = static_cast<int>(starts.dimensions()[0]);
  gemm.groups_per_batch = gemm.num_groups;
  gemm.rows_per_batch = static_cast<int>(rows);
  gemm.k = static_cast<int>(x.dimensions()[1]);
  gemm.n = static_cast<int>(n);
  gemm.activation = activation.params();
  return gemm;
}

}  // namespace jaxmoe
