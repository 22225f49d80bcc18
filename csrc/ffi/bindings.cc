// The Python module `jaxmoe._cuda_ffi`: FFI handlers by target name and stage, their execution
// counts, tables to compare with the package, and the memory of peers.
#include <nanobind/nanobind.h>

#include <cstring>

#include "csrc/ffi/peer_memory.h"
#include "csrc/ffi/tables.h"
#include "csrc/ffi/target.h"

namespace nb = nanobind;

namespace jaxmoe {
namespace {

nb::dict Registrations() {
  nb::dict handlers;
  for (const Target* t = Target::first; t != nullptr; t = t->next) {
    nb::dict stages;
    stages["execute"] = nb::capsule(reinterpret_cast<void*>(t->handler));
    if (t->check != nullptr) {
      stages["initialize"] = nb::capsule(reinterpret_cast<void*>(t->check));
    }
    handlers[t->name] = stages;
  }
  return handlers;
}

int64_t ExecuteCount(const char* target) {
  for (const Target* t = Target::first; t != nullptr; t = t->next) {
    if (std::strcmp(t->name, target) == 0) return t->executions->load();
  }
  throw nb::key_error(target);
}

}  // namespace

NB_MODULE(_cuda_ffi, m) {
  m.def("registrations", &Registrations);
  m.def("execute_count", &ExecuteCount);
  m.def("tables", &Tables);
  AddPeerMemory(m);
  m.def("ffi_api_version", [] { return nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR); });
}

}  // namespace jaxmoe
