// Memory of a GPU that belongs to no context, so that another GPU's copies of it are its own
// business: a copy between what two contexts of a process have allocated makes one of them wait for
// the other's kernels whenever it loads a program, and these may wait for what it would launch
// next.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace jaxmoe {

// As it must be freed.
struct MappedMemory {
  uint64_t address = 0;
  uint64_t bytes = 0;
  uint64_t handle = 0;
};

// Allocates at least so many bytes on a GPU, which can reach them; other GPUs of the process that
// are to, must be allowed. These three return CUDA's reason, or null.
const char* AllocateMapped(int ordinal, int64_t bytes, MappedMemory* memory);
const char* AllowMapped(uint64_t address, uint64_t bytes, int ordinal);
const char* FreeMapped(const MappedMemory& memory);

// Writes a word of the current device behind what a stream has done, without a kernel.
cudaError_t WriteWord(uint32_t* word, uint32_t value, cudaStream_t stream);

}  // namespace jaxmoe
