// Kernel instances: mxfp4, tokens of fp16.
#include "csrc/gemm/sm90/formats/mxfp4.cuh"
#include "csrc/gemm/sm90/variants.cuh"

namespace jaxmoe {

VariantTable Mxfp4Fp16Variants() { return MakeVariants<Mxfp4<__half>, WeightLayout::kNK>(); }

}  // namespace jaxmoe
