// Weight formats as the host knows them: a row each, by the code that jaxmoe/_formats gives it.
#pragma once

#include "csrc/common/types.h"

namespace jaxmoe {

enum class WeightFormat : int {
  kPlain,
  kFp8Tensor,
  kFp8Channel,
  kFp8Block,
  kMxfp4,
  kNvfp4,
  kInt4G32,
  kInt4G64,
  kInt4G128,
  kInt4Channel,
  kInt4G32Zp,
  kInt4G64Zp,
  kInt4G128Zp,
  kInt4ChannelZp,
  kInt8Channel,
  kMxfp8,
};

// Encoding of packed weights, which a kernel decodes to the type of the tokens before it
// multiplies. jaxmoe/_formats/packed.py has the order of bytes.
enum class Packing : int { kNone, kMxfp4, kNvfp4, kInt4, kInt8, kMxfp8 };

// By which the sums of packed weights and tokens in `dtype` are to be multiplied, beside the scale
// of their weight: the traits of csrc/gemm/sm90/formats have what is missing from the exponents.
constexpr float SumFactor(Packing packing, DType dtype) {
  const bool fp16 = dtype == DType::kFloat16;
  switch (packing) {
    case Packing::kMxfp4:
      return fp16 ? 0.5f : 1.0f;
    case Packing::kMxfp8:
      return fp16 ? 0x1p-7f : 0x1p-6f;
    case Packing::kNvfp4:
      return 128.0f;
    case Packing::kInt4:
      return fp16 ? 1.0f : 0x1p37f;
    default:
      return 1.0f;
  }
}

// Packed weights lie in superblocks: 64 rows by a multiple of 64 of k. One has its values, 64 of k
// after the other, then the strip of its scales.
struct PackedLayout {
  Packing packing = Packing::kNone;
  int k = 64;              // of a superblock; 0: all of it
  int strip_bytes = 0;     // of a superblock
  int groups = 1;          // scales of a row in 64 of k, at most one in a longer superblock
  bool has_zeros = false;  // int4: each scale has a zero point

  constexpr int superblock_k(int64_t whole) const { return k == 0 ? static_cast<int>(whole) : k; }
  // Values of 64 rows by 64 of k.
  constexpr int value_bytes() const {
    return packing == Packing::kInt8 || packing == Packing::kMxfp8 ? 4096 : 2048;
  }
  constexpr int64_t superblock_bytes(int64_t whole) const {
    return int64_t{superblock_k(whole)} / 64 * value_bytes() + strip_bytes;
  }
};

struct FormatRow {
  const char* name;
  bool scaled;     // weights and tokens are FP8 values times scales
  Shared weights;  // elements of a weight that share a scale
  Shared tokens;   // elements of X that share a scale
  PackedLayout packed = {};

  constexpr bool is_packed() const { return packed.packing != Packing::kNone; }
  constexpr bool is_plain() const { return !scaled && !is_packed(); }
};

constexpr FormatRow PackedRow(const char* name, PackedLayout layout) {
  const Shared weights = layout.packing == Packing::kInt8 ? Shared::kRow : Shared::kTensor;
  return {name, false, weights, Shared::kTensor, layout};
}

inline constexpr FormatRow kFormats[] = {
    {"plain", false, Shared::kTensor, Shared::kTensor},
    {"fp8_tensor", true, Shared::kTensor, Shared::kTensor},
    {"fp8_channel", true, Shared::kRow, Shared::kRow},
    {"fp8_block", true, Shared::kBlock, Shared::kGroup},
    PackedRow("mxfp4", {Packing::kMxfp4, 64, 128, 2}),
    PackedRow("nvfp4", {Packing::kNvfp4, 64, 256, 4}),
    PackedRow("int4_g32", {Packing::kInt4, 64, 256, 2}),
    PackedRow("int4_g64", {Packing::kInt4, 64, 128}),
    PackedRow("int4_g128", {Packing::kInt4, 128, 128}),
    PackedRow("int4_channel", {Packing::kInt4, 0, 128}),
    PackedRow("int4_g32_zp", {Packing::kInt4, 64, 320, 2, true}),
    PackedRow("int4_g64_zp", {Packing::kInt4, 64, 160, 1, true}),
    PackedRow("int4_g128_zp", {Packing::kInt4, 128, 160, 1, true}),
    PackedRow("int4_channel_zp", {Packing::kInt4, 0, 160, 1, true}),
    PackedRow("int8_channel", {Packing::kInt8, 0, 0}),
    PackedRow("mxfp8", {Packing::kMxfp8, 64, 128, 2}),
};

constexpr const FormatRow& RowOf(WeightFormat format) { return kFormats[static_cast<int>(format)]; }

}  // namespace jaxmoe
