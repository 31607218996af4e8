"""`choose` with FlashInfer's filters, and the reference's numbers at random.

FlashInfer's own samplers draw from a generator of their own, so a request's seed would mean another token
than elsewhere. Here its kernels find what top_k and top_p keep, without sorting, and the token is drawn from
that as `reference.choose` does.
"""

from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from personae.kernels.counter_rng import uniforms
from personae.kernels.masks import Scratch, apply_bitmask
from personae.kernels.reference_sampler import draw, greatest
from personae.kernels.sampling import SamplingRows
from personae.kernels.upload import uploads


def _filters() -> Any:
    return import_module("flashinfer.sampling")


def choose(
    logits: Tensor, rows: SamplingRows, bitmask: Tensor | None, scratch: Scratch
) -> tuple[Tensor, Tensor]:
    """See `reference.choose`. Which of the tokens that tie with the last kept one are kept is FlashInfer's
    choice."""
    if bitmask is not None:
        apply_bitmask(logits, bitmask, scratch)
    best, tokens = greatest(logits)
    random = np.flatnonzero(rows.temperature)
    if not len(random):
        return tokens, best
    width = logits.shape[1]
    top_k, top_p, min_p = rows.top_k[random], rows.top_p[random], rows.min_p[random]
    index, temperature, most, share, least, uniform = uploads(
        (
            random,
            rows.temperature[random],
            np.where(top_k > 0, top_k, width).astype(np.int32),
            np.minimum(top_p, 1).astype(np.float32),
            min_p,
            uniforms(rows.streams[random], rows.positions[random]),
        ),
        logits.device,
    )
    top = best[index][:, None]
    weights = torch.softmax((logits[index] - top) / temperature[:, None], 1)
    # The token of a row that failed means nothing; FlashInfer does not say what it does with a NaN.
    weights = torch.where(top.isfinite(), weights, 1 / width)
    # min_p compares with the greatest weight, which no filter removes and all of them scale alike.
    if (top_k > 0).any():
        weights = _filters().top_k_renorm_probs(weights, most)
    if (top_p < 1).any():
        weights = _filters().top_p_renorm_probs(weights, share)
    if min_p.any():
        weights = weights * (weights >= least[:, None] * weights.amax(1, keepdim=True))
    return tokens.index_copy(0, index, draw(weights, uniform)), best
