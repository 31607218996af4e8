"""What grammars with slow masks cost other clients.

    python -m personae.evals.slow_grammars

Ambiguous grammars are sent to a server repeatedly, first one and then eight at a time, while another client
repeatedly requests 16 tokens. Calm and attack alternate. Prints the other client's first token (p50 and p99),
its longest wait between two tokens, the time of the 16 tokens (median), how the attackers' answers ended, and
the memory of the server's processes together.
"""

import os
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Annotated

import anyio
import anyio.to_process
import httpx
import typer
from rich.console import Console
from rich.table import Table

from personae.api import sse
from personae.evals.hostile import GRAMMARS, new_body, outcome_of
from personae.evals.served import Served

TOKENS = 16
SLOW = "GBNF: ambiguous"
SETTLE = 3.0  # seconds after an attack


@dataclass(slots=True)
class Seen:
    """The other client's times in seconds, and how the attackers' answers ended."""

    first: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    bytes: list[int] = field(default_factory=list)

    def row(self) -> list[str]:
        """A row of the table: milliseconds and MiB."""
        first = sorted(self.first)
        p99 = first[min(int(0.99 * len(first)), len(first) - 1)]
        times = (statistics.median(first), p99, max(self.gaps), statistics.median(self.whole))
        outcomes = ", ".join(f"{number} x {name}" for name, number in self.outcomes.most_common())
        memory = f"{statistics.median(self.bytes) / 2**20:.0f}"
        return [str(len(first)), *(f"{1e3 * seconds:.0f}" for seconds in times), memory, outcomes]


def memory_of(root: int) -> int:
    """Bytes of a process and all processes that it has started: each one's own memory and its part of shared
    memory (PSS)."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except OSError:
                continue
    return sum(_pss(pid) for pid in parents if root in _line(pid, parents))


def _line(pid: int, parents: dict[int, int]) -> Iterator[int]:
    while pid in parents:
        yield pid
        pid = parents[pid]


def _pss(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)


async def ask(client: httpx.AsyncClient, model: str, seen: Seen) -> None:
    """One answer of the other client's."""
    body = {
        "model": model, "prompt": "Once", "max_tokens": TOKENS, "stream": True, "ignore_eos": True,
        "temperature": 0,
    }  # fmt: skip
    last = begun = time.perf_counter()
    first = True
    async with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in sse.async_lines(response):
            if line.startswith("data: {"):
                now = time.perf_counter()
                (seen.first if first else seen.gaps).append(now - last)
                last, first = now, False
    seen.whole.append(last - begun)


async def attack(client: httpx.AsyncClient, model: str, name: str, number: Iterator[int], seen: Seen) -> None:
    """Runs forever, with a new grammar each time."""
    headers = {"content-type": "application/json"}
    while True:
        body = new_body(model, name, next(number)).replace(b'"max_tokens":64', b'"max_tokens":256')
        response = await client.post("/v1/chat/completions", content=body, headers=headers)
        seen.outcomes[outcome_of(response)] += 1


async def measure(
    served: Served, name: str, seconds: float, rounds: int, at_once: tuple[int, ...] = (0, 1, 8)
) -> dict[int, Seen]:
    """In turns, with so many attackers."""
    found = {attackers: Seen() for attackers in at_once}
    number = count(os.getpid() * 1000)
    async with httpx.AsyncClient(base_url=served.url, timeout=300) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        for _ in range(2):  # so that every process has loaded the library
            warm = new_body(model, name, next(number)).replace(b'"min_tokens":64', b'"min_tokens":0')
            await client.post(
                "/v1/chat/completions", content=warm, headers={"content-type": "application/json"}
            )
        await anyio.sleep(SETTLE)
        for _ in range(rounds):
            for attackers, seen in found.items():
                async with anyio.create_task_group() as tasks:
                    for _ in range(attackers):
                        tasks.start_soon(attack, client, model, name, number, seen)
                    await anyio.sleep(1.0)
                    end = time.perf_counter() + seconds
                    while time.perf_counter() < end:
                        await ask(client, model, seen)
                    seen.bytes.append(memory_of(served.pid))
                    tasks.cancel_scope.cancel()
                await anyio.sleep(SETTLE)
    return found


def main(
    model: Annotated[Path | None, typer.Option(help="A model folder; else the bundled one.")] = None,
    seconds: Annotated[float, typer.Option(help="Of each turn.")] = 15.0,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each kind.")] = 3,
    grammar: Annotated[str, typer.Option(help="Which, of those of `hostile`.")] = SLOW,
) -> None:
    """Measure."""
    if grammar not in GRAMMARS:
        raise typer.BadParameter(f"one of {', '.join(GRAMMARS)}")
    with Served([str(model)] if model else []) as served:
        found = anyio.run(measure, served, grammar, seconds, rounds)
        after = memory_of(served.pid)
    columns = (
        "attackers", "answers", "first token p50, ms", "p99", "longest gap", f"{TOKENS} tokens", "MiB",
        "the attackers got",
    )  # fmt: skip
    table = Table(*columns, box=None)
    for attackers, seen in found.items():
        table.add_row(str(attackers), *seen.row())
    console = Console(width=160)
    console.print(table)
    console.print(f"memory in the end: {after / 2**20:.0f} MiB")


if __name__ == "__main__":
    typer.run(main)
