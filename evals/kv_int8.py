"""Keys and values in int8 compared with bfloat16, on a real model: the error, and the speed.

    python -m personae.evals.kv_int8 --text FILE

Error: the model reads parts of the text with both caches; from `warm` tokens on one by one, as it decodes.
Prints the mean KL divergence from the distributions with bfloat16, and how often the most likely token is the
same. Speed: decode steps over full caches, alternating. Prints the median of the ratios.
"""

import time
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Annotated

import torch
import typer
from torch import Tensor

from personae.api.bundled import DEMO, smollm2
from personae.engine.kv import KVCache
from personae.engine.loader import load_model
from personae.engine.models.decoder import Decoder
from personae.engine.plan import MemoryLayout
from personae.engine.tokens import Tokenizer
from personae.kernels.attention import AttentionBatch

PAGE = 16
CPU = torch.device("cpu")
DTYPES = (torch.bfloat16, torch.int8)


class Rows:
    """Rows of one length in a cache of `dtype`, which are read from the first token on."""

    def __init__(self, decoder: Decoder, rows: int, most: int, dtype: torch.dtype) -> None:
        self._pages = -(-most // PAGE)
        layout = MemoryLayout(rows * self._pages, PAGE, rows, most, rows * most)
        self._decoder, self._rows = decoder, rows
        self.kv = KVCache(decoder.config.kv_specs, layout, dtype, CPU)
        self.length = 0

    def read(self, tokens: Tensor) -> Tensor:
        """tokens: [rows, n] -> the residual stream [rows * n, hidden_size]."""
        count = tokens.shape[1]
        table = torch.arange(self._rows * self._pages, dtype=torch.int32).view(self._rows, -1)
        at = torch.arange(self.length, self.length + count)
        self.length += count
        batch = AttentionBatch(
            query_start=torch.arange(self._rows + 1, dtype=torch.int32) * count,
            kv_length=torch.full((self._rows,), self.length, dtype=torch.int32),
            page_table=table,
            write_index=(table[:, at // PAGE].long() * PAGE + at % PAGE).flatten(),
            max_query=count,
            max_kv=self.length,
        )
        return self._decoder.forward(tokens.flatten(), at.repeat(self._rows), self.kv, batch)


def error(decoder: Decoder, parts: Tensor, warm: int) -> tuple[float, float]:
    """parts: [n, length]. The mean KL divergence in nats, and the share of equal most likely tokens."""
    divergences, equal = [], []
    for part in parts:
        found = []
        for dtype in DTYPES:
            rows = Rows(decoder, 1, len(part), dtype)
            rows.read(part[None, :warm])
            hidden = [rows.read(part[None, at : at + 1]) for at in range(warm, len(part))]
            found.append(decoder.logits(torch.cat(hidden)).clone().float().log_softmax(-1))
        true, ours = found
        divergences.append(float((true.exp() * (true - ours)).sum(-1).mean()))
        equal.append(float((true.argmax(-1) == ours.argmax(-1)).float().mean()))
    return mean(divergences), mean(equal)


def speed(decoder: Decoder, rows: int, length: int, rounds: int) -> list[float]:
    """The seconds of a decode step with bfloat16 by those with int8, of each round."""
    tokens = torch.randint(10, decoder.config.vocab_size, (rows, length))
    caches = [Rows(decoder, rows, length + rounds + 1, dtype) for dtype in DTYPES]
    for cache in caches:
        for at in range(0, length, 256):
            cache.read(tokens[:, at : at + 256])
    ratios = []
    for _ in range(rounds):
        seconds = []
        for cache in caches:
            begun = time.perf_counter()
            cache.read(tokens[:, :1])
            seconds.append(time.perf_counter() - begun)
        ratios.append(seconds[0] / seconds[1])
    return ratios


def main(
    text: Annotated[Path, typer.Option(help="A text file.")],
    parts: Annotated[int, typer.Option(min=1, help="Of the text.")] = 8,
    length: Annotated[int, typer.Option(min=64, help="Tokens of a part.")] = 512,
    warm: Annotated[int, typer.Option(min=1, help="Tokens of a part that are read at once.")] = 384,
    rows: Annotated[int, typer.Option(min=1, help="Of a decode step.")] = 4,
    context: Annotated[list[int] | None, typer.Option(help="Tokens of each row. Repeatable.")] = None,
    rounds: Annotated[int, typer.Option(min=4)] = 40,
    model: Annotated[
        Path | None, typer.Option(help="A model; without it SmolLM2-135M if it is installed, or the demo's.")
    ] = None,
) -> None:
    """Measure and print."""
    folder = model or smollm2() or DEMO / "model"
    decoder = load_model(folder, device=CPU, dtype="bfloat16")
    tokens = Tokenizer.load(folder).encode(text.read_text(encoding="utf-8"))
    count = min(parts, len(tokens) // length)
    if not count:
        raise typer.BadParameter(
            f"it has {len(tokens)} tokens, fewer than --length {length}", param_hint="--text"
        )
    divergence, equal = error(decoder, torch.tensor(tokens[: count * length]).view(count, length), warm)
    sizes = [KVCache.bytes_per_page(decoder.config.kv_specs, 1, dtype) for dtype in DTYPES]
    print(f"{sizes[1]} bytes a token, {sizes[1] / sizes[0]:.3f} of bfloat16's {sizes[0]}")
    print(
        f"{count * (length - warm)} positions: mean KL {divergence:.2e} nats, "
        f"{100 * equal:.2f} % have the same most likely token",
        flush=True,
    )
    for each in context or [512, 2048]:
        ratios = speed(decoder, rows, each, rounds)
        low, _, high = quantiles(ratios, n=4)
        print(
            f"decode, {rows} rows of {each} tokens: {median(ratios):.3f}x as fast as bfloat16 "
            f"(quartiles {low:.3f} to {high:.3f}, {rounds} pairs)",
            flush=True,
        )


if __name__ == "__main__":
    typer.run(main)
