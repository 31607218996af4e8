"""Keeps tokens apart that the base's training never shows.

A token that is never a target is only ever pushed away, in the same direction as every other such token:
after some thousand steps their embeddings are nearly one vector, and no adapter can tell `angry` from
`neutral` again. So each gets its starting difference from the others back, and only their common part stays.
"""

import itertools

import torch
from tokenizers import Tokenizer
from torch import Tensor

from personae.evals.demo import data

CONVERSATIONS = 30_000  # of the mixture: a token that none of them has is unseen
DISTANCE = 0.9  # from the common part; seen tokens lie at about 2


def unseen(tokenizer: Tokenizer) -> Tensor:
    """`[vocabulary]` bool: which tokens the base's training does not show."""
    never = torch.ones(tokenizer.get_vocab_size(), dtype=torch.bool)
    for sample in itertools.islice(data.mixture("unseen", 0.0), CONVERSATIONS):
        ids = tokenizer.encode(sample.prompt + sample.completion, add_special_tokens=False).ids
        never[torch.tensor(ids)] = False
    return never


@torch.no_grad()
def set_apart(embeddings: Tensor, started: Tensor, never: Tensor) -> None:
    """Moves the rows `never` of [vocabulary, hidden] to their common part plus their starting differences."""
    common = embeddings[never].mean(0)
    difference = started[never] - started[never].mean(0)
    embeddings[never] = common + DISTANCE * difference / difference.norm(dim=1, keepdim=True)
