"""The perplexity of one GGUF file over a text, in Personae, transformers and llama.cpp.

    python -m personae.evals.perplexity MODEL.gguf docs/*.md --llama PYTHON

All get the same tokens, in windows that do not overlap, and score every token of a window but its first.
PYTHON is an interpreter with the package `llama-cpp-python`.
"""

import json
import math
import subprocess
from pathlib import Path
from typing import Annotated

import anyio
import typer
from rich.console import Console
from rich.table import Table

import personae
from personae.engine.tokens import Tokenizer
from personae.evals.harness.target import Source
from personae.evals.suites.reference import Reference

DTYPES = ("auto", "bfloat16", "float32")
Windows = list[list[int]]

_LLAMA = """
import json, sys
import numpy as np
from llama_cpp import Llama
model, width = sys.argv[1], int(sys.argv[2])
llama = Llama(model, n_ctx=width, n_batch=width, n_ubatch=width, logits_all=True, verbose=False)
total = 0.0
for ids in json.load(sys.stdin):
    llama.reset()
    llama.eval(ids)
    logits = np.asarray(llama.scores[: len(ids) - 1], dtype=np.float64)
    top = logits.max(axis=1)
    norm = top + np.log(np.exp(logits - top[:, None]).sum(axis=1))
    total += float((logits[np.arange(len(ids) - 1), ids[1:]] - norm).sum())
print(json.dumps(total))
"""


def windows(model: Path, texts: list[Path], width: int) -> Windows:
    """The texts, one after the other, as windows of tokens. The incomplete last window is dropped."""
    ids = Tokenizer.load(model).encode("\n".join(path.read_text(encoding="utf-8") for path in texts))
    return [ids[start : start + width] for start in range(0, len(ids) - width + 1, width)]


async def through_personae(model: Path, dtype: str, parts: Windows) -> float:
    """The sum of the log-probabilities."""
    total = 0.0
    async with personae.open(model, dtype=dtype, device="cpu") as engine:
        for ids in parts:
            answer = await engine.complete(ids, echo=True, logprobs=0, max_tokens=0)
            assert answer.choices[0].logprobs
            total += sum(one for one in answer.choices[0].logprobs.token_logprobs if one is not None)
    return total


def through_transformers(model: Path, parts: Windows) -> float:
    """The same with transformers' own reading of the file, in float32."""
    reference = Reference(Source(model, {}))
    return sum(sum(reference.logprobs(None, ids)) for ids in parts)


def through_llama(model: Path, python: Path, width: int, parts: Windows) -> float:
    """The same with llama.cpp, in a process of another environment."""
    done = subprocess.run(  # noqa: S603  # what the caller has named
        [str(python), "-c", _LLAMA, str(model), str(width)],
        input=json.dumps(parts),
        capture_output=True,
        text=True,
        check=True,
    )
    return float(json.loads(done.stdout))


def main(
    model: Annotated[Path, typer.Argument(help="A GGUF file.")],
    texts: Annotated[list[Path], typer.Argument(help="Files of plain text.")],
    width: Annotated[int, typer.Option(min=2, help="Tokens of a window.")] = 512,
    dtype: Annotated[list[str] | None, typer.Option(help="Of Personae; else all three. Repeatable.")] = None,
    llama: Annotated[Path | None, typer.Option(help="A Python that has llama-cpp-python.")] = None,
) -> None:
    """Measure and print."""
    parts = windows(model, texts, width)
    if not parts:
        raise typer.BadParameter("The texts have fewer tokens than a window.")
    scored = sum(len(ids) - 1 for ids in parts)
    found = {"transformers, float32": through_transformers(model, parts)}
    for name in dtype or DTYPES:
        found[f"Personae, {name}"] = anyio.run(through_personae, model, name, parts)
    if llama is not None:
        found["llama.cpp"] = through_llama(model, llama, width, parts)
    table = Table("", f"perplexity of {scored} tokens")
    for name, total in found.items():
        table.add_row(name, f"{math.exp(-total / scored):.4f}")
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
