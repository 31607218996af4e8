"""From conversations to batches of nearly equal length.

Batches are a pure function of (seed, chunk, worker), so that training can stop and go on anywhere without a
saved data state.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

import torch
from personae.evals.demo.sample import Sample
from tokenizers import Tokenizer
from torch import Tensor

ROUND = 32  # lengths are rounded up to this many tokens: few shapes, little padding
IGNORE = -100


@dataclass(frozen=True)
class Batch:
    """Right-padded rows."""

    tokens: Tensor  # [rows, length] int64
    targets: Tensor  # [rows, length] int64: the next token where it belongs to the completion, else IGNORE
    positions: Tensor  # [rows, length] int64


def encode(tokenizer: Tokenizer, sample: Sample) -> tuple[list[int], int]:
    """Token ids of prompt and completion, and how many belong to the prompt.

    The two are encoded apart, as they are when the completion is generated.
    """
    prompt: list[int] = tokenizer.encode(sample.prompt, add_special_tokens=False).ids
    completion: list[int] = tokenizer.encode(sample.completion, add_special_tokens=False).ids
    return prompt + completion, len(prompt)


def collate(rows: list[tuple[list[int], int]], rng: Random | None = None, context: int = 2048) -> Batch:
    """Pads rows; with `rng`, a third of them get a jump in their positions.

    The jump lets a model that trains on short conversations meet every distance within its context
    (PoSE, Zhu et al., 2023).
    """
    length = -(-max(len(ids) for ids, _ in rows) // ROUND) * ROUND
    tokens = torch.zeros(len(rows), length, dtype=torch.int64)
    targets = torch.full_like(tokens, IGNORE)
    positions = torch.arange(length).repeat(len(rows), 1)
    for row, (ids, prompt) in enumerate(rows):
        line = torch.tensor(ids)
        tokens[row, : len(ids)] = line
        targets[row, prompt - 1 : len(ids) - 1] = line[prompt:]
        if rng and rng.random() < 0.33:
            positions[row, rng.randrange(length) :] += rng.randrange(context - length)
    return Batch(tokens, targets, positions)


def chunk(
    samples: Iterator[Sample], tokenizer: Tokenizer, rng: Random, count: int, budget: int
) -> list[Batch]:
    """`count` batches of at most `budget` padded tokens each, shuffled."""
    rows: list[tuple[list[int], int]] = []
    packed: list[list[tuple[list[int], int]]] = []
    while len(packed) < count:
        rows += [encode(tokenizer, next(samples)) for _ in range(count * 8)]
        rows.sort(key=lambda row: len(row[0]))
        packed = [[]]
        for row in rows:
            if (len(packed[-1]) + 1) * (-(-len(row[0]) // ROUND) * ROUND) > budget:
                packed.append([])
            packed[-1].append(row)
    rng.shuffle(packed)
    return [collate(rows, rng) for rows in packed[:count]]
