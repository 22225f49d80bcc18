// Kernel instances: int4.
#include "csrc/gemm/sm90/formats/int4.cuh"
#include "csrc/gemm/sm90/variants.cuh"

namespace jaxmoe {

VariantTable Int4Bf16Variants() { return MakeVariants<Int4<__nv_bfloat16>, WeightLayout::kNK>(); }
VariantTable Int4Fp16Variants() { return MakeVariants<Int4<__half>, WeightLayout::kNK>(); }

}  // namespace jaxmoe
