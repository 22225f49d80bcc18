// Kernel instances: e4m3, promoted sums.
#include "csrc/gemm/sm90/kernel.cuh"

namespace jaxmoe {

VariantTable E4M3PromotedVariants() {
  return MakeVariants<Operands<__nv_fp8_e4m3, true>, cute::SM90::GMMA::Major::K>(DType::kFloat8E4M3,
                                                                                 WeightLayout::kNK);
}

}  // namespace jaxmoe
