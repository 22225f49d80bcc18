// Kernel instances: bf16.
#include "csrc/gemm/sm90/formats/plain.cuh"
#include "csrc/gemm/sm90/variants.cuh"

namespace jaxmoe {

VariantTable Bf16KnVariants() { return MakeVariants<Plain<__nv_bfloat16>, WeightLayout::kKN>(); }
VariantTable Bf16NkVariants() { return MakeVariants<Plain<__nv_bfloat16>, WeightLayout::kNK>(); }

}  // namespace jaxmoe
