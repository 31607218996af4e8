"""What an open console costs a server under load: the same streams with its polls and without, in turn.

    python -m personae.evals.console_cost --rounds 10 --consoles 40

A console on its page Live asks `GET /v1/stats` every two seconds. What one costs is less than what a busy
machine lets one see, so many are open at once: divide. Prints the size of an answer, the processor
time that the server takes for one, and the medians of the rounds: tokens a second, and tokens for a second of
the server's processor time, which hardly depends on what else the machine does.
"""

import os
import statistics
import time
from pathlib import Path
from typing import Annotated, NamedTuple

import anyio
import httpx
import typer

from personae.evals.bench.client import Request, ask
from personae.evals.served import Served

EVERY = 2.0  # seconds between two polls, as in `api/console/static/live.js`
PATIENCE = 300.0  # seconds, of a machine that has much else to do
POLLS = 300  # that are timed, one after the other
_TICK = os.sysconf("SC_CLK_TCK")


class Round(NamedTuple):
    """What one run of the streams came to."""

    rate: float
    per_cpu: float


def cpu_seconds(pid: int) -> float:
    """Processor time of the server's process and of its children."""
    total = 0.0
    for each in (pid, *map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())):
        fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
        total += (int(fields[11]) + int(fields[12])) / _TICK
    return total


async def one_round(server: Served, model: str, streams: int, tokens: int, consoles: int) -> Round:
    """Run the streams to their end, with so many consoles open."""
    begun, used = time.perf_counter(), cpu_seconds(server.pid)
    async with (
        httpx.AsyncClient(base_url=server.url, timeout=PATIENCE) as client,
        anyio.create_task_group() as polling,
    ):
        for number in range(consoles):
            polling.start_soon(_poll, client, EVERY * number / consoles)
        async with anyio.create_task_group() as tasks:
            for number in range(streams):
                body = {"model": model, "prompt": f"{number} Once", "max_tokens": tokens, "seed": number}
                body |= {"ignore_eos": True, "stream": True}
                tasks.start_soon(ask, server.url, Request("/v1/completions", body))
        polling.cancel_scope.cancel()
    seconds, cpu = time.perf_counter() - begun, cpu_seconds(server.pid) - used
    return Round(streams * tokens / seconds, streams * tokens / cpu)


async def _poll(client: httpx.AsyncClient, delay: float) -> None:
    await anyio.sleep(delay)
    while True:
        (await client.get("/v1/stats")).raise_for_status()
        await anyio.sleep(EVERY)


async def run(rounds: int, streams: int, tokens: int, consoles: int) -> None:
    """Measure and print."""
    with Served(["demo", "--device", "cpu"], Path(os.devnull)) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE) as client:
            model = (await client.get("/v1/models")).json()["data"][0]["id"]
            await one_round(server, model, streams, tokens, 0)
            used = cpu_seconds(server.pid)
            for _ in range(POLLS):
                answer = await client.get("/v1/stats")
            cost = (cpu_seconds(server.pid) - used) / POLLS
            print(f"a poll: {len(answer.content):,} bytes, {1000 * cost:.2f} ms of processor time")
            print(f"every {EVERY:g} s that is {cost / EVERY:.3%} of a core")
        pairs: list[tuple[Round, Round]] = []
        for number in range(rounds):
            order = (0, consoles) if number % 2 else (consoles, 0)
            made = {count: await one_round(server, model, streams, tokens, count) for count in order}
            pairs.append((made[0], made[consoles]))
    for name, field in (("tokens/s", "rate"), ("tokens for a processor second", "per_cpu")):
        without, with_it = ([getattr(pair[on], field) for pair in pairs] for on in (0, 1))
        ratios = sorted(one / other - 1 for other, one in zip(without, with_it, strict=True))
        middle, least, most = statistics.median(ratios), ratios[0], ratios[-1]
        print(
            f"{name}: {statistics.median(without):.1f}, with {consoles} open {statistics.median(with_it):.1f}"
        )
        print(f"  median of the ratios of {rounds} rounds {middle:+.2%}, from {least:+.1%} to {most:+.1%}")


def main(
    rounds: Annotated[int, typer.Option(min=1)] = 10,
    streams: Annotated[int, typer.Option(min=1)] = 16,
    tokens: Annotated[int, typer.Option(min=1)] = 200,
    consoles: Annotated[int, typer.Option(min=1)] = 40,
) -> None:
    """Run."""
    anyio.run(run, rounds, streams, tokens, consoles, backend_options={"use_uvloop": True})


if __name__ == "__main__":
    typer.run(main)
