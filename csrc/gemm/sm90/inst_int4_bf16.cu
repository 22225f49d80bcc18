// Kernel instances: int4, tokens of bf16.
#include "csrc/gemm/sm90/formats/int4.cuh"
#include "csrc/gemm/sm90/variants.cuh"

namespace jaxmoe {

VariantTable Int4Bf16Variants() { return MakeVariants<Int4<__nv_bfloat16>, WeightLayout::kNK>(); }

}  // namespace jaxmoe
