"""What binding costs over HTTP: the time per token of 32 answers bound by a schema, and of as many free ones.

    python -m personae.evals.bench.bound --model models/smol135 --rounds 5

A wave is `rows` greedy answers of the same length that begin together. Bound and free waves alternate,
because a machine's speed drifts. Time counts while all answers of a wave are being written. If some answers
ended early, the others would have the machine to themselves, and the result would not show the cost of a
mask. So there are two loads whose answers do not end early:

    far      the budgets are far larger than what is read; then the client disconnects
    closing  the budgets are used to the last token, and nearly every token is verified

The second load needs a model that never wants to end, such as one with random weights: a shorter answer is an
error. With `--url` a running server is measured; it needs as many slots as there are rows.
"""

import asyncio
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from personae.api.bundled import NAMED
from personae.api.commands.remote import server_root
from personae.errors import RequestError
from personae.evals.bench.client import Answer, Request, ask, get_json
from personae.evals.bench.masks import CLOSING, FAR, FORM, TEXTS
from personae.evals.bench.workload import Maker, Workload
from personae.evals.options import ModelOption
from personae.evals.served import Served, exit_on_sigterm

LOADS: dict[str, list[dict[str, Any]]] = {"far": [TEXTS, FORM], "closing": [CLOSING]}
PROMPT = 16  # words
KINDS = ("free", "bound")


def requests(load: str, model: str, rows: int, tokens: int, occasion: str, *, bound: bool) -> list[Request]:
    """The requests of a wave. Bound and free waves of one occasion have the same prompts."""
    maker = Maker(Workload(api="completions", prompt=str(PROMPT)), [model], occasion=occasion)
    made = []
    for number in range(rows):
        body: dict[str, Any] = {
            "model": model,
            "prompt": maker.make(number).body["prompt"],
            "max_tokens": FAR if load == "far" else tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream_options": {"continuous_usage_stats": True},
        }
        if bound:
            schema = LOADS[load][number % len(LOADS[load])]
            named = {"name": load, "schema": schema, "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": named}
        leave_after = tokens if load == "far" else None
        made.append(Request("/v1/completions", body, leave_after=leave_after))
    return made


async def wave(url: str, sent: Sequence[Request]) -> list[Answer]:
    """Sends all requests at once. Raises RequestError if one is not answered, or ends before its budget."""
    answers = await asyncio.gather(*(ask(url, request) for request in sent))
    for answer in answers:
        if answer.error:
            raise RequestError(f"{url} does not answer: {answer.error}.")
        if answer.complete and answer.tokens < answer.request.body["max_tokens"]:
            raise RequestError(
                f"An answer of {answer.tokens} tokens ended before its budget: this model ends."
            )
    return list(answers)


def seconds_a_token(answers: Sequence[Answer]) -> float:
    """The mean seconds per token, from where the last answer has begun to where the first one ends. Events
    may have several tokens, or come with pauses."""
    received = [list(zip(_times(answer), answer.counts, strict=True)) for answer in answers]
    begin, end = max(one[0][0] for one in received), min(one[-1][0] for one in received)
    each = []
    for one in received:
        (begun, first), *_, (ended, last) = (event for event in one if begin <= event[0] <= end)
        each.append((ended - begun) / (last - first))
    return statistics.fmean(each)


def _times(answer: Answer) -> Iterator[float]:
    assert answer.first is not None
    return accumulate(answer.gaps, initial=answer.sent + answer.first)


async def measure(
    url: str, model: str, load: str, rows: int, tokens: int, rounds: int
) -> dict[str, list[float]]:
    """Seconds per token of free and bound waves, one of each per round."""
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for number in range(-1, rounds):  # the first round compiles and starts every thread
        for kind in KINDS if number % 2 else KINDS[::-1]:
            sent = requests(load, model, rows, tokens, f"{load} {number}", bound=kind == "bound")
            seconds = seconds_a_token(await wave(url, sent))
            if number >= 0:
                found[kind].append(seconds)
    return found


def main(
    model: ModelOption = None,
    url: Annotated[str | None, typer.Option(help="A server that runs; else one is started.")] = None,
    rows: Annotated[int, typer.Option(min=1, help="Answers that are written together.")] = 32,
    tokens: Annotated[int, typer.Option(min=96, help="Of an answer.")] = 128,
    rounds: Annotated[int, typer.Option(min=1, help="A bound wave and a free one each.")] = 5,
    load: Annotated[list[str] | None, typer.Option(help="far or closing; else both.")] = None,
) -> None:
    """Measure and print."""
    table = Table("load", "free, ms a token", "bound", "round by round: median (least to most)")
    with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        if url is None:
            stack.enter_context(exit_on_sigterm())
            arguments = [str(model or NAMED), "--max-seqs", str(rows)]
            url = stack.enter_context(Served(arguments, Path(folder) / "server.log")).url
        root = server_root(url)
        served = asyncio.run(get_json(root, "/v1/models"))["data"][0]["id"]
        for name in load or LOADS:
            found = asyncio.run(measure(root, served, name, rows, tokens, rounds))
            free, bound = (found[kind] for kind in KINDS)
            over = sorted(100 * (tied / loose - 1) for loose, tied in zip(free, bound, strict=True))
            table.add_row(
                name,
                *(f"{1000 * statistics.median(of):.1f}" for of in (free, bound)),
                f"{statistics.median(over):+.1f} % ({over[0]:+.1f} to {over[-1]:+.1f})",
            )
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
