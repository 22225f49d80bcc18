// Traits by which the kernel knows a weight format: one a file in this folder, read by Tile.
//
// Members of a trait:
//   Weight             element of the weight that wgmma multiplies
//   Token              element of X
//   Out                element of bias and output; void: bf16 or fp16, chosen at run time;
//                      float: there are no gated products
//   kStepK             elements of k in a pipeline step
//   kScaling           where scales enter the sums
//   kGathersByThreads  wide tiles fetch rows of X through row_index
//   kQuantizesOut      the epilogue can quantize the output to e4m3
//   kPacking           kNone: weights are in memory as they are multiplied. Else the trait is a
//                      Decoder as well, see packed.cuh, or has
//   kTokenSums         codes are multiplied as they are, and sums of rows of X corrected, see
//                      coded.cuh
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <type_traits>

#include "csrc/gemm/formats.h"

namespace jaxmoe {

enum class Scaling {
  kNone,      // values have no scales
  kWeight,    // sums are scaled once, by their weight's or their weight row's
  kEpilogue,  // sums are scaled once, by their weight row's and their token's
  kStep,      // sums of every pipeline step are scaled, and added in float32: promoted sums
};

template <class Element>
constexpr DType DTypeOf() {
  if (std::is_same_v<Element, __nv_bfloat16>) return DType::kBFloat16;
  if (std::is_same_v<Element, __half>) return DType::kFloat16;
  if (std::is_same_v<Element, float>) return DType::kFloat32;
  return std::is_same_v<Element, __nv_fp8_e4m3> ? DType::kFloat8E4M3 : DType::kFloat8E5M2;
}

}  // namespace jaxmoe
