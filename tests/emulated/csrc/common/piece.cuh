// Pieces of float32 rows, as csrc/common/piece.cuh has them.
#pragma once

#include <cuda_runtime_api.h>

#include <cstring>

namespace jaxmoe {

template <typename T, int kSize>
struct Piece;

template <>
struct Piece<float, 4> {
  using Bits = uint4;
  static Bits Load(const Bits* address) { return *address; }
  static void Unpack(Bits bits, float* values) { std::memcpy(values, &bits, sizeof(bits)); }
  static Bits Pack(const float* values) {
    Bits bits;
    std::memcpy(&bits, values, sizeof(bits));
    return bits;
  }
};

template <>
struct Piece<float, 1> {
  using Bits = float;
  static Bits Load(const Bits* address) { return *address; }
  static void Unpack(Bits bits, float* values) { *values = bits; }
  static Bits Pack(const float* values) { return *values; }
};

}  // namespace jaxmoe
