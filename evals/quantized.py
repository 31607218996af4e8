"""What fewer bits cost in quality: the bundled model and its adapters, on their held-out conversations.

    python -m personae.evals.quantized --count 64

Each task with its model, in bfloat16 and with each `--quantize`, through the same API: the perplexity of the
true answers, how many greedy answers are completely right, and how many are the same text as in bfloat16.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import anyio
import typer
from rich.console import Console
from rich.table import Table

import personae
from personae.api.bundled import NAMED
from personae.engine.quantization import QUANTIZATIONS
from personae.evals.demo import data
from personae.evals.demo.grading import grade, held_out
from personae.evals.demo.sample import END_OF_TURN, Sample

LIMIT = 192  # tokens of an answer
BASE = "personae-demo"


@dataclass(slots=True)
class TokenTrace:
    """The result of one sample: the true answer's logprob and number of tokens, and the model's answer."""

    logprob: float = 0.0
    tokens: int = 0
    text: str = ""


async def ask(tasks: dict[str, list[Sample]], quantize: str | None) -> dict[str, list[TokenTrace]]:
    """All samples of all tasks, each by the model that its task is for."""
    delivered = {task: [TokenTrace() for _ in samples] for task, samples in tasks.items()}
    async with personae.open(NAMED, dtype="bfloat16", quantize=quantize, device="cpu") as engine:

        async def one(task: str, sample: Sample, into: TokenTrace) -> None:
            model = task if task in data.ADAPTER_TASKS else BASE
            answer = await engine.complete(sample.prompt, model=model, temperature=0, max_tokens=LIMIT)
            into.text = answer.choices[0].text.partition(END_OF_TURN)[0]
            whole = sample.prompt + sample.completion
            echoed = await engine.complete(whole, model=model, echo=True, logprobs=0, max_tokens=0)
            assert answer.usage
            assert echoed.choices[0].logprobs
            true = echoed.choices[0].logprobs.token_logprobs[answer.usage.prompt_tokens :]
            into.logprob, into.tokens = sum(one for one in true if one is not None), len(true)

        async with anyio.create_task_group() as group:
            for task, samples in tasks.items():
                for sample, into in zip(samples, delivered[task], strict=True):
                    group.start_soon(one, task, sample, into)
    return delivered


def perplexity(delivered: Sequence[TokenTrace]) -> float:
    """The perplexity per token of the true answers."""
    return math.exp(-sum(one.logprob for one in delivered) / sum(one.tokens for one in delivered))


def right(samples: Sequence[Sample], delivered: Sequence[TokenTrace]) -> float:
    """The share of answers that are completely right."""
    grades = [grade(sample, one.text)["exact"] for sample, one in zip(samples, delivered, strict=True)]
    return sum(grades) / len(grades)


def agreement(delivered: Sequence[TokenTrace], other: Sequence[TokenTrace]) -> float:
    """Share of answers that are the same text."""
    return sum(one.text == two.text for one, two in zip(delivered, other, strict=True)) / len(delivered)


def table(tasks: dict[str, list[Sample]]) -> Table:
    """Ask in all ways and compare."""
    delivered = [anyio.run(ask, tasks, quantize) for quantize in (None, *QUANTIZATIONS)]
    ways, same = ("bfloat16", *QUANTIZATIONS), [f"same text, {way}" for way in QUANTIZATIONS]
    found = Table("task", *(f"perplexity, {way}" for way in ways), *(f"right, {way}" for way in ways), *same)
    for task, samples in tasks.items():
        plain, *others = (way[task] for way in delivered)
        found.add_row(
            task,
            *(f"{perplexity(way[task]):.4f}" for way in delivered),
            *(f"{right(samples, way[task]):.1%}" for way in delivered),
            *(f"{agreement(plain, other):.1%}" for other in others),
        )
    return found


def main(
    count: Annotated[int, typer.Option(min=1, help="Held-out samples a task.")] = 64,
    task: Annotated[list[str] | None, typer.Option(help="Only this one. Repeatable.")] = None,
) -> None:
    """Measure and print."""
    names = task or [*data.TASKS, *data.ADAPTER_TASKS]
    console = Console()
    if not console.is_terminal:
        console.width = 132
    console.print(table({name: held_out(name, count) for name in names}))


if __name__ == "__main__":
    typer.run(main)
