"""A large adapter is uploaded and loaded cold while others stream: how much longer do their gaps become?

    python -m personae.evals.tenants.stall --model models/smol135 --megabytes 100

Sixteen streams run all the time. In each round first nothing else happens; then an adapter of that size is
uploaded, and used as soon as it is there. Prints p50, p99 and the largest gap between the streams' tokens in
each span, and by how many steps (median gaps of the first span) the p99 of the later spans exceeds that of
the first. The goal is at most one. A round in which other processes used the processors says nothing about
the server, so their share is printed.
"""

import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import anyio
import httpx
import torch
import typer

from personae.api import sse
from personae.api.bundled import DEMO
from personae.evals.processes import Others
from personae.evals.served import Served, exit_on_sigterm
from personae.evals.tenants.making import AdapterMaker, upload_of

STREAMS = 16
MOST_RANKS = 512  # per adapter
_SENDER = """
import os, socket, sys
os.nice(10)
with socket.create_connection((sys.argv[1], int(sys.argv[2]))) as connection, open(sys.argv[3], "rb") as form:
    connection.sendfile(form)
    while part := connection.recv(65536):
        sys.stdout.buffer.write(part)
"""


async def stream(client: httpx.AsyncClient, model: str, number: int, arrivals: list[float]) -> None:
    """Records when each event of an endless answer arrives. Starts again when it ends."""
    prompt = random.Random(number).choices(range(10, 1000), k=32)
    body = {"model": model, "prompt": prompt, "max_tokens": 900, "temperature": 0, "ignore_eos": True}
    while True:
        async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
            async for line in sse.async_lines(response):
                if line.startswith("data:"):
                    arrivals.append(time.perf_counter())  # noqa: PERF401  seen while it grows
        arrivals.append(float("nan"))  # the pause between two answers is not a gap


def gaps(arrivals: list[list[float]], begin: float, end: float) -> list[float]:
    """Seconds between neighbouring events within the span."""
    found = []
    for times in arrivals:
        found += [b - a for a, b in pairwise(times) if begin <= a and b <= end]
    return sorted(found)


def p99(found: list[float]) -> float:
    """Of sorted seconds."""
    return found[int(len(found) * 0.99)]


def say(what: str, found: list[float]) -> None:
    """Print one line of the report."""
    print(
        f"{what}: {len(found)} gaps, p50 {statistics.median(found) * 1e3:.1f} ms, "
        f"p99 {p99(found) * 1e3:.1f}, largest {found[-1] * 1e3:.1f}",
        flush=True,
    )


def write_form(maker: AdapterMaker, rank: int, seed: int, url: str, path: Path) -> None:
    """Make an adapter, and write the whole request that uploads it to a file."""
    request = upload_of("large", maker.make(rank, seed), url)
    head = "\r\n".join(f"{name}: {value}" for name, value in request.headers.items())
    with path.open("wb") as file:
        file.write(f"POST /v1/adapters HTTP/1.1\r\n{head}\r\nconnection: close\r\n\r\n".encode())
        file.write(request.read())


async def send(url: str, form: Path) -> None:
    """Upload from a separate process, which takes no time from the streams' client and little from the
    server, as another machine would."""
    server = httpx.URL(url)
    command = [sys.executable, "-IS", "-c", _SENDER, server.host, str(server.port), str(form)]
    answer = (await anyio.run_process(command)).stdout
    if b" 201 " not in answer.partition(b"\r\n")[0]:
        raise RuntimeError(f"the upload was refused: {answer[:500]!r}")


@dataclass(frozen=True, slots=True)
class Round:
    """Gaps of one round, in seconds, sorted."""

    quiet: list[float]
    upload: list[float]
    cold: list[float]

    @property
    def growth(self) -> float:
        """How much longer the upload and the cold load made the p99, in steps."""
        step = statistics.median(self.quiet)
        return (p99(sorted(self.upload + self.cold)) - p99(self.quiet)) / step


async def play(
    served: Served, client: httpx.AsyncClient, arrivals: list[list[float]], form: Path, seconds: float
) -> Round:
    """Nothing, an upload, a cold load. Prints each."""
    quiet, others = time.perf_counter(), Others(served.pid)
    await anyio.sleep(seconds)
    begun = time.perf_counter()
    await send(str(client.base_url), form)
    uploaded = time.perf_counter()
    cold = {"model": "large", "prompt": "Hello", "max_tokens": 8}
    (await client.post("/v1/completions", json=cold)).raise_for_status()
    answered = time.perf_counter()
    found = Round(
        gaps(arrivals, quiet, begun), gaps(arrivals, begun, uploaded), gaps(arrivals, uploaded, answered)
    )
    say("nothing else", found.quiet)
    say(f"upload, {uploaded - begun:.1f} s", found.upload)
    say(f"cold load and answer, {answered - uploaded:.1f} s", found.cold)
    print(
        f"p99 longer by {found.growth:.2f} steps; others had {others.share():.0%} of the processors",
        flush=True,
    )
    return found


async def measure(
    served: Served, model: str, maker: AdapterMaker, rank: int, seconds: float, rounds: int, form: Path
) -> None:
    """All rounds. `form` is a file for the uploads."""
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
        found = []
        for number in range(rounds):
            await anyio.to_thread.run_sync(write_form, maker, rank, number, served.url, form)
            found.append(await play(served, client, arrivals, form, seconds))
        tasks.cancel_scope.cancel()
    growth = statistics.median(one.growth for one in found)
    print(f"median of {rounds}: p99 longer by {growth:.2f} steps")


def main(
    model: Annotated[Path, typer.Option(help="A model folder.")] = DEMO / "model",
    megabytes: Annotated[int, typer.Option(help="Size of the adapter; at most 512 ranks.")] = 100,
    seconds: Annotated[float, typer.Option(help="Of the spans without an upload.")] = 10.0,
    rounds: Annotated[int, typer.Option(help="Each with another adapter.")] = 3,
) -> None:
    """Measure."""
    maker = AdapterMaker(model)
    rank = min(megabytes * 10**6 // maker.bytes_per_rank(), MOST_RANKS)
    print(f"an adapter of {rank * maker.bytes_per_rank() / 1e6:.0f} MB")
    with exit_on_sigterm(), tempfile.TemporaryDirectory() as folder:
        memory = 2 * maker.bytes_per_rank(torch.float32) * (rank + 8)
        arguments = [str(model), "--data-dir", f"{folder}/data", "--adapter-memory", str(memory)]
        with Served(arguments, Path(folder) / "log") as served:
            anyio.run(
                measure, served, model.resolve().name, maker, rank, seconds, rounds, Path(folder) / "form"
            )


if __name__ == "__main__":
    typer.run(main)
