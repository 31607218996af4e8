"""The truth of attention over latent vectors. `kernels/latent_attention.py` says what a step's plan has."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from personae.kernels.latent_attention import LatentPlan

MOST_NUMBERS = 1 << 24  # of scores, or of keys and values, that are computed together


def latent_attention(q: Tensor, cache: Tensor, plan: LatentPlan, scale: float) -> Tensor:
    """o_i = sum_j softmax_j(scale * q_i . c_j) c_j' over all j <= i of the row, where c_j' are the first
    `plan.latent` numbers of c_j. Only for the tokens of `plan.absorbed`; the others are 0.

    q: [T, heads, D]; cache: [num_pages, 1, page_size, D], or FP8, or int8 with D + 2 -> [T, heads, latent] of
    q's dtype. Scores, softmax and sums are in float32.
    """
    out = q.new_zeros(*q.shape[:2], plan.latent)
    for row in plan.absorbed:
        kept = plan.vectors(row, cache).float()
        at_once = max(1, MOST_NUMBERS // (q.shape[1] * row.length))
        for first in range(row.tokens.start, row.tokens.stop, at_once):
            own = slice(first, min(first + at_once, row.tokens.stop))
            seen = row.length - (row.tokens.stop - own.stop)  # by the last of these tokens
            scores = (scale * q[own].float()) @ kept[:seen].T  # [tokens, heads, keys]
            count = own.stop - own.start
            if count > 1:
                query = torch.arange(seen - count, seen, device=q.device).view(-1, 1, 1)
                scores.masked_fill_(torch.arange(seen, device=q.device) > query, -torch.inf)
            out[own] = (scores.softmax(-1) @ kept[:seen, : plan.latent]).to(q.dtype)
    return out


def prompt_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal attention of a row's last m tokens over all its L: q [m, heads, D], k [L, heads, D], v [L,
    heads, DV] -> [m, heads, DV]. Computed by torch, which has scores in float32."""
    count, length, width = len(q), len(k), v.shape[2]
    if v.device.type == "cpu":  # torch's fast attention there has keys and values of one width
        v = F.pad(v, (0, q.shape[2] - width)) if width < q.shape[2] else v
    mask = None
    if count < length:
        query = torch.arange(length - count, length, device=q.device).unsqueeze(1)
        mask = torch.arange(length, device=q.device) <= query
    q, k, v = (part.transpose(0, 1).unsqueeze(0) for part in (q, k, v))
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale)
    return mixed[0].transpose(0, 1)[..., :width]
