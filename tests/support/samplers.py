"""Rows for a sampler: their parameters and the tokens that it chooses."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from slow_sampler import bitmask

from personae.engine.params import SamplingParams
from personae.engine.sampled_tokens import TokenChoices
from personae.engine.sampler import Sampler
from personae.engine.sequence import SequenceLog


def sequence(
    tokens: Sequence[int] = (0,), prompt_length: int | None = None, eos: Sequence[int] = (), **params: Any
) -> SequenceLog:
    fields = {"max_tokens": 1000, "seed": 0} | params
    length = len(tokens) if prompt_length is None else prompt_length
    return SequenceLog("s", tuple(tokens), length, SamplingParams(**fields), tuple(eos))


def sample(
    logits: torch.Tensor,
    logs: Sequence[SequenceLog],
    positions: Sequence[int] | None = None,
    allowed: Sequence[np.ndarray | None] | None = None,
) -> TokenChoices:
    """One step of a fresh sampler."""
    sampler = Sampler(len(logs), logits.shape[1], "cpu")
    for slot, log in enumerate(logs):
        sampler.admit(slot, log)
    mask = None if allowed is None else torch.from_numpy(bitmask(allowed, logits.shape[1]))
    places = positions or [len(log.tokens) for log in logs]
    return sampler.sample(logits.clone(), range(len(logs)), places, mask).read()


def token(logits: Sequence[float], position: int = 1, **params: Any) -> int | None:
    return sample(torch.tensor([list(logits)]), [sequence(**params)], [position]).tokens[0]


def chosen(logits: Sequence[float], positions: int = 150, **params: Any) -> set[int | None]:
    """All tokens that are chosen over many positions."""
    sampler = Sampler(1, len(logits), "cpu")
    sampler.admit(0, sequence(**params))
    row = torch.tensor([list(logits)])
    return {sampler.sample(row.clone(), [0], [at]).read().tokens[0] for at in range(1, positions)}
