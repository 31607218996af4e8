"""Two engines with one core each compared with one engine with two cores, in alternation.

    python -m personae.evals.replica_throughput --rounds 10
    python -m personae.evals.replica_throughput --model models/smol135 --streams 16

All engines are open all the time, and one of the two servers works at a time. Prints the tokens per second of
each round, their medians, the median of the rounds' ratios, and the load average at the end. Measure on an
idle machine: with other programs running, two processes get a larger share of the cores than one does, and a
product of several threads waits for the slowest one.
"""

import os
import statistics
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import anyio
import typer

from personae.actors.client import EngineClient
from personae.actors.options import EngineOptions
from personae.actors.process import ChildProcess
from personae.actors.replicas.launch import launch_replicas
from personae.actors.replicas.source import LocalSource
from personae.actors.spawn import COMMAND
from personae.api.bundled import NAMED, bundled
from personae.engine.tokens import Tokenizer
from personae.evals.replica_overhead import Client


@asynccontextmanager
async def engines(options: EngineOptions, count: int, threads: int) -> AsyncIterator[EngineClient]:
    """`count` engines with as many threads each, behind one dispatcher."""
    launch = partial(ChildProcess.launch, COMMAND, {"OMP_NUM_THREADS": str(threads)})
    tokenizer = Tokenizer.load(options.model)
    async with launch_replicas(LocalSource([launch] * count), count, options, tokenizer) as serving:
        yield serving.client


async def run(options: EngineOptions, rounds: int, streams: int, tokens: int) -> None:
    """Measure and print."""
    async with AsyncExitStack() as stack:
        one = Client(await stack.enter_async_context(engines(options, 1, 2)))
        two = Client(await stack.enter_async_context(engines(replace(options, share=2), 2, 1)))
        for client in (one, two):
            await client.rate(streams, tokens)
        measured: list[tuple[float, float]] = []
        for number in range(rounds):
            rates: dict[Client, float] = {}
            for client in (one, two) if number % 2 else (two, one):
                rates[client] = await client.rate(streams, tokens)
            measured.append((rates[one], rates[two]))
            print(f"1 engine, 2 cores: {rates[one]:.0f} tokens/s; 2 engines, 1 core each: {rates[two]:.0f}")
    medians = [statistics.median(column) for column in zip(*measured, strict=True)]
    ratio = statistics.median(b / a for a, b in measured)
    print(
        f"medians of {rounds} rounds: {medians[0]:.0f} and {medians[1]:.0f} tokens/s; ratio {ratio:.2f}; "
        f"load average {os.getloadavg()[0]:.0f}"
    )


def main(
    model: Annotated[Path | None, typer.Option(help="A model folder; else the small bundled one.")] = None,
    rounds: Annotated[int, typer.Option(min=1)] = 10,
    streams: Annotated[int, typer.Option(min=1)] = 32,
    tokens: Annotated[int, typer.Option(min=1)] = 256,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "bfloat16",
) -> None:
    """Run."""
    small = bundled(NAMED)
    assert small is not None
    options = EngineOptions(
        model or small.model,
        dtype=dtype,  # type: ignore[arg-type]  # the engine refuses another
        max_seqs=max(streams, 8),
    )
    anyio.run(run, options, rounds, streams, tokens, backend_options={"use_uvloop": True})


if __name__ == "__main__":
    typer.run(main)
