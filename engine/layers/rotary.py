"""The tables of the rotary position embedding, with its scalings for longer contexts.

Sources: rotary embeddings https://arxiv.org/abs/2104.09864, linear interpolation
https://arxiv.org/abs/2306.15595, YaRN https://arxiv.org/abs/2309.00071, LongRoPE
https://arxiv.org/abs/2402.13753, Llama 3.1's wavelength bands https://arxiv.org/abs/2407.21783. Frequencies
and angles are float32, as in the reference implementation that checkpoints are made with.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

RopeType = Literal["default", "linear", "llama3", "yarn", "longrope", "proportional"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """A rotary position embedding: the base `theta`, and the scaling of its frequencies for long contexts.

    The first `share` of a head's dimensions is rotated. `interleaved`: pairs are neighbours, (0, 1), (2, 3),
    …, not one dimension of each half. A field with a comment is only used by the types that the comment
    names.
    """

    theta: float
    type: RopeType = "default"
    factor: float = 1.0  # linear, llama3, yarn, longrope, proportional
    original_max_position: int = 0  # llama3, yarn, longrope
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn
    attention_factor: float | None = None  # yarn, longrope; None: derived from `factor`
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    short_factors: tuple[float, ...] = ()  # longrope: per pair, for contexts within the original one
    long_factors: tuple[float, ...] = ()  # longrope: per pair, for longer contexts
    proportion: float = 1.0  # proportional: of the pairs; the others have the frequency 0
    share: float = 1.0
    interleaved: bool = False


def rotary_tables(
    rope: RopeConfig, head_dim: int, positions: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """cos and sin of position * frequency, times the magnitude. Each is [positions, pairs] float32, with one
    pair for every two rotated dimensions."""
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), frequencies(rope, head_dim, positions))
    scale = magnitude(rope)
    return (angles.cos() * scale).to(device), (angles.sin() * scale).to(device)


def frequencies(rope: RopeConfig, head_dim: int, context: int) -> Tensor:
    """Radians per token of each pair i, [D / 2] float32: theta^(-2i / D), scaled; D dimensions are rotated.

    context: the longest in tokens. It selects LongRoPE's factors once for all steps.
    """
    head_dim = int(head_dim * rope.share)
    base = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if rope.type == "linear":
        return base / rope.factor
    if rope.type == "proportional":
        base[int(rope.proportion * head_dim // 2) :] = 0.0
        return base / rope.factor
    if rope.type == "llama3":
        # 1 if a wave fits the original context often enough, 0 if it hardly fits, and a ramp in between.
        turns = rope.original_max_position * base / (2 * math.pi)
        keep = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
        return keep * base + (1 - keep) * base / rope.factor
    if rope.type == "longrope":
        return base / torch.tensor(
            rope.long_factors if context > rope.original_max_position else rope.short_factors
        )
    if rope.type == "yarn":
        first, last = _yarn_range(rope, head_dim)
        index = torch.arange(head_dim // 2, dtype=torch.float32)
        stretch = ((index - first) / (last - first)).clamp(0, 1)
        return stretch * base / rope.factor + (1 - stretch) * base
    return base


def magnitude(rope: RopeConfig) -> float:
    """The factor of cos and sin: 1, except for YaRN and LongRoPE. If the file does not say, YaRN has 0.1
    ln(factor) + 1, and LongRoPE sqrt(1 + ln(factor) / ln(original context))."""
    if rope.type not in ("yarn", "longrope"):
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.type == "longrope":
        return math.sqrt(1 + max(math.log(rope.factor), 0.0) / math.log(rope.original_max_position))
    if rope.mscale is not None and rope.mscale_all_dim is not None:
        return _mscale(rope.factor, rope.mscale) / _mscale(rope.factor, rope.mscale_all_dim)
    return _mscale(rope.factor, 1.0)


def score_scale(rope: RopeConfig) -> float:
    """The factor of attention scores that YaRN with `mscale_all_dim` has in latent attention; 1 otherwise."""
    if rope.type != "yarn" or rope.mscale_all_dim is None:
        return 1.0
    return _mscale(rope.factor, rope.mscale_all_dim) ** 2


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _yarn_range(rope: RopeConfig, head_dim: int) -> tuple[float, float]:
    """The pair indices between which YaRN changes from keeping a frequency to dividing it by the factor."""

    def index(turns: float) -> float:  # of the pair that makes this many turns in the original context
        return (
            head_dim
            * math.log(rope.original_max_position / (turns * 2 * math.pi))
            / (2 * math.log(rope.theta))
        )

    first, last = index(rope.beta_fast), index(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    return first, last if first != last else last + 0.001
