// The Python module `jaxmoe._cuda_ffi`: FFI handlers by target name, and their execution counts.
#include <nanobind/nanobind.h>

#include <cstring>

#include "csrc/ffi/counters.h"
#include "xla/ffi/api/ffi.h"

XLA_FFI_DECLARE_HANDLER_SYMBOL(RouteFfi);
XLA_FFI_DECLARE_HANDLER_SYMBOL(PlanFfi);
XLA_FFI_DECLARE_HANDLER_SYMBOL(RoutePlanFfi);
XLA_FFI_DECLARE_HANDLER_SYMBOL(PermuteFfi);
XLA_FFI_DECLARE_HANDLER_SYMBOL(FinalizeFfi);
XLA_FFI_DECLARE_HANDLER_SYMBOL(GroupedGemmFfi);
XLA_FFI_DECLARE_HANDLER_SYMBOL(MoeMlpFfi);
XLA_FFI_DECLARE_HANDLER_SYMBOL(MoeMlpRowsFfi);
XLA_FFI_DECLARE_HANDLER_SYMBOL(QuantizeFfi);
XLA_FFI_DECLARE_HANDLER_SYMBOL(MoeMlpFp8Ffi);
XLA_FFI_DECLARE_HANDLER_SYMBOL(MoeMlpFp8RowsFfi);
XLA_FFI_DECLARE_HANDLER_SYMBOL(GroupedGemmFp8Ffi);
XLA_FFI_DECLARE_HANDLER_SYMBOL(TgmmFfi);
XLA_FFI_DECLARE_HANDLER_SYMBOL(TgmmRowsFfi);
XLA_FFI_DECLARE_HANDLER_SYMBOL(GateUpFfi);

namespace nb = nanobind;

namespace jaxmoe {
namespace {

// In the order of kTargetNames.
constexpr XLA_FFI_Handler* kHandlers[kNumTargets] = {RouteFfi,
                                                     PlanFfi,
                                                     RoutePlanFfi,
                                                     PermuteFfi,
                                                     FinalizeFfi,
                                                     GroupedGemmFfi,
                                                     MoeMlpFfi,
                                                     MoeMlpRowsFfi,
                                                     QuantizeFfi,
                                                     MoeMlpFp8Ffi,
                                                     MoeMlpFp8RowsFfi,
                                                     GroupedGemmFp8Ffi,
                                                     TgmmFfi,
                                                     TgmmRowsFfi,
                                                     GateUpFfi};

nb::dict Registrations() {
  nb::dict handlers;
  for (int i = 0; i < kNumTargets; ++i) {
    handlers[kTargetNames[i]] = nb::capsule(reinterpret_cast<void*>(kHandlers[i]));
  }
  return handlers;
}

int64_t ExecuteCount(const char* target) {
  for (int i = 0; i < kNumTargets; ++i) {
    if (std::strcmp(kTargetNames[i], target) == 0) return execute_counts[i].load();
  }
  throw nb::key_error(target);
}

}  // namespace

NB_MODULE(_cuda_ffi, m) {
  m.def("registrations", &Registrations);
  m.def("execute_count", &ExecuteCount);
  m.def("ffi_api_version", [] { return nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR); });
}

}  // namespace jaxmoe
