// Operands of FFI handlers: each is described once, where its address is taken. What memory safety
// needs of it is checked there, and the first thing that is wrong is kept as the handler's error.
//
//   Operands take("finalize");
//   Dim T, H;
//   params.y = take.Any("y", *y, {T, H}, kFloats);
//   if (take.failed()) return take.error();
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <utility>

#include "csrc/common/types.h"
#include "csrc/ffi/target.h"

namespace jaxmoe {

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

// The kernels' tag of an operand's dtype, which is one of theirs.
inline DType TypeOf(const In& buffer) {
  switch (buffer.element_type()) {
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

// Up to three dtypes that an operand may have.
class Types {
 public:
  constexpr Types(ffi::DataType a,
                  ffi::DataType b = ffi::DataType::INVALID,
                  ffi::DataType c = ffi::DataType::INVALID)
      : types_{a, b, c} {}

  // These and one more; there are at most two of these.
  Types Or(ffi::DataType type) const {
    return Has(type) ? *this : Types{types_[0], type, types_[1]};
  }

  bool Has(ffi::DataType type) const {
    return type != ffi::DataType::INVALID &&
           (type == types_[0] || type == types_[1] || type == types_[2]);
  }

  std::string Names() const {
    std::string names;
    for (ffi::DataType type : types_) {
      if (type != ffi::DataType::INVALID) names += (names.empty() ? "" : ", ") + DtypeName(type);
    }
    return names;
  }

 private:
  ffi::DataType types_[3];
};

inline constexpr Types kFloats{ffi::DataType::BF16, ffi::DataType::F16, ffi::DataType::F32};
inline constexpr Types kHalfs{ffi::DataType::BF16, ffi::DataType::F16};
inline constexpr Types kFloat8s{ffi::DataType::F8E4M3FN, ffi::DataType::F8E5M2};
inline Types Like(const In& buffer) { return buffer.element_type(); }

// A size that operands share, which is that of the first operand that has it. At most 2^31 - 1.
class Dim {
 public:
  Dim() = default;
  // A first dimension that operands of one rank less leave out: then it is 1.
  static Dim Batch() { return Dim(true); }
  operator int64_t() const { return size_; }

 private:
  friend class Operands;
  explicit Dim(bool batch) : batch_(batch) {}

  static constexpr int64_t kUnknown = -1;
  int64_t size_ = kUnknown;
  bool batch_ = false;
};

// An element of a shape: a shared size, or a number.
struct Size {
  Size() = default;
  Size(Dim& dim) : dim(&dim) {}
  Size(int64_t number) : number(number) {}

  Dim* dim = nullptr;
  int64_t number = 0;
};

class Shape {
 public:
  static constexpr size_t kMaxRank = 4;

  Shape(std::initializer_list<Size> sizes) {
    for (const Size& size : sizes) Add(size);
  }
  void Add(const Size& size) { sizes_[rank_++] = size; }
  const Size& operator[](size_t i) const { return sizes_[i]; }
  size_t rank() const { return rank_; }

 private:
  Size sizes_[kMaxRank];
  size_t rank_ = 0;
};

inline ffi::Error InvalidArgument(const char* op, const std::string& text) {
  return ffi::Error::InvalidArgument(std::string("jaxmoe.") + op + ": " + text);
}

// The operands of one call of a handler.
class Operands {
 public:
  explicit Operands(const char* op) : op_(op) {}

  // Address of an operand or result.
  void* Any(const char* name, const In& buffer, const Shape& shape, Types types) {
    if (failed()) return nullptr;
    Type(name, buffer, types);
    Match(name, buffer, shape);
    return failed() ? nullptr : buffer.untyped_data();
  }

  // The same of one that is absent, so null, if it has no elements.
  void* AnyOrNull(const char* name, const In& buffer, const Shape& shape, Types types) {
    return IsAbsent(buffer) ? nullptr : Any(name, buffer, shape, types);
  }

  int32_t* Ints(const char* name, const In& buffer, const Shape& shape) {
    return static_cast<int32_t*>(Any(name, buffer, shape, ffi::DataType::S32));
  }

  int32_t* IntsOrNull(const char* name, const In& buffer, const Shape& shape) {
    return IsAbsent(buffer) ? nullptr : Ints(name, buffer, shape);
  }

  float* Floats(const char* name, const In& buffer, const Shape& shape) {
    return static_cast<float*>(Any(name, buffer, shape, ffi::DataType::F32));
  }

  float* FloatsOrNull(const char* name, const In& buffer, const Shape& shape) {
    return IsAbsent(buffer) ? nullptr : Floats(name, buffer, shape);
  }

  // An empty array stands for an operand that is absent.
  static bool IsAbsent(const In& buffer) { return buffer.element_count() == 0; }

  // Refuses another dtype.
  void Type(const char* name, const In& buffer, Types types) {
    if (types.Has(buffer.element_type())) return;
    Refuse(std::string(name) + " must have dtype " + types.Names() + ". Got " + Describe(buffer) +
           ".");
  }

  // Refuses a value outside `low` <= value <= `high`.
  void Range(const char* name, int64_t value, int64_t low, int64_t high) {
    if (low <= value && value <= high) return;
    Refuse(std::string(name) + "=" + std::to_string(value) + " must lie in [" +
           std::to_string(low) + ", " + std::to_string(high) + "].");
  }

  // Makes `text` the error, unless there is one.
  void Refuse(const std::string& text) {
    if (!failed()) error_ = InvalidArgument(op_, text);
  }

  bool failed() const { return error_.failure(); }
  ffi::Error error() const { return error_; }

  // The handler's result: what was wrong before the launch, or with it.
  ffi::Error Result(cudaError_t status) const {
    if (failed() || status == cudaSuccess) return error_;
    return ffi::Error::Internal(std::string("jaxmoe.") + op_ +
                                ": CUDA launch failed: " + cudaGetErrorString(status) + ".");
  }

  // The same of a launch that gives a reason, or null.
  ffi::Error Result(const char* reason) const {
    return failed() || reason == nullptr ? error_ : InvalidArgument(op_, reason);
  }

 private:
  template <class Sizes>
  static std::string Name(const Sizes& sizes) {
    std::string text = "[";
    const char* separator = "";
    for (int64_t size : sizes) {
      text += separator + std::to_string(size);
      separator = ",";
    }
    return text + "]";
  }

  // "bf16[512,2048]"
  static std::string Describe(const In& buffer) {
    return DtypeName(buffer.element_type()) + Name(buffer.dimensions());
  }

  // Learns the sizes that are not known, and compares the others.
  void Match(const char* name, const In& buffer, const Shape& shape) {
    const auto dims = buffer.dimensions();
    const size_t skipped =
        dims.size() + 1 == shape.rank() && shape[0].dim != nullptr && shape[0].dim->batch_;
    if (dims.size() + skipped != shape.rank()) {
      return Refuse(std::string(name) + " must have rank " + std::to_string(shape.rank()) +
                    ". Got " + Describe(buffer) + ".");
    }
    int64_t wanted[Shape::kMaxRank];
    bool same = true;
    for (size_t i = 0; i < shape.rank(); ++i) {
      const int64_t size = i < skipped ? 1 : dims[i - skipped];
      Dim* dim = shape[i].dim;
      if (dim != nullptr && dim->size_ == Dim::kUnknown) {
        Range((std::string(name) + ".shape[" + std::to_string(i - skipped) + "]").c_str(),
              size,
              0,
              kMaxInt);
        dim->size_ = size;
      }
      wanted[i] = dim == nullptr ? shape[i].number : dim->size_;
      same = same && wanted[i] == size;
    }
    if (same) return;
    Refuse(std::string(name) + " must have shape " +
           Name(ffi::Span<const int64_t>(wanted, shape.rank())) + ". Got " + Describe(buffer) +
           ".");
  }

  const char* op_;
  ffi::Error error_;
};

}  // namespace jaxmoe
