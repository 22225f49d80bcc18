// FFI handler jaxmoe_route_v2: the experts of each token and their weights.
#include "csrc/ffi/route_attrs.h"

namespace jaxmoe {

// RuleAttrs and GroupAttrs.
struct RouteAttrs {
  int64_t score;
  int64_t by_score;
  int64_t normalize;
  float epsilon;
  float scale;
  GroupAttrs groups;
};

}  // namespace jaxmoe

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::jaxmoe::RouteAttrs,
                                      ::xla::ffi::StructMember<int64_t>("score"),
                                      ::xla::ffi::StructMember<int64_t>("by_score"),
                                      ::xla::ffi::StructMember<int64_t>("normalize"),
                                      ::xla::ffi::StructMember<float>("epsilon"),
                                      ::xla::ffi::StructMember<float>("scale"),
                                      ::xla::ffi::StructMember<::jaxmoe::GroupAttrs>("groups"));

namespace jaxmoe {
namespace {

ffi::Error Route(
    cudaStream_t stream, In logits, In bias, Out expert_ids, Out weights, RouteAttrs attrs) {
  Operands take("route");
  Dim T, E, K;
  const RuleAttrs rule{attrs.score, attrs.by_score, attrs.normalize, attrs.epsilon, attrs.scale};
  RouteParams params = TakeRoute(logits, {T, E}, bias, E, rule, attrs.groups, &take);
  params.expert_ids = take.Ints("expert_ids", *expert_ids, {T, K});
  params.weights = take.Floats("weights", *weights, {T, K});
  params.num_tokens = T;
  params.top_k = K;
  take.Range("top_k", K, 1, E);
  if (take.failed()) return take.error();
  return take.Result(LaunchRoute(params, stream));
}

const Registered<Route> registered("jaxmoe_route_v2");

}  // namespace
}  // namespace jaxmoe
