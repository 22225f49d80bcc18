// Operands with the rows of all devices, in memory that XLA knows nothing of.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "csrc/ffi/target.h"

namespace jaxmoe {

// The operand that `own` would be with the rows of so many devices. What `in()` gives lives as long
// as this.
class OfAll {
 public:
  OfAll(const In& own, int64_t devices, void* data) {
    const auto dims = own.dimensions();
    const size_t rank = std::min(dims.size(), dims_.size());
    for (size_t i = 0; i < rank; ++i) dims_[i] = i == 0 ? devices * dims[i] : dims[i];
    buffer_.struct_size = XLA_FFI_Buffer_STRUCT_SIZE;
    buffer_.dtype = static_cast<XLA_FFI_DataType>(own.element_type());
    buffer_.data = data;
    buffer_.rank = static_cast<int64_t>(rank);
    buffer_.dims = dims_.data();
  }
  OfAll(const OfAll&) = delete;
  OfAll& operator=(const OfAll&) = delete;

  In in() { return In(&buffer_); }

 private:
  std::array<int64_t, 3> dims_{};
  XLA_FFI_Buffer buffer_{};
};

}  // namespace jaxmoe
