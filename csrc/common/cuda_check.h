// Early return for functions that report a cudaError_t, and its text for those that report one.
#pragma once

#include <cuda_runtime_api.h>

#define JAXMOE_RETURN_IF_CUDA_ERROR(expr)                                   \
  do {                                                                      \
    if (cudaError_t jaxmoe_status = (expr); jaxmoe_status != cudaSuccess) { \
      return jaxmoe_status;                                                 \
    }                                                                       \
  } while (0)

namespace jaxmoe {

// Null if there was no error.
inline const char* Reason(cudaError_t status) {
  return status == cudaSuccess ? nullptr : cudaGetErrorString(status);
}

}  // namespace jaxmoe
