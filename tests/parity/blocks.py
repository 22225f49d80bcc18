"""Tiny MoE blocks of transformers with random weights, and what they compute."""

import ast
import contextlib
import importlib
import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from tests.parity.cells import LENGTH, SEQUENCES, router_of

MODELS = Path(transformers.__file__).parent / "models"
HIDDEN, EXPERTS = 32, 16
SIZES = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), EXPERTS),
    "hidden_size": HIDDEN,
    "intermediate_size": 16,
    "moe_intermediate_size": 16,
    "num_experts_per_tok": 3,
    "shared_expert_intermediate_size": 24,
    "n_shared_experts": 2,
    "num_shared_experts": 2,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
_MAKER = re.compile(r"Experts$")
_NAMED = re.compile(r"(MoE|Moe|MoA|MoeBlock|MoEBlock|SparseMLP)$")


def found() -> set[tuple[str, str]]:
    """Returns (family, class) of every MoE block that transformers has, read from its sources.

    A block has an attribute `experts`, or makes a module whose class is named `...Experts`, or is
    named as a block is.
    """
    blocks = set()
    for path in MODELS.glob("*/modeling_*.py"):
        source = path.read_text(encoding="utf-8")
        if not re.search(r"Experts|MoE|Moe\b|MoA|SparseMLP", source):
            continue
        classes = (c for c in ast.parse(source).body if isinstance(c, ast.ClassDef))
        blocks |= {(path.parent.name, c.name) for c in classes if _is_block(c)}
    return blocks


def _is_block(c: ast.ClassDef) -> bool:
    if _NAMED.search(c.name):
        return True
    for node in ast.walk(c):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            attributes = [t.attr for t in node.targets if isinstance(t, ast.Attribute)]
            made = ast.unparse(node.value.func)
            if attributes and ("experts" in attributes or _MAKER.search(made)):
                return True
    return False


def config_of(case: Any, variant: dict[str, Any]) -> Any:
    """Returns the tiny configuration of a case, of the family's own class if the case names it."""
    values = SIZES | case.settings | variant
    if case.config is None:
        config = types.SimpleNamespace(_experts_implementation="eager", **values)
        config.per_layer_config = [config]
        return config
    name = f"transformers.models.{case.family}.configuration_{case.family}"
    return getattr(importlib.import_module(name), case.config)(**values)


def build(case: Any, variant: dict[str, Any], sharpness: float = 1.0) -> Any:
    """Makes the block of a case with random weights, in evaluation mode.

    `sharpness` is a factor of the router's weight, where it has one whose product is the logits.
    """
    models = importlib.import_module(f"transformers.models.{case.family}.modeling_{case.family}")
    block = getattr(models, case.block)(config_of(case, variant), *case.arguments).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in [*block.parameters(), *block.buffers()]:
            if tensor.dtype.is_floating_point:
                scale = tensor.shape[-1] ** -0.5 if tensor.ndim > 1 else 0.1
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * scale)
                if tensor.ndim == 1 and not isinstance(tensor, torch.nn.Parameter):
                    tensor += case.shift
            elif tensor.dtype is torch.long:  # a table of experts
                tensor.copy_(torch.randint(0, EXPERTS, tensor.shape, generator=generator))
        if (router := router_of(dict(block.named_parameters()))) is not None:
            block.get_parameter(f"{router}.weight").mul_(sharpness)
    return block


def tokens() -> Any:
    """Draws the tokens of every case."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn((SEQUENCES, LENGTH, HIDDEN), generator=generator)


def results(
    case: Any, variant: dict[str, Any], sharpness: float = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    """Returns what the block gives for `tokens()`, computed in float64 and in float32."""
    block = build(case, variant, sharpness)
    naive = _result(case, block, tokens())
    with wide_floats():
        wide = build(case, variant).double()
        wide.load_state_dict(block.state_dict())
        reference = _result(case, wide, tokens().double())
    assert naive.dtype == np.float32 and reference.dtype == np.float64
    return reference, naive


def _result(case: Any, block: Any, x: Any) -> np.ndarray:
    extra = {name: torch.tensor(value) for name, value in case.inputs.items()}
    with torch.no_grad():
        y = case.forward(block, x, **extra) if case.forward else block(x, **extra)
    y = y[0] if isinstance(y, tuple) else y
    return y.reshape(-1, y.shape[-1]).numpy()


@contextlib.contextmanager
def wide_floats() -> Iterator[None]:
    """Gives float64 to what asks torch for float32, as routers, softmax and norms do."""
    saved = torch.float, torch.float32, torch.Tensor.float
    torch.float = torch.float32 = torch.float64
    torch.Tensor.float = torch.Tensor.double
    try:
        yield
    finally:
        torch.float, torch.float32, torch.Tensor.float = saved


def arrays_of(block: Any) -> dict[str, np.ndarray]:
    """Returns the weights of a block by name, integers as int32."""
    arrays = {n: t.detach().numpy() for n, t in [*block.named_parameters(), *block.named_buffers()]}
    return {n: a.astype(np.int32) if a.dtype == np.int64 else a for n, a in arrays.items()}
