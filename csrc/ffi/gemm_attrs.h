// Attribute structs shared by the handlers that launch the grouped GEMM.
#pragma once

#include "csrc/gemm/moe_gemm.h"
#include "xla/ffi/api/ffi.h"

namespace jaxmoe {

// GemmConfig of jaxmoe/_heuristics.py.
struct TileAttrs {
  int64_t weight_tile;
  int64_t token_tile;
  int64_t cluster;
  int64_t split_k;
  int64_t raster;
  int64_t gather;

  TileConfig config() const {
    TileConfig tile;
    tile.weight_tile = static_cast<int>(weight_tile);
    tile.token_tile = static_cast<int>(token_tile);
    tile.cluster = static_cast<int>(cluster);
    tile.split_k = static_cast<int>(split_k);
    tile.raster = static_cast<int>(raster);
    tile.gather = gather != 0;
    return tile;
  }
};

// Activation.kernel_params() of jaxmoe/activation.py.
struct ActivationAttrs {
  int64_t kind;
  int64_t gated;
  float c1;
  float c3;
  float limit;
  float beta;

  ActivationParams params() const { return {static_cast<int>(kind), c1, c3, limit, beta}; }
};

}  // namespace jaxmoe

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::jaxmoe::TileAttrs,
                                      ::xla::ffi::StructMember<int64_t>("weight_tile"),
                                      ::xla::ffi::StructMember<int64_t>("token_tile"),
                                      ::xla::ffi::StructMember<int64_t>("cluster"),
                                      ::xla::ffi::StructMember<int64_t>("split_k"),
                                      ::xla::ffi::StructMember<int64_t>("raster"),
                                      ::xla::ffi::StructMember<int64_t>("gather"));

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::jaxmoe::ActivationAttrs,
                                      ::xla::ffi::StructMember<int64_t>("kind"),
                                      ::xla::ffi::StructMember<int64_t>("gated"),
                                      ::xla::ffi::StructMember<float>("c1"),
                                      ::xla::ffi::StructMember<float>("c3"),
                                      ::xla::ffi::StructMember<float>("limit"),
                                      ::xla::ffi::StructMember<float>("beta"));
