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
    count, tokens = plan.valid.shape
    if length - 1 > plan.size:
        raise ValueError(f"a convolution over {length} tokens needs windows of {length - 1}")
    kept = cache[:, 0].view(len(cache), -1, plan.size, cache.shape[3])
    found = torch.zeros(count * tokens, x.shape[1], device=x.device)
    found[plan.out] = x.float()
    found, first = found.view(count, tokens, -1), plan.rounds[0]
    earlier = kept[plan.pages[first], plan.slots[first], :tokens].float()
    found[first] = torch.where(plan.earlier.unsqueeze(2), earlier, found[first])
    before = (
        kept[plan.pages_before[first], plan.slots_before[first], plan.size - length + 1 :, :width]
        .float()
        .masked_fill_(plan.begins[first].view(-1, 1, 1), 0.0)
    )
    if count == len(first):
        tail = before
    else:  # a window before another one is full
        tail = found[:, plan.size - length + 1 :, :width].roll(1, 0)
        tail[first] = before
    inputs = torch.cat((tail, found[..., :width]), 1)
    total = torch.zeros_like(found[..., :width])
    if bias is not None:
        total += bias
    for j, tap in enumerate(weight.T.contiguous()):
        total.addcmul_(inputs[:, j : j + tokens], tap)
    return F.silu(total), found[..., width:]


def _decays(log: Tensor) -> tuple[Tensor, Tensor]:
    """From logarithms of decays [..., P]: their sums up to each token, and [..., i, j] the decay from token j
    to token i >= j, 0 for i < j."""
    total = log.cumsum(-1)
    pairs = total.unsqueeze(-1) - total.unsqueeze(-2)
    later = torch.ones(pairs.shape[-2:], dtype=torch.bool, device=log.device).triu(1)
    return total, pairs.masked_fill(later, -torch.inf).exp()


def _of_tokens(x: Tensor, plan: StatePlan) -> Tensor:
    """[W, heads, P, ...] -> the same; or if each row has one token, its part: [rows, heads, 1, ...]."""
    if not plan.alone:
        return x
    size = plan.valid.shape[1]
    return x[plan.out // size, :, plan.out % size].unsqueeze(2)


def _of_windows(x: Tensor, plan: StatePlan) -> Tensor:
    """[W, ...] -> the same; or if each row has one token, the window of each: [rows, ...]."""
    if not plan.alone or len(x) == len(plan.out):
        return x
    return x[plan.out // plan.valid.shape[1]]


def _by_windows(
    states: Tensor,
    plan: StatePlan,
    queries: Tensor,
    local: Tensor,
    after: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """o = query S + local of each token, S the state before its window. after(windows' numbers, states before
    them) -> states after them.

    queries: [W, heads, P, K], local: [W, heads, P, D], or both as `_of_tokens` has them -> those of the
    step's tokens, [T, heads, D].
    """
    own = plan.rounds[0]
    if plan.alone and not plan.onward and states.device.type == "cpu":  # without a copy of the states
        places = zip(queries, plan.pages.tolist(), plan.slots.tolist(), strict=True)
        read = torch.stack([query @ states[page, slot] for query, page, slot in places])
        return read.masked_fill_(plan.begins.view(-1, 1, 1, 1), 0.0).add_(local).squeeze(2)
    before = states[plan.pages[own], plan.slots[own]]
    before.masked_fill_(plan.begins[own].view(-1, 1, 1, 1), 0.0)
    if not plan.alone:
        local[own] += queries[own] @ before
    for further, onward in zip(plan.rounds[1:], plan.onward, strict=True):
        moved = after(own[onward], before[onward])
        states[plan.pages[further], plan.slots[further]] = moved
        if plan.alone:  # a row has two windows at most
            before[onward] = moved
        else:
            local[further] += queries[further] @ moved
            own, before = further, moved
    if plan.alone:
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
    q, k = (_apart(part, key_heads) for part in (q, k))  # [W, key_heads, P, DK]
    q, v = _of_tokens(q, plan), _apart(v, heads)
    q, k = (part * torch.rsqrt(part.square().sum(-1, keepdim=True) + 1e-6) for part in (q, k))
    b, a = (part.transpose(1, 2) for part in gates.chunk(2, -1))  # [W, heads, P]
    there = plan.valid.unsqueeze(1)
    beta = b.sigmoid() * there
    log = -decay.exp().unsqueeze(1) * F.softplus(a + dt_bias.unsqueeze(1)) * there
    total, pairs = _decays(log)
    grown = total.exp().unsqueeze(-1)
    # Key heads are multiplied before value heads share them; beta and decays scale the small matrices.
    keys = _shared(k @ k.transpose(-1, -2), heads)
    scores = _shared(q @ _of_windows(k, plan).transpose(-1, -2), heads) * key_dim**-0.5
    q, k = _shared(q, heads), _shared(k, heads)
    unit = torch.eye(keys.shape[-1], device=x.device).expand_as(keys)
    system = keys * pairs * beta.unsqueeze(-1)
    inverse: Tensor = torch.linalg.solve_triangular(system, unit, upper=False, unitriangular=True)
    inverse = inverse * beta.unsqueeze(-2)
    weights = (scores * _of_tokens(pairs, plan)) @ _of_windows(inverse, plan)
    own_grown = _of_windows(grown, plan)
    queries = q * (_of_tokens(grown, plan) * key_dim**-0.5)
    queries -= (weights * own_grown.transpose(-1, -2)) @ _of_windows(k, plan)
    fading = (total[..., -1:] - total).exp().unsqueeze(-1)
    last = total[..., -1].exp()[..., None, None]

    def after(own: Tensor, before: Tensor) -> Tensor:
        keys = k[own]
        new = inverse[own] @ (v[own] - grown[own] * (keys @ before))
        return ((keys * fading[own]).transpose(-1, -2) @ new).addcmul_(before, last[own])

    return _by_windows(states, plan, queries, weights @ _of_windows(v, plan), after)


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
    x = _apart(x, heads)
    b, c = (_apart(part, groups) for part in (b, c))  # [W, groups, P, N]
    c = _of_tokens(c, plan)
    dt = F.softplus(steps.transpose(1, 2) + dt_bias.unsqueeze(1)).clamp(*limits) * plan.valid.unsqueeze(1)
    total, pairs = _decays(-decay.exp().unsqueeze(1) * dt)
    scores = _shared(c @ _of_windows(b, plan).transpose(-1, -2), heads)
    weights = scores * _of_tokens(pairs, plan) * _of_windows(dt, plan).unsqueeze(-2)
    inner = weights @ _of_windows(x, plan) + skip.view(-1, 1, 1) * _of_tokens(x, plan)
    queries = _shared(c, heads) * _of_tokens(total.exp().unsqueeze(-1), plan)
    fading = (dt * (total[..., -1:] - total).exp()).unsqueeze(-1)
    last = total[..., -1].exp()[..., None, None]

    def after(own: Tensor, before: Tensor) -> Tensor:
        added = (_shared(b[own], heads) * fading[own]).transpose(-1, -2) @ x[own]
        return added.addcmul_(before, last[own])

    return _by_windows(states, plan, queries, inner, after)


def _apart(x: Tensor, heads: int) -> Tensor:
    """[W, P, heads * D] -> [W, heads, P, D]."""
    return x.view(*x.shape[:2], heads, -1).transpose(1, 2)


def _shared(x: Tensor, heads: int) -> Tensor:
    """[W, groups, ...] -> [W, heads, ...]: each head has what is its group's."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)
