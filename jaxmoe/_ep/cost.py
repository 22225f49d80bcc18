"""The cost model of dispatch="auto": time on the links from shapes alone."""

import dataclasses
import math

from jaxmoe._jax import checks as _checks

OP = "expert_parallel.choose_dispatch"
DISPATCHES = ("all_gather", "all_to_all", "ragged", "direct")
TOKENS = ("sharded", "replicated")
# Rows up to which those of an exchange through peer memory carry their own flags, as
# csrc/peers/exchange.cu has it.
_FEW_PIECES, _PIECE_BYTES = 2048, 4096
# Of four H200s: what copies between all of them reach, what rows do that a product stores, what
# reading weights does, and products.
_COPIED_BYTES_S, _STORED_BYTES_S, _MEMORY_BYTES_S = 300e9, 250e9, 4.8e12
_FLOPS, _FP8_FLOPS = 650e12, 1000e12


@dataclasses.dataclass(frozen=True)
class Links:
    """Speed of a machine's collectives; the defaults were measured among 4 H200 (NVLink).

    A collective takes latency + bytes that a device sends / rate. Those of direct were measured on
    two H100s, by how much longer a layer of qwen3-30b-a3b's sizes takes than one that sends
    nothing: 200 us with 4096 tokens on each, of which 100 are its bytes at 320 GB/s, and 17 to 26
    us with 8 and 64, where all_gather takes 30 to 40.

    Attributes:
      gather_us, gather_gbps: all_gather and psum_scatter together, microseconds and GB/s.
      all_to_all_us, all_to_all_gbps: one dense all_to_all.
      ragged_us, ragged_gbps: one ragged_all_to_all.
      direct_us, direct_gbps: a dispatch and a combine through peer memory together.
      direct_few_us: both of few tokens, in place of direct_us: where rows of all devices are up to
        2048 pieces of 4 KiB, which carry their own flags.
    """

    gather_us: float = 115.0
    gather_gbps: float = 320.0
    all_to_all_us: float = 60.0
    all_to_all_gbps: float = 240.0
    ragged_us: float = 130.0
    ragged_gbps: float = 8.0
    direct_us: float = 100.0
    direct_gbps: float = 320.0
    direct_few_us: float = 25.0


@dataclasses.dataclass(frozen=True)
class DispatchChoice:
    """The choice of dispatch="auto", and its reason.

    Attributes:
      name: "all_gather", "all_to_all" or "direct".
      reason: one sentence.
      microseconds: the estimate for each way that was compared; "ragged" is, but never taken,
        "direct" if it can be.
      capacity: tokens that a device can send to each other one.
      sent_bytes: what a device sends by each way, there and back; of "ragged" and "direct" what
        even choices send, of "direct" where sums travel.
    """

    name: str
    reason: str
    microseconds: dict[str, float]
    capacity: int
    sent_bytes: dict[str, int]


def share_per_device(num_devices: int, top_k: int) -> float:
    """Fraction of tokens with a choice on a given device, if choices are independent and even."""
    return 1.0 - (1.0 - 1.0 / num_devices) ** top_k


def capacity_of(
    op: str, capacity_factor: float | None, num_tokens: int, num_devices: int, top_k: int
) -> int:
    """Number of tokens that a device can send to another one; all of them without a factor."""
    if capacity_factor is None:
        return num_tokens
    if type(capacity_factor) not in (int, float):
        rule = "capacity_factor must be a Python float, or None for room for every token"
        raise TypeError(_checks.message(op, rule, capacity_factor=capacity_factor))
    if not (capacity_factor > 0 and math.isfinite(capacity_factor)):
        rule = (
            f"capacity_factor={capacity_factor} must be above 0 and finite, "
            "or None for room for every token"
        )
        raise ValueError(_checks.message(op, rule))
    wanted = capacity_factor * num_tokens * share_per_device(num_devices, top_k)
    return max(min(1, num_tokens), math.ceil(min(num_tokens, wanted)))  # which may be infinite


def _row_bytes(hidden: int, top_k: int, itemsize: int, dispatch_itemsize: int) -> tuple[int, int]:
    """To the experts: the token, K ids and K weights. Back: a sum, or a row of a choice."""
    return hidden * dispatch_itemsize + 8 * top_k, hidden * itemsize


def direct_bytes(
    num_tokens: int,
    hidden: int,
    top_k: int,
    num_devices: int,
    itemsize: int,
    dispatch_itemsize: int,
) -> dict[str, int]:
    """Bytes that a device sends by "direct", there and back, of even choices.

    Returns:
      "sums": tokens go where they have a choice, and a sum comes back from there; "rows": a row of
      each choice comes back; "all": every token goes to every device, and a sum comes back.
    """
    there, back = _row_bytes(hidden, top_k, itemsize, dispatch_itemsize)
    p, others = share_per_device(num_devices, top_k), (num_devices - 1) * num_tokens
    return {
        "sums": round(others * p * (there + back)),
        "rows": round(others * (p * there + top_k / num_devices * back)),
        "all": others * (there + back),
    }


def choose_dispatch(
    num_tokens: int,
    hidden: int,
    top_k: int,
    num_devices: int,
    *,
    capacity_factor: float | None = None,
    tokens: str = "sharded",
    itemsize: int = 2,
    dispatch_itemsize: int | None = None,
    links: Links | None = None,
    direct: bool = False,
) -> DispatchChoice:
    """Returns the dispatch that `moe_mlp` takes for dispatch="auto". A pure function.

    With p = 1 - (1 - 1/n)^K, the part of the tokens that has a choice on a given device, and room
    for C = min(T, ceil(capacity_factor * p * T)) tokens from each device to each other one (T
    without a factor), a device sends

      all_gather: (n - 1) * T tokens and as many sums;  all_to_all: (n - 1) * C of both

    and the shortest of latency + bytes / rate is taken, the first of equal ones. Without a
    capacity factor they send the same, and all_gather is faster. With one, all_to_all pays where p
    is well below 1: K is below the number of devices. "ragged" sends least, (n - 1) * p * T, but
    XLA's ragged_all_to_all is so far from the rate of the links that it is never taken.

    Args:
      num_tokens: T, tokens of one device.
      hidden: H.
      top_k: K.
      num_devices: n, size of the expert axis.
      capacity_factor: as `moe_mlp` takes it.
      tokens: "sharded" or "replicated", as `moe_mlp` takes it.
      itemsize: bytes of an element of the result.
      dispatch_itemsize: bytes of an element of a token on its way to the experts, 1 for FP8; by
        default `itemsize`.
      links: of your machine, from your own measurement; by default those of 4 H200 in one host.
      direct: whether there is peer memory for this, see `open_peer_memory`. It has room for every
        token. Its time is that of the (n - 1) * p * T tokens and as many sums, at a rate and with a
        latency that were measured of whole layers: whether sums travel, or K / n rows for each
        token while the product that stores them goes on, or everything beside the products, hangs
        on more than these sizes; `jaxmoe.explain` says which, and the bytes of that.

    Returns:
      `DispatchChoice`.

    Raises:
      TypeError, ValueError: a size that is not a positive int (T may be 0), an unknown name, or a
        capacity factor that is not above 0.

    Example:
      >>> from jaxmoe import expert_parallel
      >>> choice = expert_parallel.choose_dispatch(4096, 7168, 8, 4)
      >>> choice.name, choice.capacity
      ('all_gather', 4096)
      >>> expert_parallel.choose_dispatch(4096, 7168, 2, 16, capacity_factor=1.25).name
      'all_to_all'
    """
    low = {"num_tokens": 0, "hidden": 1, "top_k": 1, "num_devices": 1, "itemsize": 1}
    given = (num_tokens, hidden, top_k, num_devices, itemsize)
    for (name, least), value in zip(low.items(), given, strict=True):
        _checks.check_int(OP, name, value, least)
    if dispatch_itemsize is None:
        dispatch_itemsize = itemsize
    _checks.check_int(OP, "dispatch_itemsize", dispatch_itemsize, 1)
    _checks.check_choice(OP, "tokens", tokens, TOKENS)
    _checks.check_type(OP, "links", links, Links | None, "an expert_parallel.Links")
    _checks.check_type(OP, "direct", direct, bool, "True or False")
    capacity = capacity_of(OP, capacity_factor, num_tokens, num_devices, top_k)
    if tokens == "replicated":
        reason = "tokens='replicated': every device has every token, nothing is dispatched"
        return DispatchChoice("all_gather", reason, {}, num_tokens, {})
    links = Links() if links is None else links
    expected = min(float(capacity), num_tokens * share_per_device(num_devices, top_k))
    there, back = _row_bytes(hidden, top_k, itemsize, dispatch_itemsize)
    tokens_of = {"all_gather": num_tokens, "all_to_all": capacity, "ragged": expected}
    sent = {
        way: round((num_devices - 1) * (there + back) * count) for way, count in tokens_of.items()
    }
    sizes = num_tokens, hidden, top_k, num_devices
    sent["direct"] = direct_bytes(*sizes, itemsize, dispatch_itemsize)["sums"]
    us = {
        "all_gather": links.gather_us + 1e-3 * sent["all_gather"] / links.gather_gbps,
        "all_to_all": 2 * links.all_to_all_us + 1e-3 * sent["all_to_all"] / links.all_to_all_gbps,
        "ragged": 2 * links.ragged_us + 1e-3 * sent["ragged"] / links.ragged_gbps,
    }
    if direct:
        pieces = math.ceil(hidden * max(itemsize, dispatch_itemsize) / _PIECE_BYTES)
        few = num_tokens * num_devices * pieces <= _FEW_PIECES
        latency = links.direct_few_us if few else links.direct_us
        us["direct"] = latency + 1e-3 * sent["direct"] / links.direct_gbps
    name = min((way for way in us if way != "ragged"), key=us.__getitem__)
    room = f"room for {capacity} of {num_tokens} tokens from each to each of {num_devices} devices"
    times = ", ".join(f"{way} about {t:.0f} us" for way, t in us.items() if way != "ragged")
    reason = f"{room}: {times}"
    return DispatchChoice(name, reason, us, capacity, sent)


def beside_pays(
    num_devices: int,
    num_tokens: int,
    top_k: int,
    hidden: int,
    intermediate: int,
    *,
    token_itemsize: int,
    itemsize: int,
    gate_up_bytes: float,
    down_bytes: float,
    fp8: bool,
    gathers: bool,
) -> bool:
    """Whether an exchange beside products is faster than one around them, see `_ep/beside.py`.

    Around them, rows of choices are stored with their tokens' devices while the second product is
    computed; that hides them where it takes as long. So it is asked first whether rows take twice
    as long on the links as the product does, which I decides: that is so at 768, and not at 2048.
    Beside them four fifths of the time of tokens and sums on the links are hidden; weights are read
    more than once (`_reads`), of which a fifth is hidden; and launches take the rest, twice as much
    where a product cannot wait for rows that it fetches.

    Fitted to layers on four H200s, microseconds a layer around and beside: qwen3-30b-a3b in bf16
    with 2048 tokens 530 and 541, 3072 731 and 666, 4096 950 and 772, 8192 1762 and 1390, in
    fp8_block with 2048 455 and 530, 4096 788 and 717, 8192 1455 and 1190, in int4_g128 with 4096
    1010 and 854. Not so deepseek-v3 (I = 2048) in bf16 with 8192, 10950 and 12170, in int4_g128
    11250 and 12080, in fp8_block with 16384 14450 and 15700; gpt-oss-120b (I = 2880) in mxfp4 with
    8192 3280 and 3490. Since products take some devices' tokens together, four H100s: fp8_block
    with 2048 447 and 449, 3072 622 and 569.

    Args:
      num_devices, num_tokens, top_k, hidden, intermediate: n, T of a device, K, H, I.
      token_itemsize: bytes of an element of a token on its way.
      itemsize: of a row or a sum.
      gate_up_bytes, down_bytes: of the weights of a device's experts.
      fp8: whether products multiply bytes.
      gathers: whether the first product fetches rows of tokens.
    """
    stored = top_k * num_tokens * hidden
    stored_s = (1 - 1 / num_devices) * stored * itemsize / _STORED_BYTES_S
    product_s = 2.0 * stored * intermediate / (_FP8_FLOPS if fp8 else _FLOPS)
    if stored_s < 2 * product_s:
        return False
    sent = (num_devices - 1) * num_tokens * hidden * (token_itemsize + itemsize)
    links_us = 1e6 * sent / _COPIED_BYTES_S
    gate_up, down = _reads(num_devices, gathers)
    again = (gate_up - 1) * gate_up_bytes + (down - 1) * down_bytes
    weights_us = 1e6 * again / _MEMORY_BYTES_S
    return 0.8 * (links_us - weights_us) > (50.0 if gathers else 100.0)


def ordered_pays(
    num_devices: int, num_tokens: int, top_k: int, hidden: int, *, token_itemsize: int
) -> bool:
    """Whether tokens in the order of experts are faster than all at once, see `_ep/ordered.py`.

    What is hidden is the time of tokens on the links; multiprocessors that push them and launches
    cost some of that. Fitted to layers on four H200s, microseconds a layer without and with:
    qwen3-30b-a3b with 1024 tokens 302 and 319, 2048 498 and 463, 4096 914 and 823, deepseek-v3
    with 4096 5738 and 5495.

    Args:
      num_devices, num_tokens, top_k, hidden: n, T of a device, K, H.
      token_itemsize: bytes of an element of a token on its way.
    """
    there = num_tokens * share_per_device(num_devices, top_k) * hidden * token_itemsize
    return 1e6 * (num_devices - 1) * there / _COPIED_BYTES_S > 70.0


def _reads(num_devices: int, gathers: bool) -> tuple[int, int]:
    """How often both products read their weights, as csrc/gemm/sources.cc has it."""
    waiting = num_devices - (num_devices >= 4)
    gate_up = waiting if gathers else 1 + math.ceil((num_devices - 1) / 4)
    return gate_up, num_devices - max(0, (num_devices - 2) // 2)
