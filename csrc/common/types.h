// Element type tags and integer helpers shared by kernels, launchers and handlers.
#pragma once

#include <cstdint>

namespace jaxmoe {

enum class DType : int32_t { kBFloat16 = 0, kFloat16 = 1, kFloat32 = 2 };

constexpr int ElementSize(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

// Rounds up; for non-negative `a` and positive `b`.
constexpr int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

constexpr int64_t RoundUp(int64_t a, int64_t b) { return CeilDiv(a, b) * b; }

}  // namespace jaxmoe
