"""Mixture-of-Experts layers inside `jax.jit`, with CUDA kernels for NVIDIA GPUs."""

from importlib import import_module as _import_module
from importlib.metadata import version as _version
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from . import _tables as _tables
from . import checkpoints as checkpoints
from . import expert_parallel as expert_parallel
from . import fsdp as fsdp
from ._explain import explain as explain
from ._export import export_checks as export_checks
from ._gemm.tiles import GemmConfig as GemmConfig
from .activation import Activation as Activation
from .activation import SoftcapSwiglu as SoftcapSwiglu
from .activation import Swiglu as Swiglu
from .activation import SwigluStep as SwigluStep
from .expert_batches import expert_batches as expert_batches
from .experts import Experts as Experts
from .finalize import ExpertRows as ExpertRows
from .finalize import finalize as finalize
from .grouped_gemm import grouped_gemm as grouped_gemm
from .losses import expert_load as expert_load
from .losses import load_balancing_loss as load_balancing_loss
from .losses import router_z_loss as router_z_loss
from .losses import sequence_balance_loss as sequence_balance_loss
from .losses import update_selection_bias as update_selection_bias
from .mlp import expert_rows as expert_rows
from .mlp import moe_mlp as moe_mlp
from .permute import permute as permute
from .plan import Plan as Plan
from .plan import plan as plan
from .quantize import QuantizedArray as QuantizedArray
from .quantize import dequantize as dequantize
from .quantize import quantize as quantize
from .quantize import quantize_tokens as quantize_tokens
from .ragged_dot import ragged_dot_general as ragged_dot_general
from .route_and_plan import route_and_plan as route_and_plan
from .routing import Routing as Routing
from .routing import route as route
from .routing_methods import RoutingMethod as RoutingMethod
from .weight_grad import grouped_gemm_weight_grad as grouped_gemm_weight_grad

if _TYPE_CHECKING:
    from .autotuning import AutotuningResult as AutotuningResult
    from .autotuning import autotune as autotune
    from .loading import load as load

__version__ = _version("jaxmoe")


# Reading files and measuring are no part of what every program imports.
_LATE = {"load": "loading", "autotune": "autotuning", "AutotuningResult": "autotuning"}


def __getattr__(name: str) -> _Any:
    if name in _LATE:
        return getattr(_import_module(f"jaxmoe.{_LATE[name]}"), name)
    raise AttributeError(f"module 'jaxmoe' has no attribute {name!r}")
