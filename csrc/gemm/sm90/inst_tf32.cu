// Kernel instances: float32 in TF32.
#include "csrc/gemm/sm90/formats/tf32.cuh"
#include "csrc/gemm/sm90/variants.cuh"

namespace jaxmoe {

VariantTable Tf32Variants() { return MakeVariants<Tf32, WeightLayout::kNK>(); }

}  // namespace jaxmoe
