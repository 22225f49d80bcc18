// Kernel instances: bf16, weights [E, K, N].
#include "csrc/gemm/sm90/formats/plain.cuh"
#include "csrc/gemm/sm90/variants.cuh"

namespace jaxmoe {

VariantTable Bf16KnVariants() { return MakeVariants<Plain<__nv_bfloat16>, WeightLayout::kKN>(); }

}  // namespace jaxmoe
