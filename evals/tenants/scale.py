"""A thousand adapters against eight: throughput, memory, and whether each answers as it does alone.

    python -m personae.evals.tenants.scale --model models/smol135 --adapters 1000 --requests 320

Serves a model, uploads adapters of ranks 4 to 64, and asks them by Zipf's law, so many at a time; as many
requests go to the first eight of them. Rounds of both kinds alternate, each with prompts of its own; in the
first of the thousand nearly all adapters are read from disk. Then the requests of the last are asked again
alone and must bring the same tokens (in float32 that is promised). Prints tokens per second, where a step's
time went and what was loaded from where, the ratios, the server's memory and what `/metrics` says of
adapters. Exit code 1 if an answer differs. How much of the ratio is in the engine's own steps: `floor.py`.
"""

import os
import random
import re
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

# In this order a request has about as many ranks on average whether eight are asked or a thousand.
RANKS = (16, 32, 4, 64, 8)
FEW = 8
TOLD = ("personae:adapter", "personae:fairness_gap")

Answer = tuple[int, ...]
Requests = list[tuple[int, list[int]]]


def popularity(adapters: int) -> list[float]:
    """By Zipf's law with exponent 1."""
    return [1 / (n + 1) for n in range(adapters)]


class Traffic:
    """Requests, (adapter's number, prompt); the numbers follow Zipf's law with exponent 1."""

    def __init__(self, adapters: int, requests: int, tokens: int, prompt: int) -> None:
        self.tokens = tokens
        self.adapters = adapters
        self.requests = requests
        self.prompt = prompt

    def over(self, adapters: int, number: int) -> Requests:
        """The requests of a round, of the first so many adapters. No prompt comes twice."""
        rng = random.Random(f"{adapters} {number}")
        numbers = rng.choices(range(adapters), popularity(adapters), k=self.requests)
        return [(n, rng.choices(range(10, 1000), k=self.prompt)) for n in numbers]

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


def processor_of(pid: int) -> float:
    """Seconds that a process and its children have had a processor."""
    total = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            number, _, rest = stat.read_text().partition(" ")
        except OSError:
            continue
        fields = rest.rpartition(")")[2].split()
        if pid in (int(number), int(fields[1])):
            total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")


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
    """The report."""
    print(*words, flush=True)


async def figures_of(client: httpx.AsyncClient) -> dict[str, float]:
    """What `/metrics` says, by name and labels."""
    lines = (await client.get("/metrics")).text.splitlines()
    pairs = (line.rpartition(" ") for line in lines if line and not line.startswith("#"))
    return {name: float(value) for name, _, value in pairs}


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
        await traffic.run(client, traffic.over(FEW, -1)[:concurrency], concurrency)  # warm up
        speeds: dict[int, list[float]] = {FEW: [], traffic.adapters: []}
        answers: list[Answer] = []
        many: Requests = []
        for number in range(rounds):
            for adapters, found in speeds.items():
                many = traffic.over(adapters, number)
                before, busy = await figures_of(client), processor_of(served.pid)
                speed, answers = await traffic.run(client, many, concurrency)
                found.append(speed)
                busy = 1e3 * (processor_of(served.pid) - busy) / (len(many) * traffic.tokens)
                say(
                    f"{adapters} adapters: {speed:.1f} tokens/s, {busy:.2f} ms of processors each;",
                    where(before, await figures_of(client)),
                )
            say(f"  server's memory {memory_of(served.pid) / 2**20:.0f} MiB")
        few_speeds, many_speeds = speeds.values()
        say(f"for the first time: {many_speeds[0] / few_speeds[0]:.3f}")
        if rounds > 1:
            ratio = statistics.median(many_speeds[1:]) / statistics.median(few_speeds[1:])
            say(f"{traffic.adapters} adapters at {ratio:.3f} of the throughput of {FEW}, later rounds")
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
    bfloat16: Annotated[bool, typer.Option(help="Compute in that, not in float32.")] = False,
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
            f"{folder}/data",
        ]
        arguments += ["--adapter-memory", str(memory * 2**20), "--max-seqs", str(concurrency)]
        with Served(arguments, Path(folder) / "log") as served:
            right = anyio.run(measure, served, maker, traffic, concurrency, rounds)
    sys.exit(not right)


if __name__ == "__main__":
    typer.run(main)
