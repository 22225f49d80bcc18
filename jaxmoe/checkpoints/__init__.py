"""Weights of checkpoints and other libraries as quantized arrays or experts, and back."""

from jaxmoe.checkpoints.decoded import weight_from_scales as weight_from_scales
from jaxmoe.checkpoints.flashinfer import from_flashinfer as from_flashinfer
from jaxmoe.checkpoints.flashinfer import to_flashinfer as to_flashinfer
from jaxmoe.checkpoints.fp8 import from_block as from_block
from jaxmoe.checkpoints.fp8 import from_compressed_tensors as from_compressed_tensors
from jaxmoe.checkpoints.fp8 import to_block as to_block
from jaxmoe.checkpoints.fp8 import to_compressed_tensors as to_compressed_tensors
from jaxmoe.checkpoints.joined import join_gate_up as join_gate_up
from jaxmoe.checkpoints.ordered import dequantize_gptq as dequantize_gptq
from jaxmoe.checkpoints.ordered import dequantize_int4 as dequantize_int4
from jaxmoe.checkpoints.packed import from_awq as from_awq
from jaxmoe.checkpoints.packed import from_gptq as from_gptq
from jaxmoe.checkpoints.packed import from_int4 as from_int4
from jaxmoe.checkpoints.packed import from_mxfp4 as from_mxfp4
from jaxmoe.checkpoints.packed import from_mxfp8 as from_mxfp8
from jaxmoe.checkpoints.packed import from_nvfp4 as from_nvfp4
from jaxmoe.checkpoints.packed import to_mxfp4 as to_mxfp4
from jaxmoe.checkpoints.scaled import from_scales as from_scales
from jaxmoe.checkpoints.tokens import from_tokens as from_tokens
from jaxmoe.checkpoints.tokens import swizzle_scales as swizzle_scales
from jaxmoe.checkpoints.tokens import to_tokens as to_tokens
from jaxmoe.checkpoints.tokens import unswizzle_scales as unswizzle_scales
from jaxmoe.checkpoints.vllm import from_vllm_w4a8 as from_vllm_w4a8
