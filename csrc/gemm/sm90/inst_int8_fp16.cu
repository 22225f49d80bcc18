// Kernel instances: int8, tokens of fp16.
#include "csrc/gemm/sm90/formats/int8.cuh"
#include "csrc/gemm/sm90/variants.cuh"

namespace jaxmoe {

VariantTable Int8Fp16Variants() { return MakeVariants<Int8<__half>, WeightLayout::kNK>(); }

}  // namespace jaxmoe
