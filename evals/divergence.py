"""How far quantized models are from the plain one, on real text.

    python -m personae.evals.divergence MODEL --text FILE --other QUANTIZED --other MODEL:int4

All get the same windows of tokens. Prints the mean KL divergence from the model's distributions in float32,
how often the most likely token is the same, and the perplexity. MODEL:int4 is `--quantize int4`.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from personae.engine.loader import load_model
from personae.engine.models.decoder import Decoder
from personae.evals.kv_int8 import CPU, Rows
from personae.evals.perplexity import windows


def distributions(decoder: Decoder, parts: Tensor) -> Iterator[Tensor]:
    """The logarithms of probabilities after each token of each window: [width, vocabulary]."""
    for part in parts:
        hidden = Rows(decoder, 1, len(part), decoder.dtype).read(part[None])
        yield decoder.logits(hidden).clone().float().log_softmax(-1)


def load(name: str) -> Decoder:
    """A model, in float32 unless its weights are quantized."""
    path, _, quantize = name.partition(":")
    if quantize:
        return load_model(Path(path), device=CPU, dtype="bfloat16", quantize=quantize)
    return load_model(Path(path), device=CPU)


def main(
    model: Annotated[Path, typer.Argument(help="The plain model.")],
    text: Annotated[list[Path], typer.Option(help="Files of plain text. Repeatable.")],
    other: Annotated[list[str], typer.Option(help="A quantized model, or MODEL:FORMAT. Repeatable.")],
    width: Annotated[int, typer.Option(min=2, help="Tokens of a window.")] = 512,
    most: Annotated[int, typer.Option(min=1, help="The most windows, from the end of the texts.")] = 16,
) -> None:
    """Measure and print."""
    parts = torch.tensor(windows(model, text, width)[-most:])
    if not len(parts):
        raise typer.BadParameter("The texts have fewer tokens than a window.")
    plain = load_model(model, device=CPU, dtype="float32")
    truth = list(distributions(plain, parts))
    table = Table("", "KL divergence", "same token", "perplexity")
    for name in (None, *other):
        divergence, same, log = 0.0, 0.0, 0.0
        found = iter(truth) if name is None else distributions(load(name), parts)
        for part, true, own in zip(parts, truth, found, strict=True):
            divergence += float((true.exp() * (true - own)).sum(-1).mean())
            same += float((true.argmax(-1) == own.argmax(-1)).float().mean())
            log += float(own[:-1].gather(-1, part[1:, None]).mean())
        count = len(parts)
        table.add_row(
            name or "float32",
            f"{divergence / count:.5f}",
            f"{100 * same / count:.2f} %",
            f"{math.exp(-log / count):.4f}",
        )
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
