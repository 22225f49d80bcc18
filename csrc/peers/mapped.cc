// Driver functions, which are looked up at run time as the encoder of tensor maps is.
#include "csrc/peers/mapped.h"

#include <cuda.h>

namespace jaxmoe {
namespace {

template <class Function>
Function Find(const char* name) {
  void* symbol = nullptr;
  cudaDriverEntryPointQueryResult found{};
  const cudaError_t status =
      cudaGetDriverEntryPointByVersion(name, &symbol, 12000, cudaEnableDefault, &found);
  const bool ok = status == cudaSuccess && found == cudaDriverEntryPointSuccess;
  return ok ? reinterpret_cast<Function>(symbol) : nullptr;
}

// What is used of the driver; `granularity` is null where one of them is missing.
struct Driver {
  decltype(&cuMemGetAllocationGranularity) granularity =
      Find<decltype(&cuMemGetAllocationGranularity)>("cuMemGetAllocationGranularity");
  decltype(&cuMemCreate) create = Find<decltype(&cuMemCreate)>("cuMemCreate");
  decltype(&cuMemRelease) release = Find<decltype(&cuMemRelease)>("cuMemRelease");
  decltype(&cuMemAddressReserve) reserve =
      Find<decltype(&cuMemAddressReserve)>("cuMemAddressReserve");
  decltype(&cuMemAddressFree) free = Find<decltype(&cuMemAddressFree)>("cuMemAddressFree");
  decltype(&cuMemMap) map = Find<decltype(&cuMemMap)>("cuMemMap");
  decltype(&cuMemUnmap) unmap = Find<decltype(&cuMemUnmap)>("cuMemUnmap");
  decltype(&cuMemSetAccess) allow = Find<decltype(&cuMemSetAccess)>("cuMemSetAccess");
  decltype(&cuGetErrorString) error = Find<decltype(&cuGetErrorString)>("cuGetErrorString");

  bool IsThere() const {
    return granularity && create && release && reserve && free && map && unmap && allow && error;
  }
};

const Driver& TheDriver() {
  static const Driver driver;
  return driver;
}

const char* Reason(CUresult status) {
  if (status == CUDA_SUCCESS) return nullptr;
  const char* reason = "unknown error";
  TheDriver().error(status, &reason);
  return reason;
}

}  // namespace

const char* AllowMapped(uint64_t address, uint64_t bytes, int ordinal) {
  CUmemAccessDesc access{};
  access.location = {CU_MEM_LOCATION_TYPE_DEVICE, ordinal};
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  return Reason(TheDriver().allow(address, bytes, &access, 1));
}

const char* AllocateMapped(int ordinal, int64_t bytes, MappedMemory* memory) {
  const Driver& driver = TheDriver();
  if (!driver.IsThere()) return "the driver has no memory that can be mapped";
  CUmemAllocationProp prop{};
  prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  prop.location = {CU_MEM_LOCATION_TYPE_DEVICE, ordinal};
  size_t unit = 0;
  if (const char* error =
          Reason(driver.granularity(&unit, &prop, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED))) {
    return error;
  }
  const uint64_t size = (static_cast<uint64_t>(bytes) + unit - 1) / unit * unit;
  CUmemGenericAllocationHandle handle = 0;
  if (const char* error = Reason(driver.create(&handle, size, &prop, 0))) return error;
  CUdeviceptr address = 0;
  const char* error = Reason(driver.reserve(&address, size, 0, 0, 0));
  if (error == nullptr) {
    error = Reason(driver.map(address, size, 0, handle, 0));
    if (error == nullptr) {
      *memory = {address, size, handle};
      error = AllowMapped(address, size, ordinal);
      if (error == nullptr) return nullptr;
      driver.unmap(address, size);
      *memory = {};
    }
    driver.free(address, size);
  }
  driver.release(handle);
  return error;
}

const char* FreeMapped(const MappedMemory& memory) {
  const Driver& driver = TheDriver();
  const CUresult unmapped = driver.unmap(memory.address, memory.bytes);
  const CUresult freed = driver.free(memory.address, memory.bytes);
  const CUresult released = driver.release(memory.handle);
  for (const CUresult status : {unmapped, freed, released}) {
    if (const char* error = Reason(status)) return error;
  }
  return nullptr;
}

cudaError_t WriteWord(uint32_t* word, uint32_t value, cudaStream_t stream) {
  using Write = decltype(&cuStreamWriteValue32);
  static const Write write = Find<Write>("cuStreamWriteValue32");
  if (write == nullptr) return cudaErrorNotSupported;
  // The runtime's errors have the numbers of the driver's.
  return static_cast<cudaError_t>(write(stream, reinterpret_cast<CUdeviceptr>(word), value, 0));
}

}  // namespace jaxmoe
