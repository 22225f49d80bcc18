// Kernel instances: mxfp4, tokens of bf16.
#include "csrc/gemm/sm90/formats/mxfp4.cuh"
#include "csrc/gemm/sm90/variants.cuh"

namespace jaxmoe {

VariantTable Mxfp4Bf16Variants() { return MakeVariants<Mxfp4<__nv_bfloat16>, WeightLayout::kNK>(); }

}  // namespace jaxmoe
