// Registration of FFI handlers: a target is one line beside its handler,
//
//   const Registered<Plan> registered("jaxmoe_plan_v1");
//
// from which the module's list of handlers and its execution counts derive.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <optional>

#include "xla/ffi/api/ffi.h"

namespace xla::ffi {

// A handler's parameter of this type is the stream of the call.
template <>
struct CtxBinding<cudaStream_t> {
  using Ctx = PlatformStream<cudaStream_t>;
};

// And of this type the number of its GPU.
template <>
struct CtxBinding<int32_t> {
  using Ctx = DeviceOrdinal;
};

// Of this one which execution of a program it is, the same on all devices of a process.
template <>
struct CtxBinding<RunId> {
  using Ctx = RunId;
};

}  // namespace xla::ffi

namespace jaxmoe {

namespace ffi = ::xla::ffi;

// An operand and a result of a handler.
using In = ffi::AnyBuffer;
using Out = ffi::Result<ffi::AnyBuffer>;

// A member of the list of registered targets. What a name means never changes, because exported
// programs hold it: other operands, attributes or results need another version.
struct Target {
  Target(const char* name,
         XLA_FFI_Handler* handler,
         XLA_FFI_Handler* check,
         const std::atomic<int64_t>* executions)
      : name(name), handler(handler), check(check), executions(executions), next(first) {
    first = this;
  }

  const char* name;
  XLA_FFI_Handler* handler;
  XLA_FFI_Handler* check;  // null, or what runs before each execution, of a CUDA graph too
  const std::atomic<int64_t>* executions;
  const Target* next;

  static inline const Target* first = nullptr;  // of the list
};

// Registers `fn` when the module is loaded. XLA may record its launches in a CUDA graph, where
// calls that depend on nothing of each other may run at the same time; not with kInGraphs false,
// for one that needs more than the addresses of its operands when it runs again.
template <auto fn, bool kInGraphs = true>
struct Registered;

template <class... Params, ffi::Error (*fn)(Params...), bool kInGraphs>
struct Registered<fn, kInGraphs> : Target {
  explicit Registered(const char* name, XLA_FFI_Handler* check = nullptr)
      : Target(name, &Handle, check, &executions) {}

 private:
  // A command buffer runs the handler when it is recorded and not when it is replayed.
  static inline std::atomic<int64_t> executions{0};

  static ffi::Error Count(Params... params) {
    executions.fetch_add(1, std::memory_order_relaxed);
    return fn(params...);
  }

  static XLA_FFI_Error* Handle(XLA_FFI_CallFrame* frame) {
    static auto* handler =
        kInGraphs ? ffi::Ffi::BindTo(&Count, {ffi::Traits::kCmdBufferCompatible}).release()
                  : ffi::Ffi::BindTo(&Count).release();
    return handler->Call(frame);
  }
};

// What a handler is to do: launch on a stream, or only check, before the execution of a program.
struct Stage {
  std::optional<cudaStream_t> stream;
  int64_t execution = 0;  // of the program, where there is no stream
};

// Two handlers of one function, one for each.
template <auto fn>
struct Checked;

template <class... Params, ffi::Error (*fn)(Stage, Params...)>
struct Checked<fn> {
  static ffi::Error Execute(cudaStream_t stream, Params... params) {
    return fn({stream}, params...);
  }

  static ffi::Error Check(ffi::RunId run, Params... params) {
    return fn({std::nullopt, run.run_id}, params...);
  }

  static XLA_FFI_Error* HandleCheck(XLA_FFI_CallFrame* frame) {
    constexpr auto kStage = ffi::ExecutionStage::kInitialize;
    static auto* handler = ffi::Ffi::BindTo<decltype(&Check), kStage>(&Check).release();
    return handler->Call(frame);
  }
};

}  // namespace jaxmoe
