"""The truth of recurrent states, window by window. `kernels/states.py` says what the cache has of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from personae.kernels.states import StatePlan


def window_convolution(
    x: Tensor, cache: Tensor, plan: StatePlan, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """silu(bias + sum_j weight[:, K - 1 - j] x_(t - j)) of the first C numbers of all tokens of the plan's
    windows, and the other numbers as they are.

    x: [T, C + N], of the step's tokens; cache: [num_pages, 1, tokens, C + N], of earlier ones; weight: [C, K]
    with K - 1 <= the tokens P of a window, bias: [C], float32 -> [W, P, C] and [W, P, N], both float32, 0
    where no token is.
    """
    width, length = weight.shape
    count, size = plan.valid.shape
    if length - 1 > size:
        raise ValueError(f"a convolution over {length} tokens needs windows of {length - 1}")
    kept = cache[:, 0].view(len(cache), -1, size, cache.shape[3])
    found = torch.zeros(count * size, x.shape[1], device=x.device)
    found[plan.out] = x.float()
    found, first = found.view(count, size, -1), plan.rounds[0]
    earlier = kept[plan.pages[first], plan.slots[first]].float()
    found[first] = torch.where(plan.earlier.unsqueeze(2), earlier, found[first])
    tail = found[:, size - length + 1 :, :width].roll(1, 0)
    tail[first] = (
        kept[plan.pages_before[first], plan.slots_before[first], size - length + 1 :, :width]
        .float()
        .masked_fill_(plan.begins[first].view(-1, 1, 1), 0.0)
    )
    inputs = torch.cat((tail, found[..., :width]), 1)
    total = torch.zeros_like(found[..., :width])
    if bias is not None:
        total += bias
    for j, tap in enumerate(weight.T.contiguous()):
        total.addcmul_(inputs[:, j : j + size], tap)
    return F.silu(total), found[..., width:]


def _decays(log: Tensor) -> tuple[Tensor, Tensor]:
    """From logarithms of decays [..., P]: their sums up to each token, and [..., i, j] the decay from token j
    to token i >= j, 0 for i < j."""
    total = log.cumsum(-1)
    pairs = total.unsqueeze(-1) - total.unsqueeze(-2)
    later = torch.ones(pairs.shape[-2:], dtype=torch.bool, device=log.device).triu(1)
    return total, pairs.masked_fill(later, -torch.inf).exp()


def _by_windows(
    states: Tensor,
    plan: StatePlan,
    queries: Tensor,
    local: Tensor,
    after: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """o = query S + local of each token, S the state before its window. after(windows' numbers, states before
    them) -> states after them.

    queries: [W, heads, P, K], local: [W, heads, P, D] -> those of the step's tokens, [T, heads, D].
    """
    own = plan.rounds[0]
    before = states[plan.pages[own], plan.slots[own]]
    before.masked_fill_(plan.begins[own].view(-1, 1, 1, 1), 0.0)
    alone = len(plan.out) == len(own)  # one token of each row
    if alone:
        queries, local = (
            part.transpose(1, 2).flatten(0, 1)[plan.out].unsqueeze(2) for part in (queries, local)
        )
    else:
        local[own] += queries[own] @ before
    for further, onward in zip(plan.rounds[1:], plan.onward, strict=True):
        moved = after(own[onward], before[onward])
        states[plan.pages[further], plan.slots[further]] = moved
        if alone:  # a row has two windows at most
            before[onward] = moved
        else:
            local[further] += queries[further] @ moved
            own, before = further, moved
    if alone:
        return (queries @ before + local).squeeze(2)
    return local.transpose(1, 2).flatten(0, 1)[plan.out]


def gated_delta(
    x: Tensor,
    cache: Tensor,
    states: Tensor,
    plan: StatePlan,
    weight: Tensor,
    decay: Tensor,
    dt_bias: Tensor,
    key_heads: int,
) -> Tensor:
    """The gated delta rule (https://arxiv.org/abs/2412.06464): S_t = a_t S_(t-1) + k_t (b_t (v_t - a_t
    S_(t-1)^T k_t))^T, o_t = S_t^T q_t.

    The numbers of a token in x, and in the cache, are those of q, k and v before a convolution with `weight`
    and silu, then one for b and one for a of each value head: b = sigmoid, a = exp(-exp(decay) softplus(. +
    dt_bias)). q and k are divided by their lengths, q also by sqrt(DK). Value heads share key heads,
    neighbours first.

    states: [num_pages, windows, value_heads, DK, DV] float32, before each window's first token; those of
    windows that a row goes on to are written. weight: [C, K], decay, dt_bias: [value_heads], float32 -> [T,
    value_heads, DV] float32. Computed in float32, by windows (https://arxiv.org/abs/2406.06484).
    """
    heads, key_dim, value_dim = states.shape[2:]
    mixed, gates = window_convolution(x, cache, plan, weight, None)
    q, k, v = torch.split(mixed, [key_heads * key_dim, key_heads * key_dim, heads * value_dim], -1)
    q, k = (_spread(part, key_heads, heads) for part in (q, k))  # [W, heads, P, DK]
    q, k = (part * torch.rsqrt(part.square().sum(-1, keepdim=True) + 1e-6) for part in (q, k))
    q = q * key_dim**-0.5
    v = _spread(v, heads, heads)
    b, a = (part.transpose(1, 2) for part in gates.chunk(2, -1))  # [W, heads, P]
    there = plan.valid.unsqueeze(1)
    beta = b.sigmoid() * there
    log = -decay.exp().unsqueeze(1) * F.softplus(a + dt_bias.unsqueeze(1)) * there
    total, pairs = _decays(log)
    scaled = k * beta.unsqueeze(-1)
    system = (scaled @ k.transpose(-1, -2)) * pairs
    both = torch.cat((v * beta.unsqueeze(-1), scaled * total.exp().unsqueeze(-1)), -1)
    unit = torch.eye(system.shape[-1], device=x.device).expand_as(system)
    inverse = torch.linalg.solve_triangular(system, unit, upper=False, unitriangular=True)
    values, reads = torch.split(inverse @ both, [value_dim, key_dim], -1)
    weights = (q @ k.transpose(-1, -2)) * pairs
    queries = q * total.exp().unsqueeze(-1) - weights @ reads
    k = k * (total[..., -1:] - total).exp().unsqueeze(-1)
    last = total[..., -1].exp()[..., None, None]

    def after(own: Tensor, before: Tensor) -> Tensor:
        new = values[own] - reads[own] @ before
        return (k[own].transpose(-1, -2) @ new).addcmul_(before, last[own])

    return _by_windows(states, plan, queries, weights @ values, after)


def selective_state(
    tokens: Tensor,
    cache: Tensor,
    states: Tensor,
    plan: StatePlan,
    weight: Tensor,
    bias: Tensor | None,
    decay: Tensor,
    dt_bias: Tensor,
    skip: Tensor,
    groups: int,
    limits: tuple[float, float],
) -> Tensor:
    """Mamba-2's state space (https://arxiv.org/abs/2405.21060): S_t = exp(-d_t exp(decay)) S_(t-1) + d_t b_t
    x_t^T, y_t = S_t^T c_t + skip x_t.

    The numbers of a token in `tokens`, and in the cache, are those of x, b and c before a convolution with
    `weight` and silu, then one for d of each head: d = softplus(. + dt_bias), within `limits`. Heads share
    the b and c of their group, neighbours first.

    states: [num_pages, windows, heads, N, D] float32, before each window's first token; those of windows
    that a row goes on to are written. weight: [C, K], bias: [C], decay, dt_bias, skip: [heads], float32 ->
    [T, heads, D] float32.
    """
    heads, size, dim = states.shape[2:]
    mixed, steps = window_convolution(tokens, cache, plan, weight, bias)
    x, b, c = torch.split(mixed, [heads * dim, groups * size, groups * size], -1)
    x = _spread(x, heads, heads)
    b, c = (_spread(part, groups, heads) for part in (b, c))  # [W, heads, P, N]
    dt = F.softplus(steps.transpose(1, 2) + dt_bias.unsqueeze(1)).clamp(*limits) * plan.valid.unsqueeze(1)
    total, pairs = _decays(-decay.exp().unsqueeze(1) * dt)
    moved = x * dt.unsqueeze(-1)
    inner = ((c @ b.transpose(-1, -2)) * pairs) @ moved + skip.view(-1, 1, 1) * x
    c = c * total.exp().unsqueeze(-1)
    b = b * (total[..., -1:] - total).exp().unsqueeze(-1)
    last = total[..., -1].exp()[..., None, None]

    def after(own: Tensor, before: Tensor) -> Tensor:
        return (b[own].transpose(-1, -2) @ moved[own]).addcmul_(before, last[own])

    return _by_windows(states, plan, c, inner, after)


def _spread(x: Tensor, groups: int, heads: int) -> Tensor:
    """[W, P, groups * D] -> [W, heads, P, D]: each head has its group's numbers."""
    apart = x.view(*x.shape[:2], groups, -1).transpose(1, 2)
    return apart if heads == groups else apart.repeat_interleave(heads // groups, dim=1)
