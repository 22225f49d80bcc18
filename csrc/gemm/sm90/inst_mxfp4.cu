// Kernel instances: mxfp4.
#include "csrc/gemm/sm90/formats/mxfp4.cuh"
#include "csrc/gemm/sm90/variants.cuh"

namespace jaxmoe {

VariantTable Mxfp4Bf16Variants() { return MakeVariants<Mxfp4<__nv_bfloat16>, WeightLayout::kNK>(); }
VariantTable Mxfp4Fp16Variants() { return MakeVariants<Mxfp4<__half>, WeightLayout::kNK>(); }

}  // namespace jaxmoe
