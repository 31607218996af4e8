"""A large adapter is uploaded and loaded cold while others stream: how much longer do their gaps get?

    python -m personae.evals.tenants.stall --model models/smol135 --megabytes 100

Sixteen streams run all the while. First nothing else happens; then an adapter of that size is uploaded, and
as soon as it is there, asked. Prints p50, p99 and the largest gap between tokens of the streams in both
spans, and the time of the upload and of the cold request. The gaps are meant to grow by no more than a step
at p99.
"""

import random
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import anyio
import httpx
import torch
import typer

from personae.api.local import DEMO
from personae.evals.served import Served
from personae.evals.tenants.making import AdapterMaker, push

STREAMS = 16
MOST_RANKS = 512  # of one adapter


async def stream(client: httpx.AsyncClient, model: str, number: int, arrivals: list[float]) -> None:
    """Notes when each event of an endless answer comes, starting over when it ends."""
    prompt = random.Random(number).choices(range(10, 1000), k=32)
    body = {"model": model, "prompt": prompt, "max_tokens": 900, "temperature": 0, "ignore_eos": True}
    while True:
        async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
            async for line in response.aiter_lines():
                if line.startswith("data:"):
                    arrivals.append(time.perf_counter())  # noqa: PERF401  seen while it grows
        arrivals.append(float("nan"))  # the pause between two answers is no gap


def gaps(arrivals: list[list[float]], begin: float, end: float) -> list[float]:
    """Seconds between neighbours within the span."""
    found = []
    for times in arrivals:
        found += [b - a for a, b in pairwise(times) if begin <= a and b <= end]
    return sorted(found)


def say(what: str, found: list[float]) -> None:
    """One line of the report."""
    p99 = found[int(len(found) * 0.99)]
    print(
        f"{what}: {len(found)} gaps, p50 {statistics.median(found) * 1e3:.1f} ms, "
        f"p99 {p99 * 1e3:.1f}, largest {found[-1] * 1e3:.1f}",
        flush=True,
    )


async def measure(served: Served, model: str, files: dict[str, bytes], seconds: float) -> None:
    """Both spans."""
    arrivals: list[list[float]] = [[] for _ in range(STREAMS)]
    limits = httpx.Limits(max_connections=STREAMS + 4)
    async with (
        httpx.AsyncClient(base_url=served.url, timeout=600, limits=limits) as client,
        anyio.create_task_group() as tasks,
    ):
        for number in range(STREAMS):
            tasks.start_soon(stream, client, model, number, arrivals[number])
        while min(map(len, arrivals)) < 20:  # noqa: ASYNC110  the arrivals are plain lists
            await anyio.sleep(0.1)
        quiet = time.perf_counter()
        await anyio.sleep(seconds)
        begun = time.perf_counter()
        await push(client, "large", files)
        uploaded = time.perf_counter()
        cold = {"model": "large", "prompt": "Hello", "max_tokens": 8}
        (await client.post("/v1/completions", json=cold)).raise_for_status()
        answered = time.perf_counter()
        tasks.cancel_scope.cancel()
    say("nothing else", gaps(arrivals, quiet, begun))
    say("upload", gaps(arrivals, begun, uploaded))
    say("cold load", gaps(arrivals, uploaded, answered))
    say("upload and cold load", gaps(arrivals, begun, answered))
    size = sum(map(len, files.values())) / 1e6
    print(
        f"{size:.0f} MB uploaded in {uploaded - begun:.1f} s, its first answer in {answered - uploaded:.1f} s"
    )


def main(
    model: Annotated[Path, typer.Option(help="A model folder.")] = DEMO / "model",
    megabytes: Annotated[int, typer.Option(help="Size of the adapter; at most 512 ranks.")] = 100,
    seconds: Annotated[float, typer.Option(help="Of the span without an upload.")] = 20.0,
) -> None:
    """Measure."""
    maker = AdapterMaker(model)
    rank = min(megabytes * 10**6 // maker.bytes_per_rank(), MOST_RANKS)
    files = maker.make(rank, 0)
    with tempfile.TemporaryDirectory() as folder:
        memory = 2 * maker.bytes_per_rank(torch.float32) * (rank + 8)
        arguments = [str(model), "--data-dir", f"{folder}/data", "--adapter-memory", str(memory)]
        with Served(arguments, Path(folder) / "log") as served:
            anyio.run(measure, served, model.resolve().name, files, seconds)


if __name__ == "__main__":
    typer.run(main)
