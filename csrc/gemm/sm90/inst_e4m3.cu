// Kernel instances: e4m3.
#include "csrc/gemm/sm90/formats/fp8.cuh"
#include "csrc/gemm/sm90/variants.cuh"

namespace jaxmoe {

VariantTable E4M3Variants() { return MakeVariants<Fp8<__nv_fp8_e4m3>, WeightLayout::kNK>(); }

}  // namespace jaxmoe
