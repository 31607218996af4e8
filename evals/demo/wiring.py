"""Starts the model with a copying circuit in place, where training would need most of its steps to find one.

Two attention layers form an induction head (Olsson et al., 2022), here over two tokens of context:
  layer 0 writes the identities of the previous token (into subspace U1) and of the one before (into U2);
  layer 1 asks "where did my token, after my previous token, occur before?" and writes the
  identity of what followed there.
Everything else keeps its random start, and training is free to change all of it.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3ForCausalLM

SLOW = 14  # rotary pairs from here on turn so slowly that they carry content at any distance
FAST = 6  # pairs below this one tell neighbouring positions apart
MATCH = 2.0  # gain of the norms of queries and keys where contents are compared
GAIN = 0.6  # how loudly a found token is said


@torch.no_grad()
def wire(model: Qwen3ForCausalLM) -> None:
    """Sets embeddings and two attention layers; needs a hidden size of 4 head sizes and 2 key-value heads."""
    config = model.config
    hidden, size = config.hidden_size, config.head_dim
    half = size // 2
    basis = torch.linalg.qr(torch.randn(hidden, hidden))[0]
    read, before, earlier, rest = basis.split(size)  # rows; tokens live in `read` and `rest`
    constant, rest = rest[0], rest[1:]

    tokens = torch.cat((read, rest))
    identity = torch.randn(config.vocab_size, len(tokens)) / len(tokens) ** 0.5
    model.model.embed_tokens.weight.copy_(identity @ tokens + 0.5 * constant)

    width = half - SLOW
    one, two = slice(SLOW, half), slice(half + SLOW, size)  # the slow pairs' two halves
    inverse = 1 / config.rope_parameters["rope_theta"] ** (torch.arange(FAST) / half)

    first, second = (layer.self_attn for layer in model.model.layers[:2])
    swapped = torch.cat((read[width : 2 * width], read[:width], read[2 * width :]))
    for head, (offset, values, place) in enumerate(((1, read, before), (2, swapped, earlier))):
        query, key = torch.zeros(size, hidden), torch.zeros(size, hidden)
        query[:FAST] = constant
        key[:FAST] = (inverse * offset).cos()[:, None] * constant
        key[half : half + FAST] = (inverse * offset).sin()[:, None] * constant
        _set(first, head, query, key, values, place.T / 8)

    query, key = torch.zeros(size, hidden), torch.zeros(size, hidden)
    query[one], key[one] = 2 * read[:width], before[:width]
    query[two], key[two] = before[width : 2 * width], earlier[:width]
    others = torch.cat((rest, torch.zeros(1, hidden)))
    for head, values in enumerate((read, others)):
        _set(second, head, query, key, values, values.T * GAIN)
    second.q_norm.weight.fill_(MATCH)
    second.k_norm.weight.fill_(MATCH)


def _set(attention: Any, group: int, query: Tensor, key: Tensor, value: Tensor, output: Tensor) -> None:
    """Wires the first query head of a key-value group."""
    size = len(query)
    heads = attention.q_proj.out_features // attention.k_proj.out_features  # query heads a group
    head = slice(group * heads * size, (group * heads + 1) * size)
    rows = slice(group * size, (group + 1) * size)
    attention.q_proj.weight[head] = query
    attention.k_proj.weight[rows] = key
    attention.v_proj.weight[rows] = value
    attention.o_proj.weight[:, head] = output
