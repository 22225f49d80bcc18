"""The layer a PyTorch user writes today, around `torch._grouped_mm`; runs in its own process."""

import dataclasses
import importlib.util
import itertools
import json
import subprocess
import sys
from typing import Any

from benchmarks import bounds, timing
from benchmarks.models import MODELS, Layer, experts_used, layer_bytes
from benchmarks.rows import Row, line, with_time
from jaxmoe.activation import resolve

NAME = "torch_grouped_mm"

_WEIGHT_BYTES = 48 * 2**30
_SETS = 8
_SAMPLED = 16
_TIMEOUT_S = 300


def run_apart(cases: list[tuple[str, int, str]], repeats: int, seed: int) -> list[dict[str, Any]]:
    """Measures (model, tokens, skew) in a child process; gives a reason for each missing row."""
    if importlib.util.find_spec("torch") is None:
        return [_absent(*case, "not run: torch is not installed") for case in cases]
    request = {"cases": cases, "repeats": repeats, "seed": seed}
    command = [sys.executable, "-m", "benchmarks.baselines.torch_grouped_mm", json.dumps(request)]
    print(f"{NAME}: {len(cases)} cases in a process of their own", flush=True)
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=_TIMEOUT_S)
        text, failure = done.stdout, f"failed: its process ended with {done.returncode}"
    except subprocess.TimeoutExpired as late:
        text, failure = (late.stdout or b"").decode(), f"not run: {_TIMEOUT_S} s were over"
    rows = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return rows + [_absent(*case, failure) for case in cases[len(rows) :]]


def _absent(model: str, tokens: int, skew: str, reason: str) -> dict[str, Any]:
    return dataclasses.replace(_base(model, tokens, skew), reason=reason).to_json()


def _base(model: str, tokens: int, skew: str) -> Row:
    return Row("layer", "moe_mlp", model, tokens, "bf16", "forward", NAME, skew=skew)


def main() -> None:
    """Reads the request from the command line and prints one JSON row per case."""
    request = json.loads(sys.argv[1])
    for name, group in itertools.groupby(request["cases"], key=lambda case: case[0]):
        bench = _Bench(MODELS[name], request["seed"])
        for _, tokens, skew in group:
            try:
                row = bench.row(tokens, skew, request["repeats"])
            except RuntimeError as failure:
                reason = f"failed: {str(failure).splitlines()[0][:160]}"
                row = dataclasses.replace(_base(name, tokens, skew), reason=reason)
            print(json.dumps(row.to_json()), flush=True)
            print(line(row), file=sys.stderr, flush=True)  # standard output is read by the parent
        bench.release()


class _Bench:
    """Weights of one model, and the timing of its layer."""

    def __init__(self, model: Layer, seed: int):
        import torch  # pyright: ignore[reportMissingImports]

        self.torch = torch
        self.model = model
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        torch.manual_seed(seed)
        count = max(1, min(_SETS, _WEIGHT_BYTES // layer_bytes(model)))
        self.sets = [self._weights() for _ in range(count)]

    def release(self) -> None:
        """Gives the memory back before the next model takes its own."""
        self.sets.clear()
        if self.device == "cuda":
            self.torch.cuda.empty_cache()

    def _weights(self) -> list[Any]:
        m = self.model
        shapes = [(2 * m.intermediate, m.hidden), (m.hidden, m.intermediate)]
        # [E, N, K] in memory, seen as [E, K, N]: the order its kernels want.
        out = [self._stack(n, k, k**-0.5).transpose(1, 2) for n, k in shapes]
        if m.bias:
            out += [self._stack(n, 1, 0.1).squeeze(2) for n, _ in shapes]
        return out

    def _stack(self, n: int, k: int, scale: float) -> Any:
        torch = self.torch
        shape = (self.model.num_experts, n, k)
        out = torch.empty(shape, dtype=torch.bfloat16, device=self.device)
        for e in range(shape[0]):
            out[e] = torch.randn(n, k, device=self.device) * scale
        return out

    def routing(self, num_tokens: int, skew: str) -> tuple[Any, Any]:
        """Draws K experts per token as `benchmarks.cases.routed` does."""
        torch, m = self.torch, self.model
        logits = -torch.empty(num_tokens, m.num_experts, device=self.device).exponential_().log()
        if skew == "zipf":
            logits -= torch.log(torch.randperm(m.num_experts, device=self.device) + 1.0)
        logits[:, experts_used(m, skew) :] = -1e6
        chosen, ids = torch.topk(logits, m.top_k)
        return ids, torch.softmax(chosen, dim=-1)

    def layer(self, x: Any, routing: Any, w: list[Any], residual: Any) -> Any:
        """Computes residual + MoE(x)."""
        torch, m = self.torch, self.model
        ids, weights = routing
        expert, row_to_slot = torch.sort(ids.reshape(-1), stable=True)
        all_experts = torch.arange(m.num_experts, device=self.device)
        offsets = torch.searchsorted(expert, all_experts, right=True).to(torch.int32)
        h = torch._grouped_mm(x[row_to_slot // m.top_k], w[0], offs=offsets)
        if m.bias:
            h = h + w[2][expert]
        rows = torch._grouped_mm(self._activation(h), w[1], offs=offsets)
        if m.bias:
            rows = rows + w[3][expert]
        slots = torch.empty_like(rows)
        slots[row_to_slot] = rows
        y = (slots.view(x.shape[0], m.top_k, -1) * weights[:, :, None]).sum(dim=1)
        return (y + residual).to(x.dtype)

    def _activation(self, h: Any) -> Any:
        torch, m = self.torch, self.model
        if m.gate_up == "interleaved":
            gate, up = h[..., 0::2], h[..., 1::2]
        else:
            gate, up = h.chunk(2, dim=-1)
        if m.activation == "swiglu":
            return torch.nn.functional.silu(gate) * up
        act = resolve(m.activation)  # gpt-oss's clamped form
        gate, up = gate.clamp(max=act.limit), up.clamp(-act.limit, act.limit)
        return gate * torch.sigmoid(act.c1 * gate) * (up + act.beta)

    def error(self, y: Any, x: Any, routing: Any) -> float:
        """Relative error of the first layer on sampled tokens, against float32."""
        torch = self.torch
        at = torch.unique(torch.linspace(0, x.shape[0] - 1, _SAMPLED).long()).tolist()
        expected = torch.stack([self._token(x[t].float(), routing, t) for t in at])
        return float((y[at].float() - expected).norm() / expected.norm())

    def _token(self, x: Any, routing: Any, t: int) -> Any:
        w = self.sets[0]
        total = self.torch.zeros_like(x)
        for e, weight in zip(routing[0][t].tolist(), routing[1][t].tolist(), strict=True):
            h = x @ w[0][e].float() + (w[2][e].float() if self.model.bias else 0)
            row = self._activation(h) @ w[1][e].float()
            total += weight * (row + (w[3][e].float() if self.model.bias else 0))
        return total

    def row(self, num_tokens: int, skew: str, repeats: int) -> Row:
        """Checks and times one case."""
        torch, m = self.torch, self.model
        x = torch.randn(num_tokens, m.hidden, device=self.device).to(torch.bfloat16)
        first = bounds.layer(m, num_tokens, min(m.num_experts, num_tokens * m.top_k))
        ceiling = bounds.CEILINGS.get("NVIDIA H200")
        layers = timing.chain_length(first.floor_us(ceiling) or 0.0, first.compute_heavy(ceiling))
        routings = [self.routing(num_tokens, skew) for _ in range(layers)]
        hits = [int(torch.unique(ids).numel()) for ids, _ in routings]
        work = bounds.layer(m, num_tokens, sum(hits) / layers)
        error = self.error(
            self.layer(x, routings[0], self.sets[0], torch.zeros_like(x)), x, routings[0]
        )
        base = dataclasses.replace(
            _base(m.name, num_tokens, skew),
            rel_err=error,
            experts_hit=sum(hits) / layers,
            regime="burst",
            layers=layers,
            weight_sets=min(len(self.sets), layers),
        )
        if not error <= 1e-2:
            return dataclasses.replace(base, regime=None, reason="not timed: wrong result")
        chain = _Graph(self, x, routings) if self.device == "cuda" else _Eager(self, x, routings)
        slow = work.compute_heavy(ceiling)
        pace = timing.Pace(repeats // 2 if slow else repeats, 0.040 if slow else 0.005, 0.015, 2.0)
        measured = timing.bursts({NAME: chain}, pace)[NAME]
        kind = torch.cuda.get_device_name() if self.device == "cuda" else "cpu"
        return with_time(base, work, bounds.CEILINGS.get(kind), measured)


class _Eager:
    """A chain of layers through the residual, launched op by op."""

    def __init__(self, bench: _Bench, x: Any, routings: list[Any]):
        self.layers = len(routings)
        self._bench, self._x, self._routings = bench, x, routings

    def launch(self, count: int) -> None:
        """Runs the chain `count` times."""
        sets = self._bench.sets
        for _ in range(count):
            y = self._x
            for i, routing in enumerate(self._routings):
                y = self._bench.layer(self._x, routing, sets[i % len(sets)], y)

    def wait(self) -> None:
        """Returns when the GPU, if any, is done."""
        if self._bench.device == "cuda":
            self._bench.torch.cuda.synchronize()


class _Graph(_Eager):
    """The chain of `_Eager` as one CUDA graph."""

    def __init__(self, bench: _Bench, x: Any, routings: list[Any]):
        super().__init__(bench, x, routings)
        torch = bench.torch
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            super().launch(1)  # loads kernels and picks algorithms outside the capture
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            super().launch(1)

    def launch(self, count: int) -> None:
        """Replays the graph `count` times."""
        for _ in range(count):
            self._graph.replay()


if __name__ == "__main__":
    main()
