// Kernel instances: int8.
#include "csrc/gemm/sm90/formats/int8.cuh"
#include "csrc/gemm/sm90/variants.cuh"

namespace jaxmoe {

VariantTable Int8Bf16Variants() { return MakeVariants<Int8<__nv_bfloat16>, WeightLayout::kNK>(); }
VariantTable Int8Fp16Variants() { return MakeVariants<Int8<__half>, WeightLayout::kNK>(); }

}  // namespace jaxmoe
