"""The routing rules in float64 NumPy, token by token: the judge of `jaxmoe.route`.

Written from the formulas in docs/routing.md; it shares no code with the package and knows no JAX.

Keys are float32, as the rules say: each score is computed in float64 and rounded once, bias and
group sums are added in float32. A device's sigmoid or softmax may be a few ulp off that, so two
keys that almost agree have no right order. `margin` says how far the closest decision about a token
was from falling the other way; `draw` redraws tokens until all are clear, and the tests then demand
equal ids. Equal keys of equal logits and biases are a tie: the rules decide, no margin is needed.
"""

import math
from typing import Any, NamedTuple

import numpy as np


class Rule(NamedTuple):
    """One row of the table of rules; "sum?" is "sum" if norm_topk_prob, else "none"."""

    score: str
    key: str
    normalize: str
    groups: str | None = None
    bias: bool = False
    norm_topk_prob: bool | None = None
    clamps: bool = False  # divides by max(sum, epsilon), not by sum + epsilon


RULES = {
    "softmax": Rule("softmax", "logit", "sum?", norm_topk_prob=False),
    "renormalize": Rule("logits", "logit", "softmax"),
    "renormalize_naive": Rule("logits", "logit", "softmax"),
    "deepseek_v3": Rule("sigmoid", "score", "sum?", "top2", bias=True, norm_topk_prob=True),
    "deepseek_v2": Rule("softmax", "score", "sum?", "max", norm_topk_prob=False),
    "llama4": Rule("sigmoid", "logit", "none"),
    "topk": Rule("logits", "logit", "none"),
    "sigmoid_renorm": Rule("sigmoid", "score", "sum?", norm_topk_prob=True, clamps=True),
    "minimax2": Rule("sigmoid", "score", "sum", bias=True),
    "sigmoid": Rule("sigmoid", "score", "none"),
    "topk_sigmoid": Rule("sigmoid", "logit", "none"),
    "sqrtsoftplus": Rule("sqrtsoftplus", "score", "sum?", bias=True, norm_topk_prob=True),
}

CLEAR = 2.0**-17  # 128 times float32's rounding


class Answer(NamedTuple):
    """expert_ids and weights [T, K + S]; margin [T], inf where nothing had to be rounded."""

    expert_ids: np.ndarray
    weights: np.ndarray
    margin: np.ndarray


def softmax(x: np.ndarray) -> np.ndarray:
    """Over the values that are not NaN; 0 if all of them are -inf."""
    there = x[~np.isnan(x)]
    if there.size == 0 or there.max() == -math.inf:
        return np.where(np.isnan(x), np.nan, 0.0)
    return np.exp(x - there.max()) / np.exp(there - there.max()).sum()


SCORES = {
    "logits": lambda x: x,
    "softmax": softmax,
    "sigmoid": lambda x: 1.0 / (1.0 + np.exp(-x)),
    "sqrtsoftplus": lambda x: np.sqrt(np.logaddexp(0.0, x)),
}


def route(
    logits: Any,
    *,
    top_k: int,
    method: str = "renormalize",
    bias: Any = None,
    num_groups: int = 1,
    top_groups: int = 1,
    scale: Any = 1.0,
    norm_topk_prob: bool | None = None,
    epsilon: float | None = None,
    masked_group_value: float = -math.inf,
    expert_scale: Any = None,
    num_shared_experts: int = 0,
    num_valid_tokens: Any = None,
    mask: Any = None,
    expert_ids: Any = None,
) -> Answer:
    """Routes one token after the other; the arguments of `jaxmoe.route`, unchecked."""
    rule = RULES[method]
    x = np.asarray(logits, np.float64)
    num_tokens, num_experts = x.shape
    b = np.zeros(num_experts) if bias is None else np.asarray(bias, np.float64)
    factor = np.ones(num_experts) if expert_scale is None else np.asarray(expert_scale, np.float64)
    divide = rule.norm_topk_prob if norm_topk_prob is None else norm_topk_prob
    normalize = rule.normalize
    if normalize == "sum?":
        normalize = "sum" if divide else "none"
    epsilon = 1e-20 if epsilon is None else epsilon

    ids = np.full((num_tokens, top_k + num_shared_experts), -1, np.int32)
    weights = np.zeros(ids.shape)
    margin = np.full(num_tokens, math.inf)
    last = num_tokens if num_valid_tokens is None else int(num_valid_tokens)
    valid = np.arange(num_tokens) < last if mask is None else np.asarray(mask)
    for t in np.flatnonzero(valid):
        with np.errstate(all="ignore"):
            score = SCORES[rule.score](x[t])
        if expert_ids is None:
            chosen, margin[t] = _choose(
                x[t], score, b, rule, top_k, num_groups, top_groups, masked_group_value
            )
        else:
            chosen = [int(e) for e in np.asarray(expert_ids)[t]]
            exists = [0 <= e < num_experts and not math.isnan(x[t, e]) for e in chosen]
            chosen = [e if ok else -1 for e, ok in zip(chosen, exists, strict=True)]
        places = [k for k, e in enumerate(chosen) if e >= 0]
        experts = [chosen[k] for k in places]
        w = score[experts]
        with np.errstate(all="ignore"):
            if normalize == "softmax":
                w = softmax(w)
            elif normalize == "sum":
                w = w / (max(w.sum(), epsilon) if rule.clamps else w.sum() + epsilon)
            w = w * scale * factor[experts]
        ids[t, :top_k] = chosen
        weights[t, places] = w
        for s in range(num_shared_experts):
            ids[t, top_k + s], weights[t, top_k + s] = num_experts + s, 1.0
    return Answer(ids, weights, margin)


def scores(logits: Any, method: str, mask: Any = None) -> np.ndarray:
    """What losses take, [T, E]: the method's scores, or probabilities where they are the logits."""
    x = np.asarray(logits, np.float64)
    name = RULES[method].score
    out = np.zeros_like(x)
    for t in range(len(x)) if mask is None else np.flatnonzero(mask):
        there = ~np.isnan(x[t])
        with np.errstate(all="ignore"):
            out[t, there] = SCORES["softmax" if name == "logits" else name](x[t, there])
    return out


class _Key(NamedTuple):
    """A float32 key, the size of the terms that it is the sum of, and what it was made from."""

    value: np.float32
    size: float
    origin: tuple[float, ...]


def _choose(
    x: np.ndarray,
    score: np.ndarray,
    bias: np.ndarray,
    rule: Rule,
    top_k: int,
    num_groups: int,
    top_groups: int,
    masked_value: float,
) -> tuple[list[int], float]:
    """Returns the experts of one token, -1 where there is none left, and the margin."""
    exact = rule.key == "logit"
    keys: dict[int, _Key] = {}
    for e in range(len(x)):
        with np.errstate(all="ignore"):
            value = np.float32(x[e]) if exact else np.float32(score[e]) + np.float32(bias[e])
        if not np.isnan(value):
            keys[e] = _Key(value, 0.0 if exact else abs(score[e]) + abs(bias[e]), (x[e], bias[e]))
    margin = math.inf
    if num_groups > 1:
        width = len(x) // num_groups
        members = [[e for e in keys if e // width == g] for g in range(num_groups)]
        values = [_group_value([keys[e] for e in m], rule.groups) for m in members]
        ranked = sorted(range(num_groups), key=lambda g: (-values[g].value, g))
        kept, rejected = ranked[:top_groups], ranked[top_groups:]
        if rejected:
            margin = _gap(values[kept[-1]], values[rejected[0]])
        for e in [e for e in keys if e // width not in kept]:
            if masked_value == -math.inf:
                del keys[e]
            else:
                keys[e] = _Key(np.float32(masked_value), abs(masked_value), ())
    order = sorted(keys, key=lambda e: (-keys[e].value, e))
    if not exact:
        close = order[: top_k + 1]
        gaps = [_gap(keys[a], keys[c]) for a, c in zip(close, close[1:], strict=False)]
        margin = min([margin, *gaps])
    return (order[:top_k] + [-1] * top_k)[:top_k], margin


def _group_value(keys: list[_Key], how: str | None) -> _Key:
    largest = sorted(keys, key=lambda key: -key.value)[: 2 if how == "top2" else 1]
    if not largest:
        return _Key(np.float32(-math.inf), 0.0, ())
    origin = sum((key.origin for key in largest), ())
    value = np.sum([key.value for key in largest], dtype=np.float32)
    return _Key(value, sum(key.size for key in largest), origin)


def _gap(a: _Key, b: _Key) -> float:
    if a.origin == b.origin or not np.isfinite([a.value, b.value]).all():
        return math.inf
    return abs(float(a.value) - float(b.value)) / max(a.size + b.size, 1e-30)


# Multiples of 1/64 in [-4, 4); odd ones of 1/128 in [-2, 2) and of 1/256 in [-1, 1).
_ODD = np.arange(-255, 256, 2)
_LOGITS = np.concatenate([np.arange(-256, 256) / 64, _ODD / 128, _ODD / 256])


def draw(
    seed: int,
    num_tokens: int,
    num_experts: int,
    options: dict[str, Any],
    dtype: Any = np.float32,
    clear: float = CLEAR,
) -> tuple[np.ndarray, dict[str, Any]]:
    """Draws logits [T, E] of which no two keys that matter are close, and arrays for the options.

    Logits are distinct numbers in [-4, 4) that bfloat16 holds exactly: E <= 1024.
    An option bias=True or a dtype, or expert_scale=True, asks for an array.
    """
    rng = np.random.default_rng(seed)
    options = dict(options)
    if kind := options.get("bias"):
        bias = 0.3 * rng.standard_normal(num_experts, np.float32)
        options["bias"] = bias if kind is True else bias.astype(kind)
    if options.get("expert_scale"):
        options["expert_scale"] = rng.uniform(0.5, 2.0, num_experts).astype(np.float32)
    logits = np.empty((num_tokens, num_experts), np.float32)
    todo = np.arange(num_tokens)
    for _ in range(200):
        for t in todo:
            logits[t] = _LOGITS[rng.permutation(512 if num_experts <= 512 else 1024)[:num_experts]]
        todo = todo[route(logits[todo], **options).margin < clear]
        if todo.size == 0:
            return logits.astype(dtype), options
    raise AssertionError(f"{todo.size} tokens stay unclear: {options}")


def case(method: str, top_k: int, **options: Any) -> dict[str, Any]:
    """The options of one call."""
    return {"method": method, "top_k": top_k, **options}


# Every rule with each way to divide; for [T, 16] in most tests.
VARIANTS = {
    "softmax": case("softmax", 4),
    "softmax_sum": case("softmax", 4, norm_topk_prob=True, epsilon=0.25, expert_scale=True),
    "renormalize": case("renormalize", 4, scale=0.5),
    "renormalize_naive": case("renormalize_naive", 4),
    "deepseek_v3": case("deepseek_v3", 4, bias=True, scale=2.5, num_shared_experts=2),
    "deepseek_v3_groups": case("deepseek_v3", 4, bias=True, num_groups=4, top_groups=2),
    "deepseek_v3_raw": case("deepseek_v3", 4, norm_topk_prob=False),
    "deepseek_v2": case("deepseek_v2", 4, num_groups=4, top_groups=2, scale=16.0),
    "deepseek_v2_sum": case("deepseek_v2", 4, norm_topk_prob=True),
    "llama4": case("llama4", 1),
    "topk": case("topk", 4),
    "sigmoid_renorm": case("sigmoid_renorm", 4),
    "sigmoid_renorm_max": case("sigmoid_renorm", 4, epsilon=8.0),
    "sigmoid_renorm_raw": case("sigmoid_renorm", 4, norm_topk_prob=False),
    "minimax2": case("minimax2", 4, bias=True, scale=3.0),
    "sigmoid": case("sigmoid", 4, expert_scale=True),
    "topk_sigmoid": case("topk_sigmoid", 4),
    "sqrtsoftplus": case("sqrtsoftplus", 4, bias=True, scale=1.5),
    "sqrtsoftplus_raw": case("sqrtsoftplus", 4, norm_topk_prob=False),
}
