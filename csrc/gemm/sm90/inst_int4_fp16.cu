// Kernel instances: int4, tokens of fp16.
#include "csrc/gemm/sm90/formats/int4.cuh"
#include "csrc/gemm/sm90/variants.cuh"

namespace jaxmoe {

VariantTable Int4Fp16Variants() { return MakeVariants<Int4<__half>, WeightLayout::kNK>(); }

}  // namespace jaxmoe
