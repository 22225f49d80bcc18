// Kernel instances: int4 beside tokens of e4m3.
#include "csrc/gemm/sm90/formats/int4_e4m3.cuh"
#include "csrc/gemm/sm90/variants.cuh"

namespace jaxmoe {

VariantTable Int4E4M3Variants() { return MakeVariants<Int4E4M3, WeightLayout::kNK>(); }

}  // namespace jaxmoe
