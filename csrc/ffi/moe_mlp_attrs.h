// Attributes of the fused layer's handler.
#pragma once

#include "csrc/ffi/gemm_attrs.h"

namespace jaxmoe {

struct MoeMlpAttrs {
  int64_t num_experts;
  int64_t num_local_experts;
  int64_t expert_offset;
  int64_t gate_up;
  int64_t layout1;
  int64_t layout2;
  int64_t format;
  int64_t promoted1;
  int64_t promoted2;
  int64_t finalize;
  ActivationAttrs activation;
  TileAttrs gemm1;
  TileAttrs gemm2;
};

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
    ::xla::ffi::StructMember<int64_t>("promoted1"),
    ::xla::ffi::StructMember<int64_t>("promoted2"),
    ::xla::ffi::StructMember<int64_t>("finalize"),
    ::xla::ffi::StructMember<::jaxmoe::ActivationAttrs>("activation"),
    ::xla::ffi::StructMember<::jaxmoe::TileAttrs>("gemm1"),
    ::xla::ffi::StructMember<::jaxmoe::TileAttrs>("gemm2"));
