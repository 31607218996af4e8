"""The training objective of base and adapters, and the measure of their progress."""

import itertools

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import Qwen3ForCausalLM

from personae.evals.demo import data
from personae.evals.demo.batches import IGNORE, TrainingBatch, collate, encode


def loss_of(model: Qwen3ForCausalLM, batch: TrainingBatch) -> tuple[Tensor, Tensor]:
    """Mean cross-entropy of the completion's tokens, and for each row whether all its tokens are the
    likeliest.

    All-likeliest under teacher forcing is the same as an exact match of greedy decoding.
    """
    # A ready mask of `None` means plain causal attention: padding is on the right, where no row looks.
    output = model.model(
        input_ids=batch.tokens,
        position_ids=batch.positions,
        attention_mask={"full_attention": None},
        use_cache=False,
    )
    marked = batch.targets != IGNORE
    logits = model.lm_head(output.last_hidden_state[marked])
    targets = batch.targets[marked]
    right = torch.ones_like(marked)
    right[marked] = logits.detach().argmax(-1) == targets
    return nn.functional.cross_entropy(logits.float(), targets), right.all(-1)


@torch.no_grad()
def exact(model: Qwen3ForCausalLM, tokenizer: Tokenizer, task: data.Task, seed: str, count: int) -> float:
    """Share of a task's held-out samples that greedy decoding would answer exactly."""
    model.eval()
    rows = [encode(tokenizer, sample) for sample in itertools.islice(data.samples(task, "test", seed), count)]
    rows.sort(key=lambda row: len(row.ids))
    hits = 0
    for start in range(0, count, 16):
        hits += int(loss_of(model, collate(rows[start : start + 16]))[1].sum())
    model.train()
    return hits / count
