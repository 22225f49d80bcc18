// Early return for functions that report a cudaError_t.
#pragma once

#include <cuda_runtime_api.h>

#define JAXMOE_RETURN_IF_CUDA_ERROR(expr)                                   \
  do {                                                                      \
    if (cudaError_t jaxmoe_status = (expr); jaxmoe_status != cudaSuccess) { \
      return jaxmoe_status;                                                 \
    }                                                                       \
  } while (0)
