// Operand checks of the FFI handlers: what memory safety needs, reported as ffi::Error.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <initializer_list>
#include <string>

#include "csrc/common/types.h"
#include "xla/ffi/api/ffi.h"

// Returns the ffi::Error of `expr` to the caller unless it is success.
#define JAXMOE_RETURN_IF_ERROR(expr)                                       \
  do {                                                                     \
    if (::xla::ffi::Error jaxmoe_error = (expr); jaxmoe_error.failure()) { \
      return jaxmoe_error;                                                 \
    }                                                                      \
  } while (0)

namespace jaxmoe {

namespace ffi = ::xla::ffi;

inline std::string DtypeName(ffi::DataType dtype) {
  switch (dtype) {
    case ffi::DataType::PRED:
      return "pred";
    case ffi::DataType::S8:
      return "s8";
    case ffi::DataType::U8:
      return "u8";
    case ffi::DataType::S32:
      return "s32";
    case ffi::DataType::U32:
      return "u32";
    case ffi::DataType::S64:
      return "s64";
    case ffi::DataType::BF16:
      return "bf16";
    case ffi::DataType::F16:
      return "f16";
    case ffi::DataType::F32:
      return "f32";
    case ffi::DataType::F64:
      return "f64";
    case ffi::DataType::F8E4M3FN:
      return "f8e4m3fn";
    case ffi::DataType::F8E5M2:
      return "f8e5m2";
    case ffi::DataType::F8E8M0FNU:
      return "f8e8m0fnu";
    default:
      return "dtype#" + std::to_string(static_cast<int>(dtype));
  }
}

template <typename Dims>
std::string ShapeName(const Dims& dims) {
  std::string text = "[";
  const char* separator = "";
  for (int64_t dim : dims) {
    text += separator + std::to_string(dim);
    separator = ",";
  }
  return text + "]";
}

// Buffer, here and below: ffi::AnyBuffer or a typed ffi::Buffer.

// "bf16[512,2048]"
template <typename Buffer>
std::string Describe(const Buffer& buffer) {
  return DtypeName(buffer.element_type()) + ShapeName(buffer.dimensions());
}

// "jaxmoe.<op>: <text>" as an invalid-argument error.
inline ffi::Error InvalidArgument(const char* op, const std::string& text) {
  return ffi::Error::InvalidArgument(std::string("jaxmoe.") + op + ": " + text);
}

template <typename Buffer>
ffi::Error CheckRank(const char* op, const char* arg, const Buffer& buffer, size_t rank) {
  if (buffer.dimensions().size() == rank) return ffi::Error::Success();
  return InvalidArgument(op,
                         std::string(arg) + " must have rank " + std::to_string(rank) + ". Got " +
                             Describe(buffer) + ".");
}

template <typename Buffer>
ffi::Error CheckShape(const char* op,
                      const char* arg,
                      const Buffer& buffer,
                      std::initializer_list<int64_t> shape) {
  auto dims = buffer.dimensions();
  bool same = dims.size() == shape.size();
  for (size_t i = 0; same && i < dims.size(); ++i) same = dims[i] == shape.begin()[i];
  if (same) return ffi::Error::Success();
  return InvalidArgument(op,
                         std::string(arg) + " must have shape " + ShapeName(shape) + ". Got " +
                             Describe(buffer) + ".");
}

// An empty array stands for an operand that is absent.
template <typename Buffer>
bool IsAbsent(const Buffer& buffer) {
  return buffer.element_count() == 0;
}

template <typename Buffer>
ffi::Error CheckShapeOrAbsent(const char* op,
                              const char* arg,
                              const Buffer& buffer,
                              std::initializer_list<int64_t> shape) {
  return IsAbsent(buffer) ? ffi::Error::Success() : CheckShape(op, arg, buffer, shape);
}

template <typename Buffer>
ffi::Error CheckDtype(const char* op,
                      const char* arg,
                      const Buffer& buffer,
                      std::initializer_list<ffi::DataType> allowed) {
  std::string names;
  for (ffi::DataType dtype : allowed) {
    if (buffer.element_type() == dtype) return ffi::Error::Success();
    names += (names.empty() ? "" : ", ") + DtypeName(dtype);
  }
  return InvalidArgument(
      op, std::string(arg) + " must have dtype " + names + ". Got " + Describe(buffer) + ".");
}

template <typename Buffer>
ffi::Error CheckFloatDtype(const char* op, const char* arg, const Buffer& buffer) {
  return CheckDtype(op, arg, buffer, {ffi::DataType::BF16, ffi::DataType::F16, ffi::DataType::F32});
}

// `low` <= value <= `high`.
inline ffi::Error CheckRange(
    const char* op, const char* name, int64_t value, int64_t low, int64_t high) {
  if (low <= value && value <= high) return ffi::Error::Success();
  return InvalidArgument(op,
                         std::string(name) + "=" + std::to_string(value) + " must lie in [" +
                             std::to_string(low) + ", " + std::to_string(high) + "].");
}

// Of a buffer that passed CheckFloatDtype, or is FP8.
inline DType ToDType(ffi::DataType dtype) {
  switch (dtype) {
    case ffi::DataType::F8E4M3FN:
      return DType::kFloat8E4M3;
    case ffi::DataType::F8E5M2:
      return DType::kFloat8E5M2;
    case ffi::DataType::BF16:
      return DType::kBFloat16;
    case ffi::DataType::F16:
      return DType::kFloat16;
    default:
      return DType::kFloat32;
  }
}

inline ffi::Error CudaStatus(const char* op, cudaError_t status) {
  if (status == cudaSuccess) return ffi::Error::Success();
  return ffi::Error::Internal(std::string("jaxmoe.") + op +
                              ": CUDA launch failed: " + cudaGetErrorString(status) + ".");
}

}  // namespace jaxmoe
