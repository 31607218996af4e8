"""A thousand adapters against eight: throughput, memory, and whether each answers as it does alone.

    python -m personae.evals.tenants.scale --model models/smol135 --adapters 1000 --requests 320

Serves a model, uploads adapters of ranks 4 to 64, and asks them by Zipf's law, so many at a time; the same
requests go to the first eight of them too. Rounds of both kinds alternate. Then every request is asked again
alone and must bring the same tokens (in float32 that is promised). Prints tokens per second, their ratio, the
server's memory and what `/metrics` says of adapters. Exit code 1 if an answer differs.
"""

import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import anyio
import httpx
import torch
import typer

from personae.api.local import DEMO
from personae.evals.served import Served, exit_on_sigterm
from personae.evals.tenants.making import AdapterMaker, push

RANKS = (4, 8, 16, 32, 64)
FEW = 8
TOLD = ("personae:adapter", "personae:fairness_gap")

Answer = tuple[int, ...]


class Traffic:
    """Requests, (adapter's number, prompt); the numbers follow Zipf's law with exponent 1."""

    def __init__(self, adapters: int, requests: int, tokens: int, prompt: int) -> None:
        rng = random.Random(0)
        self.tokens = tokens
        self.adapters = adapters
        self.prompts = [rng.choices(range(10, 1000), k=prompt) for _ in range(requests)]

    def over(self, adapters: int) -> list[tuple[int, list[int]]]:
        """The requests, of the first so many adapters."""
        weights = [1 / (n + 1) for n in range(adapters)]
        numbers = random.Random(1).choices(range(adapters), weights, k=len(self.prompts))
        return list(zip(numbers, self.prompts, strict=True))

    async def ask(self, client: httpx.AsyncClient, number: int, prompt: list[int]) -> Answer:
        """One request."""
        body = {"model": f"a{number}", "prompt": prompt, "max_tokens": self.tokens, "temperature": 0}
        flags = {"ignore_eos": True, "return_token_ids": True}
        response = await client.post("/v1/completions", json={**body, **flags})
        response.raise_for_status()
        return tuple(response.json()["choices"][0]["token_ids"])

    async def run(
        self, client: httpx.AsyncClient, requests: Sequence[tuple[int, list[int]]], concurrency: int
    ) -> tuple[float, list[Answer]]:
        """Tokens per second of a closed loop, and the answers."""
        answers: list[Answer] = [()] * len(requests)
        queue = iter(enumerate(requests))

        async def work() -> None:
            for index, (number, prompt) in queue:
                answers[index] = await self.ask(client, number, prompt)

        begun = time.monotonic()
        async with anyio.create_task_group() as tasks:
            for _ in range(concurrency):
                tasks.start_soon(work)
        return sum(map(len, answers)) / (time.monotonic() - begun), answers


def memory_of(pid: int) -> int:
    """Bytes that a process and its children hold."""
    total = 0
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            fields = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
        except OSError:
            continue
        if pid in (int(fields["Pid"]), int(fields["PPid"])):
            total += int(fields.get("VmRSS", "0 kB").split()[0]) * 1024
    return total


def say(*words: Any) -> None:
    """The report."""
    print(*words, flush=True)


async def measure(
    served: Served, maker: AdapterMaker, traffic: Traffic, concurrency: int, rounds: int
) -> bool:
    """Upload, measure, verify; whether all answers are right."""
    limits = httpx.Limits(max_connections=concurrency + 2)
    async with httpx.AsyncClient(base_url=served.url, timeout=600, limits=limits) as client:
        begun = time.monotonic()
        for number in range(traffic.adapters):
            await push(client, f"a{number}", maker.make(RANKS[number % len(RANKS)], number, torch.float16))
        say(f"{traffic.adapters} adapters uploaded in {time.monotonic() - begun:.0f} s")
        few, many = traffic.over(FEW), traffic.over(traffic.adapters)
        await traffic.run(client, few[:concurrency], concurrency)  # warm up
        speeds: dict[str, list[float]] = {"few": [], "many": []}
        answers: list[Answer] = []
        for _ in range(rounds):
            for name, requests in (("few", few), ("many", many)):
                speed, answers = await traffic.run(client, requests, concurrency)
                speeds[name].append(speed)
                say(f"{name}: {speed:.1f} tokens/s; server's memory {memory_of(served.pid) / 2**20:.0f} MiB")
        ratio = statistics.median(speeds["many"]) / statistics.median(speeds["few"])
        say(f"{traffic.adapters} adapters at {ratio:.3f} of the throughput of {FEW}")
        for line in (await client.get("/metrics")).text.splitlines():
            if line.startswith(TOLD):
                say("  ", line)
        _, alone = await traffic.run(client, many, 1)
        different = sum(one != other for one, other in zip(answers, alone, strict=True))
        say(f"{len(alone)} requests asked again alone: {different} differ")
        return not different


def main(
    model: Annotated[Path, typer.Option(help="A model folder.")] = DEMO / "model",
    adapters: Annotated[int, typer.Option(help="How many adapters.")] = 1000,
    requests: Annotated[int, typer.Option(help="Requests a round.")] = 320,
    concurrency: Annotated[int, typer.Option(help="Requests at a time.")] = 32,
    tokens: Annotated[int, typer.Option(help="Of an answer.")] = 32,
    prompt: Annotated[int, typer.Option(help="Tokens of a prompt.")] = 64,
    rounds: Annotated[int, typer.Option(help="Of either kind.")] = 3,
    targets: Annotated[str, typer.Option(help="Modules that adapters change.")] = "q,v",
    memory: Annotated[int, typer.Option(help="--adapter-memory, in MiB.")] = 256,
) -> None:
    """Measure."""
    maker = AdapterMaker(model, tuple(targets.split(",")))
    traffic = Traffic(adapters, requests, tokens, prompt)
    with exit_on_sigterm(), tempfile.TemporaryDirectory() as folder:
        arguments = [str(model), "--dtype", "float32", "--data-dir", f"{folder}/data"]
        arguments += ["--adapter-memory", str(memory * 2**20), "--max-seqs", str(concurrency)]
        with Served(arguments, Path(folder) / "log") as served:
            right = anyio.run(measure, served, maker, traffic, concurrency, rounds)
    sys.exit(not right)


if __name__ == "__main__":
    typer.run(main)
