// The encoder is a driver function; it is looked up at run time so that the library loads on
// machines without a driver.
#include "csrc/common/tensor_map.h"

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

cuuint32_t BoxColumns(DType dtype) { return 128 / ElementSize(dtype); }

CUtensorMapDataType MapType(DType dtype) {
  switch (dtype) {
    case DType::kBFloat16:
      return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    case DType::kFloat16:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    case DType::kFloat32:  // rounds to what wgmma reads
      return CU_TENSOR_MAP_DATA_TYPE_TFLOAT32;
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

const char* EncodeMatricesMap(DType dtype,
                              const void* base,
                              int64_t count,
                              int64_t rows,
                              int64_t cols,
                              int box_rows,
                              CUtensorMap* map) {
  const cuuint64_t pitch = cols * ElementSize(dtype);
  const cuuint64_t dims[3] = {
      static_cast<cuuint64_t>(cols), static_cast<cuuint64_t>(rows), static_cast<cuuint64_t>(count)};
  const cuuint64_t strides[2] = {pitch, rows * pitch};
  const cuuint32_t box[3] = {BoxColumns(dtype), static_cast<cuuint32_t>(box_rows), 1};
  return Encode(dtype, base, 3, dims, strides, box, map);
}

const char* EncodeMatrixMap(
    DType dtype, const void* base, int64_t rows, int64_t cols, int box_rows, CUtensorMap* map) {
  const cuuint64_t dims[2] = {static_cast<cuuint64_t>(cols), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(cols) * ElementSize(dtype)};
  const cuuint32_t box[2] = {BoxColumns(dtype), static_cast<cuuint32_t>(box_rows)};
  return Encode(dtype, base, 2, dims, strides, box, map);
}

const char* EncodeRowsMap(
    DType dtype, const void* base, int64_t rows, int64_t cols, int box_rows, CUtensorMap* map) {
  const cuuint64_t pitch = cols * ElementSize(dtype);
  const cuuint64_t height = box_rows;
  const cuuint64_t dims[3] = {static_cast<cuuint64_t>(cols), height, static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[2] = {pitch, pitch};
  const cuuint32_t box[3] = {BoxColumns(dtype), static_cast<cuuint32_t>(box_rows), 1};
  return Encode(dtype, base, 3, dims, strides, box, map);
}

}  // namespace jaxmoe
