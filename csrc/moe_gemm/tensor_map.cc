// Encodes the tensor maps of the grouped GEMM's operands.
//
// The encoder is a driver function; it is looked up at run time so that the library loads on
// machines without a driver.
#include "csrc/moe_gemm/tensor_map.h"

#include <cuda_runtime_api.h>

namespace jaxmoe {
namespace {

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

EncodeTiled GetEncoder() {
  static const EncodeTiled encoder = [] {
    void* symbol = nullptr;
    cudaDriverEntryPointQueryResult found{};
    const cudaError_t status = cudaGetDriverEntryPointByVersion(
        "cuTensorMapEncodeTiled", &symbol, 12000, cudaEnableDefault, &found);
    const bool ok = status == cudaSuccess && found == cudaDriverEntryPointSuccess;
    return ok ? reinterpret_cast<EncodeTiled>(symbol) : nullptr;
  }();
  return encoder;
}

constexpr cuuint32_t kBoxBytes = 128;  // of the contiguous dimension

CUtensorMapDataType MapType(DType dtype) {
  switch (dtype) {
    case DType::kBFloat16:
      return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    case DType::kFloat16:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    default:
      return CU_TENSOR_MAP_DATA_TYPE_UINT8;
  }
}

const char* Encode(DType dtype,
                   const void* base,
                   cuuint32_t rank,
                   const cuuint64_t* dims,
                   const cuuint64_t* strides_bytes,
                   const cuuint32_t* box,
                   CUtensorMap* map) {
  const EncodeTiled encode = GetEncoder();
  if (encode == nullptr) return "the driver has no cuTensorMapEncodeTiled";
  const cuuint32_t element_strides[3] = {1, 1, 1};
  const CUresult result = encode(map,
                                 MapType(dtype),
                                 rank,
                                 const_cast<void*>(base),
                                 dims,
                                 strides_bytes,
                                 box,
                                 element_strides,
                                 CU_TENSOR_MAP_INTERLEAVE_NONE,
                                 CU_TENSOR_MAP_SWIZZLE_128B,
                                 CU_TENSOR_MAP_L2_PROMOTION_NONE,
                                 CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS
             ? nullptr
             : "cuTensorMapEncodeTiled refused an operand (16-byte aligned base and row pitch?)";
}

}  // namespace

const char* EncodeWeightMap(const MoeGemmProblem& problem, CUtensorMap* map) {
  const cuuint64_t k = problem.k;
  const cuuint64_t n = problem.n;
  const cuuint64_t element = ElementSize(problem.dtype);
  const bool k_inner = problem.layout == WeightLayout::kNK;
  const cuuint64_t dims[3] = {
      k_inner ? k : n, k_inner ? n : k, static_cast<cuuint64_t>(problem.num_weights)};
  const cuuint64_t strides[2] = {dims[0] * element, k * n * element};
  const cuuint32_t box[3] = {kBoxBytes / static_cast<cuuint32_t>(element), 64, 1};
  return Encode(problem.dtype, problem.w, 3, dims, strides, box, map);
}

const char* EncodeTokenMap(const MoeGemmProblem& problem, int box_rows, CUtensorMap* map) {
  const cuuint64_t element = ElementSize(problem.dtype);
  const cuuint64_t dims[2] = {static_cast<cuuint64_t>(problem.k),
                              static_cast<cuuint64_t>(problem.x_rows)};
  const cuuint64_t strides[1] = {problem.k * element};
  const cuuint32_t box[2] = {kBoxBytes / static_cast<cuuint32_t>(element),
                             static_cast<cuuint32_t>(box_rows)};
  return Encode(problem.dtype, problem.x, 2, dims, strides, box, map);
}

const char* EncodeRowsMap(
    DType dtype, const void* base, int64_t rows, int64_t cols, int box_rows, CUtensorMap* map) {
  const cuuint64_t element = ElementSize(dtype);
  const cuuint64_t pitch = cols * element;
  const cuuint64_t height = box_rows;
  const cuuint64_t dims[3] = {static_cast<cuuint64_t>(cols), height, static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[2] = {pitch, pitch};
  const cuuint32_t box[3] = {
      kBoxBytes / static_cast<cuuint32_t>(element), static_cast<cuuint32_t>(box_rows), 1};
  return Encode(dtype, base, 3, dims, strides, box, map);
}

}  // namespace jaxmoe
