"""The truth: each operator in a few lines of torch, with its equation. Backends are tested against it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from personae.kernels.counter_rng import uniforms
from personae.kernels.masks import Scratch, apply_bitmask
from personae.kernels.reference_sampler import draw, greatest, thresholds
from personae.kernels.upload import uploads

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from personae.kernels.attention import AttentionBatch, ScoreChange
    from personae.kernels.moe import Routing
    from personae.kernels.sampling import SamplingRows
    from personae.kernels.sgmv import RankTable, WeightPool, WorkList

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0
QUERY_BLOCK = 256  # bounds the score matrix of a long prefill chunk


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """y = x / sqrt(mean(x^2) + eps) * weight, over the last dimension (https://arxiv.org/abs/1910.07467).

    x: [..., N] (may be strided), weight: [N], usually float32 -> [..., N], contiguous, of x's dtype. Computed
    in float32, rounded once.
    """
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (scaled * weight.float()).to(x.dtype)


def round_inputs(x: Tensor) -> Tensor:
    """What products with weights in few bits multiply on a CPU: round(127 x / m) m / 127, m the largest size
    of 32 inputs. Inputs are 0 where m is below 2^-100.

    x: [..., N], rounded to bfloat16 before -> [..., N] float32.
    """
    blocks = F.pad(x.float(), (0, -x.shape[-1] % 32)).view(*x.shape[:-1], -1, 32)
    most = blocks.abs().amax(-1, keepdim=True)
    most = torch.where(most < 2.0**-100, 0.0, most)
    inverse = torch.where(most == 0, 0.0, most.new_tensor(127) / most)  # 127 / most would round twice
    return ((blocks * inverse).round() * (most / 127)).flatten(-2)[..., : x.shape[-1]]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """s = residual + x, rounded to their dtype; y = rms_norm(s, weight, eps) -> (y, s).

    x, residual: [T, N]. Neither is changed.
    """
    total = residual + x
    return rms_norm(total, weight, eps), total


def rotary(q: Tensor, k: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> None:
    """(x1, x2) <- (x1 cos - x2 sin, x2 cos + x1 sin), where x1 and x2 are the two halves of each head, in
    place.

    q: [T, heads, D], k: [T, kv_heads, D], both may be strided views; positions: [T] int64; cos, sin:
    [max_position, D / 2] float32 tables indexed by position (https://arxiv.org/abs/2104.09864, in the
    half-split order of Hugging Face checkpoints). Computed in float32, rounded once.
    """
    c, s = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)
    for x in (q, k):
        first, second = x.float().chunk(2, dim=-1)
        x.copy_(torch.cat((first * c - second * s, second * c + first * s), dim=-1))


def silu_and_mul(x: Tensor) -> Tensor:
    """y = silu(gate) * up, silu(z) = z / (1 + exp(-z)); x: [T, 2I] = (gate, up) -> [T, I].

    Computed in float32, rounded once.
    """
    gate, up = x.chunk(2, dim=-1)
    return (F.silu(gate.float()) * up.float()).to(x.dtype)


def gelu_and_mul(x: Tensor) -> Tensor:
    """y = gelu(gate) * up, gelu(z) = z / 2 (1 + tanh(sqrt(2 / pi) (z + 0.044715 z^3))); x: [T, 2I] -> [T, I].

    The approximation of https://arxiv.org/abs/1606.08415. Computed in float32, rounded once.
    """
    gate, up = x.chunk(2, dim=-1)
    return (F.gelu(gate.float(), approximate="tanh") * up.float()).to(x.dtype)


def swiglu_clamped(x: Tensor) -> Tensor:
    """y = g sigmoid(1.702 g) (u + 1) with g = min(gate, 7), u = up within -7 and 7; x: [T, 2I] = (gate, up)
    -> [T, I]. As gpt-oss has it. Computed in float32, rounded once.
    """
    gate, up = x.float().chunk(2, dim=-1)
    gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
    return (gate * torch.sigmoid(SWIGLU_ALPHA * gate) * (up + 1)).to(x.dtype)


def route_scored(logits: Tensor, bias: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
    """Experts by score s = softmax(logits) or sigmoid(logits); the top_k largest of s + bias are chosen.

    With groups, only experts of the best `kept` groups can be. A group's value is its largest s + bias, or
    with sigmoid the sum of its two largest. The weights are the s of the chosen, divided by their sum with
    `renormalize`, times `scale`.

    logits: [T, experts]; bias: [experts] float32 -> (weights [T, top_k] float32, experts [T, top_k] int64).
    """
    wide = logits.float()
    scores = wide.sigmoid() if routing.score == "sigmoid" else wide.softmax(-1)
    ranked = scores if bias is None else scores + bias
    if routing.groups > 1:
        grouped = ranked.view(len(ranked), routing.groups, -1)
        best = grouped.topk(2, -1).values.sum(-1) if routing.score == "sigmoid" else grouped.amax(-1)
        kept = torch.zeros_like(best).scatter_(-1, best.topk(routing.kept, -1).indices, 1.0).bool()
        ranked = grouped.masked_fill(~kept.unsqueeze(-1), -torch.inf).flatten(-2)
    experts = ranked.topk(routing.top_k, -1).indices
    weights = scores.gather(-1, experts)
    if routing.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + routing.epsilon).clamp(min=routing.least)
    return weights * routing.scale, experts


def route(logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """The top_k largest of p = softmax(logits); with `renormalize`, divided by their sum.

    logits: [T, experts] -> (weights [T, top_k] float32, the largest first; experts [T, top_k] int64).
    """
    weights, experts = torch.topk(logits.float().softmax(-1), top_k, dim=-1)
    return weights / weights.sum(-1, keepdim=True) if renormalize else weights, experts


def expert_linear(x: Tensor, weight: Tensor, starts: Tensor) -> Tensor:
    """y_i = x_i W_e^T for starts[e] <= i < starts[e + 1]: the rows are grouped by expert.

    x: [N, inputs], weight: [experts, outputs, inputs], starts: [experts + 1] int32, from 0 to N -> [N,
    outputs]. Waits for the device.
    """
    y = torch.empty(x.shape[0], weight.shape[1], dtype=x.dtype, device=x.device)
    for expert, (start, stop) in enumerate(pairwise(starts.tolist())):
        if start < stop:
            y[start:stop] = F.linear(x[start:stop], weight[expert])
    return y


def combine(outputs: Tensor, weights: Tensor, order: Tensor) -> Tensor:
    """y_t = sum_j weights[t, j] o_tj, in the order of j; computed in float32, rounded once.

    outputs: [T * k, N], where row i is o_tj with t k + j = order[i]. weights: [T, k] float32. order: [T * k]
    int64.
    """
    placed = torch.empty_like(outputs).index_copy_(0, order, outputs).view(*weights.shape, -1)
    total = placed[:, 0].float() * weights[:, :1]
    for j in range(1, weights.shape[1]):
        total += placed[:, j].float() * weights[:, j : j + 1]
    return total.to(outputs.dtype)


def append_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, write_index: Tensor) -> None:
    """cache[page, :, offset] = k[t] where write_index[t] = page * page_size + offset; the same for v.

    k, v: [T, kv_heads, D] (may be strided); caches: [num_pages, kv_heads, page_size, D], of k's dtype or FP8
    (E4M3, https://arxiv.org/abs/2209.05433), or int8 with D + 2 instead of D; write_index: [T] int64. For
    FP8, values are clamped to its largest value and rounded. For int8, see `quantize_kv`.
    """
    append_latent(k, k_cache, write_index)
    append_latent(v, v_cache, write_index)


def append_latent(x: Tensor, cache: Tensor, write_index: Tensor) -> None:
    """`append_kv` of one tensor. x: [T, heads, D], cache: [num_pages, heads, page_size, D]."""
    page_size = cache.shape[2]
    page, offset = write_index // page_size, write_index % page_size
    if cache.dtype is FP8:
        stored = x.float().clamp(-FP8_MAX, FP8_MAX).to(FP8).view(torch.uint8)
        cache.view(torch.uint8)[page, :, offset] = stored  # torch cannot index FP8
    elif cache.dtype is torch.int8:
        cache[page, :, offset] = quantize_kv(x)
    else:
        cache[page, :, offset] = x


def short_convolution(
    cache: Tensor, batch: AttentionBatch, positions: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """y_p = bias + sum_j weight[:, K - 1 - j] x_(p - j) over 0 <= j < K, p - j >= 0, number by number.

    x is read from the cache of each token's row: [num_pages, 1, page_size, C]; positions: [T] int64; weight:
    [C, K] float32, bias: [C] float32 -> [T, C] float32.
    """
    length, page_size = weight.shape[1], cache.shape[2]
    numbers = torch.arange(len(positions), device=positions.device, dtype=torch.int32)
    row = torch.searchsorted(batch.query_start[1:], numbers, right=True)
    total = torch.zeros(len(positions), len(weight), device=positions.device)
    if bias is not None:
        total += bias
    for j in range(length):
        at = positions - j
        page = batch.page_table[row, at.clamp(min=0) // page_size].long()
        x = cache[page, 0, at % page_size].float().masked_fill_((at < 0).unsqueeze(1), 0.0)
        total.addcmul_(x, weight[:, length - 1 - j])
    return total


def quantize_kv(x: Tensor) -> Tensor:
    """x [..., D] -> [..., D + 2] int8: q = round(x / s), and the bytes of s = max|x| / 127, a bfloat16, for
    each head of each token. If an x is not finite, s is not either."""
    wide = x.float()
    scale = (wide.abs().amax(-1, keepdim=True) / 127 + (wide * 0).sum(-1, keepdim=True)).bfloat16()
    whole = (wide / scale.float()).round().nan_to_num(0.0).clamp(-127, 127).to(torch.int8)
    return torch.cat((whole, scale.view(torch.int8)), -1)


def dequantize_kv(rows: Tensor) -> Tensor:
    """What `quantize_kv` made, [..., D + 2] int8 -> q s, [..., D] float32."""
    scale = rows[..., -2:].contiguous().view(torch.bfloat16).float()
    return rows[..., :-2].float() * scale


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: AttentionBatch,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """o_i = sum_j softmax_j(scale * q_i . k_j) v_j over i - window < j <= i (all j <= i without a window).

    i and j are positions in the row's own sequence. Its keys and values are read through its page table.
    Query head h reads key/value head h // (heads / kv_heads). q: [T, heads, D]; caches: [num_pages, kv_heads,
    page_size, D] of q's dtype or FP8, or int8 with D + 2 (`quantize_kv`) -> [T, heads, D] of q's dtype.
    Scores, softmax and sums are in float32.
    """
    return attend(q, k_cache, v_cache, batch, attention_groups(batch), scale, window)


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """n rows that are computed together, m tokens of each.

    rows: [n] their numbers, tokens: [n, m] the places of their tokens in the step, ends: [n, 1] int64, all on
    the model's device. lengths: the tokens of each row up to the last of these, which `ends` has, too.
    """

    rows: Tensor
    tokens: Tensor
    ends: Tensor
    lengths: list[int]


def attention_groups(batch: AttentionBatch) -> list[AttentionGroup]:
    """Decode rows are grouped and padded to the longest. A prefill row is alone, in blocks of queries.

    Waits for the device only where `AttentionBatch.sizes` does.
    """
    starts, lengths = batch.sizes()
    counts = [stop - start for start, stop in pairwise(starts)]
    decode = [row for row, count in enumerate(counts) if count == 1]
    # Rows, each row's first token, tokens of a row, and each row's length.
    groups: list[tuple[list[int], list[int], int, list[int]]] = []
    if decode:
        groups.append((decode, [starts[row] for row in decode], 1, [lengths[row] for row in decode]))
    for row, count in enumerate(counts):
        for done in range(0, count if count > 1 else 0, QUERY_BLOCK):
            block = min(QUERY_BLOCK, count - done)
            groups.append(([row], [starts[row] + done], block, [lengths[row] - count + done + block]))
    arrays: list[NDArray[np.generic]] = []
    for rows, first, count, ends in groups:
        arrays += np.array(rows), np.add.outer(first, np.arange(count)), np.array(ends).reshape(-1, 1)
    there = uploads(arrays, batch.page_table.device) if arrays else ()
    return [
        AttentionGroup(there[3 * at], there[3 * at + 1], there[3 * at + 2], ends)
        for at, (*_, ends) in enumerate(groups)
    ]


def attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: AttentionBatch,
    groups: Iterable[AttentionGroup],
    scale: float,
    window: int | None,
    scores: ScoreChange | None = None,
) -> Tensor:
    """`paged_attention` of a batch with known groups, with changed scores."""
    out = q.new_empty(q.shape)
    for group in groups:
        pages = batch.page_table[group.rows]
        out[group.tokens] = _attend(q[group.tokens], k_cache, v_cache, pages, group, scale, window, scores)
    return out


def _attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    pages: Tensor,
    group: AttentionGroup,
    scale: float,
    window: int | None,
    change: ScoreChange | None,
) -> Tensor:
    """Attention of n rows with m queries each: q [n, m, heads, D], the last m tokens of `group.lengths`."""
    n, m, heads, dim = q.shape
    kv_heads, page_size = k_cache.shape[1:3]
    pages = pages[:, : -(-max(group.lengths) // page_size)].long()
    # [n, pages, kv_heads, page_size, D] -> [n, kv_heads, tokens, D]
    k, v = (
        floats.transpose(1, 2)
        .to(torch.float32, memory_format=torch.contiguous_format)
        .reshape(n, kv_heads, -1, floats.shape[-1])
        for floats in (_floats(cache, pages) for cache in (k_cache, v_cache))
    )
    length = group.ends
    key = torch.arange(k.shape[2], device=q.device)
    # After a row's end are values of earlier owners, perhaps NaN. They are masked, because 0 * NaN is NaN.
    shared = min(group.lengths)
    v[:, :, shared:].masked_fill_((key[shared:] >= length).view(n, 1, -1, 1), 0.0)
    query = (length - m + torch.arange(m, device=q.device)).unsqueeze(-1)
    hidden = key > query
    if window is not None:
        hidden |= key <= query - window
    if change is not None and change.chunk is not None:
        hidden |= key < query - query % change.chunk
    grouped = scale * q.float().view(n, m, kv_heads, -1, dim).permute(0, 2, 3, 1, 4).flatten(2, 3)
    scores = (grouped @ k.transpose(2, 3)).view(n, kv_heads, -1, m, k.shape[2])
    if change is not None and change.softcap is not None:
        scores = change.softcap * torch.tanh(scores / change.softcap)
    scores = scores.masked_fill_(hidden.view(n, 1, 1, m, -1), -torch.inf)
    if change is not None and change.sinks is not None:
        sinks = change.sinks.view(1, kv_heads, -1, 1, 1).expand(n, -1, -1, m, 1)
        weights = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    mixed = (weights.flatten(2, 3) @ v).view(n, kv_heads, -1, m, v.shape[3])
    return mixed.permute(0, 3, 1, 2, 4).reshape(n, m, heads, -1).to(q.dtype)


def _floats(cache: Tensor, pages: Tensor) -> Tensor:
    """These pages of a cache, in a dtype that converts to float32: [..., kv_heads, page_size, D]."""
    if cache.dtype is torch.int8:
        return dequantize_kv(cache[pages])
    return cache.view(torch.uint8 if cache.dtype is FP8 else cache.dtype)[pages].view(cache.dtype)


def sgmv(
    x: Tensor,
    ys: tuple[Tensor, ...],
    weight_pools: tuple[WeightPool, ...],
    tables: tuple[RankTable, ...],
    work: WorkList,
) -> None:
    """y_m[i] += (x[i] A_m^T) B_m^T for each listed row i and module m (https://arxiv.org/abs/2310.18547).

    x: [T, in], ys: [T, out_m] each, changed in place (may be strided). A_m: [rank, in] and B_m^T: [rank,
    out_m] are the adapter's rows of weight_pools[m], found through tables[m]. Low precision is summed in
    float32 and rounded once.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    segments = zip(work.first_row.tolist(), work.rows.tolist(), work.adapter.tolist(), strict=True)
    for first, count, slot in segments:
        segment = slice(first, first + count)
        xs = x[segment].to(wide)
        for y, weight_pool, table in zip(ys, weight_pools, tables, strict=True):
            rows = table.rows(slot)
            if len(rows):
                shrunk = xs @ weight_pool.a[rows].to(wide).T
                y[segment] = (y[segment].to(wide) + shrunk @ weight_pool.b[rows].to(wide)).to(y.dtype)


def choose(
    logits: Tensor, rows: SamplingRows, bitmask: Tensor | None, scratch: Scratch
) -> tuple[Tensor, Tensor]:
    """A token for each row of logits [S, V] float32, which may be overwritten: tokens [S] int64, best [S].

    best = max x over the allowed ids. If the temperature is 0, the token is the lowest id with that logit.
    Otherwise

        w_t = exp((x_t - best) / temperature), 0 if t is not allowed, or if w_t is less than min_p, than
              top_k's least weight, or than that of top_p among what top_k left (`thresholds`)
        token = the first t with  w_0 + ... + w_t > u (w_0 + ... + w_{V-1}),  u = uniforms(stream, position)

    bitmask: int32 CPU [S, ceil(V / 32)]; None allows all. If nothing is allowed, best is minus infinity. If
    an allowed x is a NaN or plus infinity, best is that value. The token of such a row means nothing. Weights
    are float32; their sums are float64 over blocks in float32. So a token at an edge may differ between
    backends, if u or top_p is within 1e-6 of a sum.
    """
    if bitmask is not None:
        apply_bitmask(logits, bitmask, scratch)
    best, tokens = greatest(logits)
    random = np.flatnonzero(rows.temperature)
    if len(random) == len(logits):
        return _draw(logits, best, rows, random, scratch), best
    if len(random):
        index = _upload(random, logits)
        tokens = tokens.index_copy(0, index, _draw(logits[index], best[index], rows, random, scratch))
    return tokens, best


def _draw(
    logits: Tensor, best: Tensor, rows: SamplingRows, random: NDArray[np.int64], scratch: Scratch
) -> Tensor:
    """The tokens of the rows `random`, given their logits and maxima. The logits are overwritten by
    weights."""
    weights = logits.sub_(best[:, None])
    temperature = rows.temperature[random]
    if (temperature != 1).any():
        weights.div_(_upload(temperature, logits)[:, None])
    weights.exp_()
    least = _least(weights, rows.top_k[random], rows.top_p[random], rows.min_p[random])
    if least is not None:
        weights.mul_(torch.ge(weights, least[:, None], out=scratch.take(*weights.shape)))
    return draw(weights, _upload(uniforms(rows.streams[random], rows.positions[random]), logits))


def _least(
    weights: Tensor, top_k: NDArray[np.int64], top_p: NDArray[np.float64], min_p: NDArray[np.float32]
) -> Tensor | None:
    """The smallest weight that each row keeps, [R]; None if no row filters. The largest weight is 1."""
    filtered = np.flatnonzero((top_k > 0) | (top_p < 1))
    if not len(filtered):
        return _upload(min_p, weights) if min_p.any() else None
    everywhere = len(filtered) == len(weights)
    index = _upload(filtered, weights)
    found = thresholds(
        weights if everywhere else weights[index],
        _upload(top_k[filtered], weights),
        _upload(top_p[filtered], weights),
    )
    kept = _upload(min_p, weights)
    if everywhere:
        return torch.maximum(kept, found)
    return kept.index_copy(0, index, torch.maximum(kept[index], found))


def _upload(array: NDArray[np.generic], like: Tensor) -> Tensor:
    """The array on the device of `like`."""
    return torch.from_numpy(array).to(like.device, non_blocking=True)
