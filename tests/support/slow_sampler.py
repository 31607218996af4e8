"""A second sampler, as slow and plain as the definitions: one row at a time, in Python and NumPy, float64."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from personae.engine.params import SamplingParams
from personae.engine.sequence import SequenceLog

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def uniform(seed: int, position: int) -> float:
    start = _mix((seed + _GOLDEN) & _MASK)
    return float((_mix((start + (position + 1) * _GOLDEN) & _MASK) >> 11) / 2**53)


def changed_logits(
    logits: NDArray[np.float32], log: SequenceLog, allowed: NDArray[np.bool_] | None = None
) -> NDArray[np.float32]:
    """The logits after penalties, bias, mask and min_tokens; float32, as the model's."""
    params = log.params
    x = logits.astype(np.float32).copy()
    emitted = list(log.tokens[log.prompt_length :])
    for token in set(log.tokens):
        factor = np.float32(params.repetition_penalty)
        x[token] = x[token] / factor if x[token] > 0 else x[token] * factor
    for token in set(emitted):
        x[token] -= np.float32(params.frequency_penalty) * np.float32(emitted.count(token))
        x[token] -= np.float32(params.presence_penalty)
    for token, bias in params.logit_bias.items():
        x[token] += np.float32(bias)
    allowed = np.ones(len(x), np.bool_) if allowed is None else allowed.copy()
    stops = {*params.stop_token_ids, *(() if params.ignore_eos else log.eos)}
    if len(emitted) < params.min_tokens and set(np.flatnonzero(allowed).tolist()) - stops:
        allowed[list(stops)] = False
    x[~allowed] = -np.inf
    return x


def kept(x: NDArray[np.float32], params: SamplingParams, top_p: float) -> NDArray[np.float64]:
    """The probabilities after temperature and filters, with a slightly different top_p if given."""
    weights = np.exp((x.astype(np.float64) - float(x.max())) / params.temperature).astype(np.float32)
    ordered = sorted((float(w) for w in weights), reverse=True)
    count = params.top_k if 0 < params.top_k < len(x) else len(x)
    floor = ordered[count - 1] if count < len(x) else 0.0
    if params.top_p < 1:
        mass, wanted = 0.0, top_p * sum(ordered[:count])
        for weight in ordered[:count]:
            mass += weight
            if mass >= wanted:
                floor = max(floor, weight)
                break
    floor = max(floor, float(np.float32(params.min_p)))
    probabilities = np.where(weights >= np.float32(floor * (1 - 1e-6)), weights.astype(np.float64), 0.0)
    return np.asarray(probabilities / probabilities.sum())


def may_choose(x: NDArray[np.float32], params: SamplingParams, position: int) -> set[int]:
    """The tokens that a correct sampler may choose: one, or both sides of an edge that rounding may cross."""
    if params.temperature < 1e-5 or params.top_k == 1:
        return {int(np.argmax(x))}
    u = uniform(params.seed, position)
    found: set[int] = set()
    for top_p in (params.top_p * (1 - 1e-6), params.top_p, params.top_p * (1 + 1e-6)):
        probabilities = kept(x, params, top_p)
        edges = np.cumsum(probabilities)
        for v in (u - 1e-6, u, u + 1e-6):
            token = int(np.searchsorted(edges, min(max(v, 0.0), 1 - 1e-12) * edges[-1], side="right"))
            found.add(token)
    return found


def bitmask(allowed: Sequence[NDArray[np.bool_] | None], vocab: int) -> NDArray[np.int32]:
    """A mask packed as grammar backends pack it. None: all tokens, -1 in every word."""
    words = np.full((len(allowed), (vocab + 31) // 32), -1, np.int32)
    for row, bits in enumerate(allowed):
        if bits is not None:
            padded = np.zeros(words.shape[1] * 32, np.uint8)
            padded[:vocab] = bits
            words[row] = np.packbits(padded, bitorder="little").view(np.int32)
    return words
