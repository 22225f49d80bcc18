// Attributes of the fused layer's handler.
#pragma once

#include "csrc/ffi/gemm_attrs.h"
#include "csrc/kernels/round_tokens.h"

namespace jaxmoe {

struct MoeMlpAttrs {
  int64_t num_experts;
  int64_t num_local_experts;
  int64_t expert_offset;
  int64_t gate_up;
  int64_t layout1;
  int64_t layout2;
  int64_t format;
  int64_t tokens;
  int64_t promoted1;
  int64_t promoted2;
  int64_t finalize;
  ActivationAttrs activation;
  TileAttrs gemm1;
  TileAttrs gemm2;
};

// How tokens in `dtype` are rounded beside weights in `format`.
inline TokenRule CheckTokens(int64_t tokens,
                             WeightFormat format,
                             ffi::DataType dtype,
                             Operands* take) {
  take->Range("tokens", tokens, 0, kNumOf<TokenRule> - 1);
  const auto rule = static_cast<TokenRule>(tokens);
  if (rule == TokenRule::kNone || take->failed()) return TokenRule::kNone;
  if (!RowOf(format).is_packed()) take->Refuse("tokens are rounded beside packed weights.");
  if (!HasRowScales(rule) && dtype != ffi::DataType::BF16) {
    take->Refuse("tokens with powers of two are bf16.");
  }
  return rule;
}

}  // namespace jaxmoe

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    ::jaxmoe::MoeMlpAttrs,
    ::xla::ffi::StructMember<int64_t>("num_experts"),
    ::xla::ffi::StructMember<int64_t>("num_local_experts"),
    ::xla::ffi::StructMember<int64_t>("expert_offset"),
    ::xla::ffi::StructMember<int64_t>("gate_up"),
    ::xla::ffi::StructMember<int64_t>("layout1"),
    ::xla::ffi::StructMember<int64_t>("layout2"),
    ::xla::ffi::StructMember<int64_t>("format"),
    ::xla::ffi::StructMember<int64_t>("tokens"),
    ::xla::ffi::StructMember<int64_t>("promoted1"),
    ::xla::ffi::StructMember<int64_t>("promoted2"),
    ::xla::ffi::StructMember<int64_t>("finalize"),
    ::xla::ffi::StructMember<::jaxmoe::ActivationAttrs>("activation"),
    ::xla::ffi::StructMember<::jaxmoe::TileAttrs>("gemm1"),
    ::xla::ffi::StructMember<::jaxmoe::TileAttrs>("gemm2"));
