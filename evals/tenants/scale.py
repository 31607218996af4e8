"""A thousand adapters compared with eight: throughput, memory, and whether each answers as it does alone.

    python -m personae.evals.tenants.scale --model models/smol135 --bfloat16 --requests 96 --memory 512

Serves a model, uploads adapters of ranks 4 to 64, and sends them requests by Zipf's law, many at a time. As
many requests go to the first eight adapters. Every round has new prompts. In the first round of the thousand
nearly all adapters are read from disk. A machine's speed may change by a fifth within a minute. So rounds are
short and come in pairs, in alternating order, and the result is the median of the pairs' ratios. Then the
last requests of the thousand are sent again alone and must give the same tokens (which float32 guarantees).
Prints tokens per second, where a step's time went and what was loaded from where, the ratios, the server's
memory and what `/metrics` says about adapters. Exit code 1 if an answer differs. `floor.py` shows how much of
the ratio is in the engine's own steps. With `--data` the adapters are kept for the next run.
"""

import random
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import anyio
import httpx
import torch
import typer

from personae.api.bundled import DEMO
from personae.evals.processes import Others, memory_of, processor_of
from personae.evals.served import Served, exit_on_sigterm
from personae.evals.tenants.making import AdapterMaker, push

# In this order the mean rank of a request is about the same for eight adapters as for a thousand.
RANKS = (16, 32, 4, 64, 8)
FEW = 8
TOLD = ("personae:adapter", "personae:fairness_gap")

Answer = tuple[int, ...]
Requests = list[tuple[int, list[int], int]]


def popularity(adapters: int) -> list[float]:
    """Zipf's law with exponent 1."""
    return [1 / (n + 1) for n in range(adapters)]


class Traffic:
    """Requests, (adapter's number, prompt, tokens of the answer). The numbers follow Zipf's law with exponent
    1. Answers have from half to one and a half times `tokens`. If all had the same length, those that began
    together would end together, and the next prompts would be one large batch."""

    def __init__(self, adapters: int, requests: int, tokens: int, prompt: int) -> None:
        self.tokens = tokens
        self.adapters = adapters
        self.requests = requests
        self.prompt = prompt

    def over(self, adapters: int, number: int) -> Requests:
        """The requests of a round, of the first adapters. No prompt repeats. The lengths of answers do not
        depend on the adapters."""
        rng, lengths = random.Random(f"{adapters} {number}"), random.Random(number)
        numbers = rng.choices(range(adapters), popularity(adapters), k=self.requests)
        return [
            (
                n,
                rng.choices(range(10, 1000), k=self.prompt),
                lengths.randint(self.tokens // 2, self.tokens * 3 // 2),
            )
            for n in numbers
        ]

    async def ask(self, client: httpx.AsyncClient, number: int, prompt: list[int], tokens: int) -> Answer:
        """One request."""
        body = {"model": f"a{number}", "prompt": prompt, "max_tokens": tokens, "temperature": 0}
        flags = {"ignore_eos": True, "return_token_ids": True}
        response = await client.post("/v1/completions", json={**body, **flags})
        response.raise_for_status()
        return tuple(response.json()["choices"][0]["token_ids"])

    async def run(
        self, client: httpx.AsyncClient, requests: Requests, concurrency: int
    ) -> tuple[float, list[Answer]]:
        """Tokens per second of a closed loop, and the answers."""
        answers: list[Answer] = [()] * len(requests)
        queue = iter(enumerate(requests))

        async def work() -> None:
            for index, (number, prompt, tokens) in queue:
                answers[index] = await self.ask(client, number, prompt, tokens)

        begun = time.monotonic()
        async with anyio.create_task_group() as tasks:
            for _ in range(concurrency):
                tasks.start_soon(work)
        return sum(map(len, answers)) / (time.monotonic() - begun), answers


def where(before: dict[str, float], after: dict[str, float]) -> str:
    """Where the time of a round went, and what was loaded from where."""
    grown = {name: value - before.get(name, 0.0) for name, value in after.items()}

    def of(start: str) -> float:
        return sum(value for name, value in grown.items() if name.startswith(start))

    steps = max(of("personae:steps_total"), 1)
    parts = {
        "step": of("personae:step_seconds_total"),
        "gap": of("personae:host_gap_seconds_total"),
        "placing": of('personae:step_part_seconds_total{part="place"'),
    }
    loads = re.compile(r'personae:adapter_loads_total\{source="(\w+)"\}')
    loaded = {match[1]: value for name, value in grown.items() if value and (match := loads.match(name))}
    return (
        f"{steps:.0f} steps of {of('personae:step_tokens_total') / steps:.1f} tokens, ms each: "
        + ", ".join(f"{name} {1e3 * seconds / steps:.2f}" for name, seconds in parts.items())
        + "; loads from "
        + ", ".join(f"{source} {value:.0f}" for source, value in loaded.items())
    )


def say(*words: Any) -> None:
    """Print the report."""
    print(*words, flush=True)


async def figures_of(client: httpx.AsyncClient) -> dict[str, float]:
    """The figures of `/metrics`, by name and labels."""
    lines = (await client.get("/metrics")).text.splitlines()
    pairs = (line.rpartition(" ") for line in lines if line and not line.startswith("#"))
    return {name: float(value) for name, _, value in pairs}


async def upload(client: httpx.AsyncClient, maker: AdapterMaker, adapters: int) -> None:
    """Upload all adapters that the server does not have yet."""
    begun = time.monotonic()
    there = {adapter["name"] for adapter in (await client.get("/v1/adapters")).json()["data"]}
    missing = [number for number in range(adapters) if f"a{number}" not in there]
    for number in missing:
        await push(client, f"a{number}", maker.make(RANKS[number % len(RANKS)], number, torch.float16))
    say(f"{len(missing)} adapters uploaded in {time.monotonic() - begun:.0f} s")


async def play(
    served: Served, client: httpx.AsyncClient, traffic: Traffic, asked: Requests, concurrency: int
) -> tuple[float, list[Answer]]:
    """One round: tokens per second, and the answers. Prints where the time went."""
    before, busy, others = await figures_of(client), processor_of(served.pid), Others(served.pid)
    speed, answers = await traffic.run(client, asked, concurrency)
    share = others.share()
    busy = 1e3 * (processor_of(served.pid) - busy) / sum(map(len, answers))
    say(
        f"{speed:.1f} tokens/s, {busy:.2f} ms of processors each, others had {share:.0%} of them;",
        where(before, await figures_of(client)),
    )
    return speed, answers


async def measure(
    served: Served, maker: AdapterMaker, traffic: Traffic, concurrency: int, rounds: int
) -> bool:
    """Upload, measure and verify. Returns whether all answers are right."""
    limits = httpx.Limits(max_connections=concurrency + 2)
    async with httpx.AsyncClient(base_url=served.url, timeout=600, limits=limits) as client:
        await upload(client, maker, traffic.adapters)
        await traffic.run(client, traffic.over(FEW, -1)[:concurrency], concurrency)  # warm up
        ratios: list[float] = []
        asked: dict[int, Requests] = {}
        answers: dict[int, list[Answer]] = {}
        for number in range(rounds):
            speeds: dict[int, float] = {}
            for adapters in (FEW, traffic.adapters)[:: 1 if number % 2 else -1]:
                asked[adapters] = traffic.over(adapters, number)
                print(f"{adapters} adapters: ", end="")
                speeds[adapters], answers[adapters] = await play(
                    served, client, traffic, asked[adapters], concurrency
                )
            ratios.append(speeds[traffic.adapters] / speeds[FEW])
            say(f"  {ratios[-1]:.3f}; the server's memory {memory_of(served.pid) / 2**20:.0f} MiB")
        say(f"{traffic.adapters} adapters at {ratios[0]:.3f} of the throughput of {FEW} for the first time")
        if rounds > 1:
            say(f"and at {statistics.median(ratios[1:]):.3f} by the median of the other pairs")
        for line in (await client.get("/metrics")).text.splitlines():
            if line.startswith(TOLD):
                say("  ", line)
        _, alone = await traffic.run(client, asked[traffic.adapters], 1)
        different = sum(one != other for one, other in zip(answers[traffic.adapters], alone, strict=True))
        say(f"{len(alone)} requests asked again alone: {different} differ")
        return not different


def main(
    model: Annotated[Path, typer.Option(help="A model folder.")] = DEMO / "model",
    adapters: Annotated[int, typer.Option(help="How many adapters.")] = 1000,
    requests: Annotated[int, typer.Option(help="Requests a round.")] = 128,
    concurrency: Annotated[int, typer.Option(help="Requests at a time.")] = 32,
    tokens: Annotated[int, typer.Option(help="Of an answer, on average.")] = 32,
    prompt: Annotated[int, typer.Option(help="Tokens of a prompt.")] = 64,
    rounds: Annotated[int, typer.Option(help="Of either kind.")] = 9,
    targets: Annotated[str, typer.Option(help="Modules that adapters change.")] = "q,v",
    memory: Annotated[int, typer.Option(help="--adapter-memory, in MiB.")] = 256,
    bfloat16: Annotated[bool, typer.Option(help="Compute in that, not in float32.")] = False,
    data: Annotated[Path | None, typer.Option(help="A --data-dir that stays.")] = None,
) -> None:
    """Measure."""
    maker = AdapterMaker(model, tuple(targets.split(",")))
    traffic = Traffic(adapters, requests, tokens, prompt)
    with exit_on_sigterm(), tempfile.TemporaryDirectory() as folder:
        arguments = [
            str(model),
            "--dtype",
            "bfloat16" if bfloat16 else "float32",
            "--data-dir",
            f"{data or Path(folder) / 'data'}",
        ]
        arguments += ["--adapter-memory", str(memory * 2**20), "--max-seqs", str(concurrency)]
        with Served(arguments, Path(folder) / "log") as served:
            right = anyio.run(measure, served, maker, traffic, concurrency, rounds)
    sys.exit(not right)


if __name__ == "__main__":
    typer.run(main)
