// Attributes of handlers of the fused layer that send tokens or results through peer memory.
#pragma once

#include "csrc/ffi/moe_mlp_attrs.h"
#include "csrc/ffi/peers_call.h"

namespace jaxmoe {

struct PeerMoeMlpAttrs {
  MoeMlpAttrs layer;
  PeerAttrs peers;
};

}  // namespace jaxmoe

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::jaxmoe::PeerMoeMlpAttrs,
                                      ::xla::ffi::StructMember<::jaxmoe::MoeMlpAttrs>("layer"),
                                      ::xla::ffi::StructMember<::jaxmoe::PeerAttrs>("peers"));
