"""Mixture-of-Experts layers inside `jax.jit`, with CUDA kernels for NVIDIA GPUs."""

from ._explain import explain as explain
from ._export import export_checks as export_checks
from ._heuristics import GemmConfig as GemmConfig
from .activation import Activation as Activation
from .activation import Swiglu as Swiglu
from .finalize import finalize as finalize
from .grouped_gemm import grouped_gemm as grouped_gemm
from .mlp import moe_mlp as moe_mlp
from .permute import permute as permute
from .plan import Plan as Plan
from .plan import plan as plan
from .routing import Routing as Routing
from .routing import route as route
