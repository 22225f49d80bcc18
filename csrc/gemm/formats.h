// Weight formats as the host knows them: a row each, by the code that jaxmoe/_formats gives it.
#pragma once

#include "csrc/common/types.h"

namespace jaxmoe {

enum class WeightFormat : int { kPlain, kFp8Tensor, kFp8Channel, kFp8Block };

struct FormatRow {
  const char* name;
  bool scaled;     // weights and tokens are FP8 values times scales
  Shared weights;  // elements of a weight that share a scale
  Shared tokens;   // elements of X that share a scale
};

inline constexpr FormatRow kFormats[] = {
    {"plain", false, Shared::kTensor, Shared::kTensor},
    {"fp8_tensor", true, Shared::kTensor, Shared::kTensor},
    {"fp8_channel", true, Shared::kRow, Shared::kRow},
    {"fp8_block", true, Shared::kBlock, Shared::kGroup},
};

constexpr const FormatRow& RowOf(WeightFormat format) { return kFormats[static_cast<int>(format)]; }

}  // namespace jaxmoe
