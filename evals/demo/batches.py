"""Turns conversations into batches of nearly equal length.

Batches are a pure function of (seed, chunk, worker), so training can stop and continue anywhere without a
saved data state.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor

from personae.evals.demo.sample import Sample
from personae.evals.demo.tokenizer import REQUIRED

ROUND = 32  # lengths are rounded up to this many tokens: few shapes, little padding
IGNORE = -100


@dataclass(frozen=True)
class TrainingBatch:
    """Right-padded rows."""

    tokens: Tensor  # [rows, length] int64
    targets: Tensor  # [rows, length] int64: the next token where it is taught, else IGNORE
    positions: Tensor  # [rows, length] int64


class TrainingRow(NamedTuple):
    """One conversation as tokens."""

    ids: list[int]
    taught: list[int]  # indices of the tokens that the model learns to predict


def encode(tokenizer: Tokenizer, sample: Sample, *, lists: bool = False) -> TrainingRow:
    """Tokens of prompt and completion. The completion is taught.

    With `lists`, the prompt's lists of required properties are taught too: they are exercises in going
    through a schema in order, at no extra cost. The prompt is encoded separately, as when generating.
    """
    prompt: list[int] = tokenizer.encode(sample.prompt, add_special_tokens=False).ids
    ids: list[int] = prompt + tokenizer.encode(sample.completion, add_special_tokens=False).ids
    taught = list(range(len(prompt), len(ids)))
    return TrainingRow(ids, _required(tokenizer, prompt) + taught if lists else taught)


def _required(tokenizer: Tokenizer, prompt: list[int]) -> list[int]:
    opening, within, found = tokenizer.token_to_id(REQUIRED), False, []
    for index, token in enumerate(prompt):
        if within:
            found.append(index)
            within = "]" not in (tokenizer.id_to_token(token) or "")
        within = within or token == opening
    return found


def collate(rows: list[TrainingRow], rng: Random | None = None, context: int = 2048) -> TrainingBatch:
    """Pads rows. With `rng`, one in ten gets a jump in its positions.

    The jump lets a model that trains on short conversations see every distance within its context (PoSE, Zhu
    et al., 2023).
    """
    length = -(-max(len(row.ids) for row in rows) // ROUND) * ROUND
    tokens = torch.zeros(len(rows), length, dtype=torch.int64)
    targets = torch.full_like(tokens, IGNORE)
    positions = torch.arange(length).repeat(len(rows), 1)
    for index, (ids, taught) in enumerate(rows):
        line, marks = torch.tensor(ids), torch.tensor(taught)
        tokens[index, : len(ids)] = line
        targets[index, marks - 1] = line[marks]
        if rng and rng.random() < 0.1:
            positions[index, rng.randrange(length) :] += rng.randrange(context - length)
    return TrainingBatch(tokens, targets, positions)


def chunk(
    samples: Iterator[Sample], tokenizer: Tokenizer, rng: Random, count: int, budget: int
) -> list[TrainingBatch]:
    """`count` batches of at most `budget` padded tokens each, shuffled."""
    rows: list[TrainingRow] = []
    packed: list[list[TrainingRow]] = []
    while len(packed) < count:
        rows += [encode(tokenizer, next(samples), lists=True) for _ in range(count * 8)]
        rows.sort(key=lambda row: len(row.ids))
        packed = [[]]
        for row in rows:
            if (len(packed[-1]) + 1) * (-(-len(row.ids) // ROUND) * ROUND) > budget:
                packed.append([])
            packed[-1].append(row)
    rng.shuffle(packed)
    return [collate(rows, rng) for rows in packed[:count]]
