"""Cases of sampling for the interpreter; see `cases.py`. Tokens are the reference's, and what a kernel leaves
for the next one is compared with NumPy's."""

import random

import numpy as np
import torch

from personae.kernels import reference
from personae.kernels.counter_rng import stream
from personae.kernels.masks import Scratch
from personae.kernels.sampling import SamplingRows
from personae.kernels.triton.sampling import choose
from ptx.cases import Case, Check
from ptx.launches import unwritten, watched
from ptx.stages_sampling import SamplingStages

VOCABULARIES = (1000, 5003, 20_011)
# temperature, top_k, top_p, min_p
VOICES = (
    (0.0, 0, np.inf, 0.0),
    (1.0, 0, np.inf, 0.0),
    (0.7, 20, np.inf, 0.0),
    (0.7, 20, 0.8, 0.0),
    (1.0, 0, 0.95, 0.0),
    (1.3, 0, np.inf, 0.1),
    (0.5, 40, 0.9, 0.02),
    (2.0, 5, 0.5, 0.0),
)


def sampling(
    seed: int,
    *,
    vocabulary: int | None = None,
    voices: tuple[int, ...] | None = None,
    masked: tuple[bool, ...] | None = None,
    crowded: bool = False,
) -> Case:
    """Rows that ask for different things (numbers of VOICES), some under a grammar (`masked`). crowded: 64
    ids of a chunk are all about as likely as the likeliest, so that a thread counts several of them."""
    dice = random.Random(seed)
    width = vocabulary or dice.choice(VOCABULARIES)
    asked = voices or tuple(dice.choices(range(len(VOICES)), k=dice.randint(1, 3)))
    masked = masked or tuple(dice.random() < 0.4 for _ in asked)
    text = f"sampling {seed}: {width} ids, rows {[VOICES[voice] for voice in asked]}, masked {list(masked)}"

    def run() -> list[Check]:
        torch.manual_seed(seed)
        count = len(asked)
        # A language model's logits: some likely, and a long tail.
        logits = unwritten(count, width + 16, dtype=torch.float32)[:, :width]
        logits.copy_(torch.randn(count, width) * 2.2)
        for row in logits:
            row[torch.randint(0, width, (30,))] += torch.linspace(4, 14, 30)
            if crowded:
                row[1024:2048:16] = row.max() - torch.rand(64) / 4
        temperature, top_k, top_p, min_p = zip(*(VOICES[voice] for voice in asked), strict=True)
        rows = SamplingRows(
            np.array(temperature, np.float32),
            np.array(top_k, np.int64),
            np.array(top_p, np.float64),
            np.array(min_p, np.float32),
            np.array([stream(seed + row) for row in range(count)], np.uint64),
            np.arange(count) + seed,
        )
        words = torch.full((count, -(-width // 32)), -1, dtype=torch.int32)
        for row in np.flatnonzero(masked):
            words[row] = torch.randint(-(2**31), 2**31 - 1, (words.shape[1],)).int()
        bitmask = words if any(masked) else None
        tokens, best = reference.choose(logits.clone(), rows, bitmask, Scratch(torch.device("cpu")))
        octets = np.unpackbits(words.numpy().view(np.uint8), axis=1, bitorder="little")
        stages = SamplingStages(np.where(octets[:, :width], logits.numpy(), -np.inf), rows)
        with watched(stages.look):
            found, top = choose(logits, rows, bitmask)
        return [Check(found, tokens, 0), Check(top, best, 0), *stages.checks]

    return Case(text, run)
