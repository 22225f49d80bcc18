// Element type tags and integer helpers shared by kernels, launchers and handlers.
#pragma once

#include <cstdint>
#include <iterator>

namespace jaxmoe {

// Names of an enum's values 0, 1, ..., by which jaxmoe/_codes.py knows them. Specialised beside
// each enum that crosses the border to Python.
template <class Enum>
struct EnumNames;

// Number of an enum's values.
template <class Enum>
inline constexpr int kNumOf = static_cast<int>(std::size(EnumNames<Enum>::kAll));

enum class DType : int32_t {
  kBFloat16 = 0,
  kFloat16 = 1,
  kFloat32 = 2,
  kFloat8E4M3 = 3,
  kFloat8E5M2 = 4,
};

constexpr bool IsFloat8(DType dtype) {
  return dtype == DType::kFloat8E4M3 || dtype == DType::kFloat8E5M2;
}

constexpr int ElementSize(DType dtype) {
  if (IsFloat8(dtype)) return 1;
  return dtype == DType::kFloat32 ? 4 : 2;
}

// Elements of a matrix that share a scale: all of them, a row, 128 neighbours of a row, or 128 x
// 128.
enum class Shared : int32_t { kTensor, kRow, kGroup, kBlock };

template <>
struct EnumNames<Shared> {
  static constexpr const char* kAll[] = {"tensor", "row", "group", "block"};
};

// Most of what kernels count in an int, and most CTAs along x.
inline constexpr int64_t kMaxInt = 0x7fffffff;

// Rounds up; for non-negative `a` and positive `b`.
constexpr int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

constexpr int64_t RoundUp(int64_t a, int64_t b) { return CeilDiv(a, b) * b; }

}  // namespace jaxmoe
