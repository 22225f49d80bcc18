// Kernel instances: e5m2 weights, e4m3 tokens.
#include "csrc/gemm/sm90/kernel.cuh"

namespace jaxmoe {

VariantTable E5M2Variants() {
  return MakeVariants<Operands<__nv_fp8_e5m2>, cute::SM90::GMMA::Major::K>(DType::kFloat8E5M2,
                                                                           WeightLayout::kNK);
}

}  // namespace jaxmoe
