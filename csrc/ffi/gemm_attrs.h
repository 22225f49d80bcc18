// Attributes that the handlers of grouped products share, and the scales of their formats.
#pragma once

#include "csrc/ffi/checks.h"
#include "csrc/gemm/moe_gemm.h"
#include "csrc/kernels/quantize.h"

namespace jaxmoe {

// int32 scratch: the tile counter. gmm_scratch_size in jaxmoe/_gemm/scratch.py.
inline constexpr int64_t kGemmScratchInts = 4;

// Most elements of a weight's rows or columns: epilogues count the bytes of 16 rows in int32.
inline constexpr int64_t kMaxColumns = kMaxInt / 32;

// GemmConfig of jaxmoe/_gemm/tiles.py.
struct TileAttrs {
  int64_t weight_tile;
  int64_t token_tile;
  int64_t cluster;
  int64_t split_k;
  int64_t raster;
  int64_t gather;
  int64_t one_kernel;

  TileConfig config() const {
    TileConfig tile;
    tile.weight_tile = static_cast<int>(weight_tile);
    tile.token_tile = static_cast<int>(token_tile);
    tile.cluster = static_cast<int>(cluster);
    tile.split_k = static_cast<int>(split_k);
    tile.raster = static_cast<int>(raster);
    tile.gather = gather != 0;
    tile.one_kernel = one_kernel != 0;
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

// Values of the enums that both handlers of products get.
inline void CheckEnums(int64_t format,
                       int64_t gate_up,
                       const ActivationAttrs& activation,
                       Operands* take) {
  take->Range("format", format, 0, std::size(kFormats) - 1);
  take->Range("gate_up", gate_up, 0, kNumOf<GateUp> - 1);
  // The formulas after identity need a gate, and kernels without one do not have them.
  const int64_t last =
      activation.gated != 0 ? kNumOf<ActivationParams::Kind> - 1 : ActivationParams::kIdentity;
  take->Range("activation kind", activation.kind, 0, last);
}

// Quantized weights are stored with what they contract last.
inline void CheckLayout(const char* name, int64_t layout, WeightFormat format, Operands* take) {
  const bool any = RowOf(format).is_plain();
  constexpr auto kNK = static_cast<int64_t>(WeightLayout::kNK);
  take->Range(name, layout, any ? 0 : kNK, kNK);
}

// Dtypes of weights beside tokens, biases or results of the dtypes `other`.
inline Types WeightTypes(WeightFormat format, const Types& other) {
  if (RowOf(format).is_packed()) return ffi::DataType::U8;
  return RowOf(format).scaled ? kFloat8s : other;
}

// Shape of packed weights [lead, n, k], see PackedLayout. No size is negative, nor k zero.
inline Shape PackedShape(WeightFormat format, Shape lead, int64_t n, int64_t k) {
  const PackedLayout& packed = RowOf(format).packed;
  lead.Add(n / 64);
  lead.Add(k / packed.superblock_k(k) * packed.superblock_bytes(k));
  return lead;
}

// Shape of the scales of weights [lead, n, k], or of two arrays of n / 2 rows each.
inline Shape WeightScales(WeightFormat format, Shape lead, int64_t n, int64_t k, int arrays = 1) {
  const Shared shared = RowOf(format).weights;
  if (shared == Shared::kTensor && arrays > 1) lead.Add(arrays);
  if (shared == Shared::kRow) lead.Add(n);
  if (shared == Shared::kBlock) {
    lead.Add(arrays * CeilDiv(n / arrays, kQuantBlock));
    lead.Add(CeilDiv(k, kQuantBlock));
  }
  return lead;
}

// Shape of the scales of tokens [lead, rows, k].
inline Shape TokenScales(WeightFormat format, Shape lead, const Size& rows, int64_t k) {
  const Shared shared = RowOf(format).tokens;
  if (shared != Shared::kTensor) lead.Add(rows);
  if (shared == Shared::kGroup) lead.Add(CeilDiv(k, kQuantBlock));
  return lead;
}

}  // namespace jaxmoe

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::jaxmoe::TileAttrs,
                                      ::xla::ffi::StructMember<int64_t>("weight_tile"),
                                      ::xla::ffi::StructMember<int64_t>("token_tile"),
                                      ::xla::ffi::StructMember<int64_t>("cluster"),
                                      ::xla::ffi::StructMember<int64_t>("split_k"),
                                      ::xla::ffi::StructMember<int64_t>("raster"),
                                      ::xla::ffi::StructMember<int64_t>("gather"),
                                      ::xla::ffi::StructMember<int64_t>("one_kernel"));

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::jaxmoe::ActivationAttrs,
                                      ::xla::ffi::StructMember<int64_t>("kind"),
                                      ::xla::ffi::StructMember<int64_t>("gated"),
                                      ::xla::ffi::StructMember<float>("c1"),
                                      ::xla::ffi::StructMember<float>("c3"),
                                      ::xla::ffi::StructMember<float>("limit"),
                                      ::xla::ffi::StructMember<float>("beta"));
