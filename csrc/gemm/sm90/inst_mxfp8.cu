// Kernel instances: mxfp8.
#include "csrc/gemm/sm90/formats/mxfp8.cuh"
#include "csrc/gemm/sm90/variants.cuh"

namespace jaxmoe {

VariantTable Mxfp8Bf16Variants() { return MakeVariants<Mxfp8<__nv_bfloat16>, WeightLayout::kNK>(); }
VariantTable Mxfp8Fp16Variants() { return MakeVariants<Mxfp8<__half>, WeightLayout::kNK>(); }

}  // namespace jaxmoe
