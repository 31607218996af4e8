"""One tenant attacks with the worst allowed requests: how much does another notice, and what memory is kept?

    python -m personae.evals.tenants.attacked

A tenant requests short streamed answers, a few at a time. Its first tokens and the gaps between tokens are
timed, and so is `/health`. In each round it is first alone, then another tenant attacks from a separate
process (`attacks.py`); after that both pause and the server's memory is read. Each attack has its own server.
Prints a table: p50 and p99 of the first token and the longest gap, calm and attacked, the longest `/health`,
the memory before, at most and after, and the attacker's answers. Exit code 1 if a p99 is over `--most` times
the calm one, or if more than `--kept` MiB are kept.

The results depend on everything else that runs on the machine, so the processor share of other processes,
including the attackers, is printed.
"""

import json
import math
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import anyio
import httpx
import typer
from rich.console import Console
from rich.table import Table

from personae.api import sse
from personae.api.tenants.data import DataDir
from personae.api.tenants.store import TenantLimits, TenantStore
from personae.evals.processes import Others, memory_of
from personae.evals.served import Served, exit_on_sigterm
from personae.evals.tenants.attacks import ATTACKS, MIB, Attack, http_request, sender

TENANTS = ("quiet", "loud")
STREAMS = 4
PROMPT, TOKENS = 64, 32
HEALTH_SECONDS = 0.1
SETTLE_SECONDS = 4.0
KV_MEMORY = "128MiB"
FILLED, FILLING = 24_000, 2000  # tokens in all, and per prompt
NOTHING = [math.inf]


@dataclass(slots=True)
class Watched:
    """Measurements of a time span, in seconds."""

    first: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    health: list[float] = field(default_factory=list)

    def add(self, other: "Watched") -> None:
        """Add another span's measurements."""
        self.first += other.first
        self.gaps += other.gaps
        self.health += other.health


@dataclass(slots=True)
class Found:
    """All rounds of one attack. Memory is in bytes."""

    calm: Watched = field(default_factory=Watched)
    attacked: Watched = field(default_factory=Watched)
    statuses: Counter[str] = field(default_factory=Counter)
    before: int = 0
    most: int = 0
    after: int = 0

    @property
    def ratio(self) -> float:
        """The p99 of the first token over that in calm."""
        return p99(self.attacked.first) / p99(self.calm.first)

    @property
    def kept(self) -> int:
        """MiB that are used after the attack and were not before."""
        return (self.after - self.before) // MIB

    def row(self) -> list[str]:
        """A row of the table."""
        spans = (self.calm, self.attacked)
        return [
            _pair(statistics.median(span.first or NOTHING) for span in spans),
            _pair(p99(span.first) for span in spans),
            f"{self.ratio:.2f}",
            _pair(max(span.gaps or NOTHING) for span in spans),
            _pair(max(span.health or NOTHING) for span in spans),
            " / ".join(f"{size // MIB}" for size in (self.before, self.most, self.after)),
            ", ".join(f"{count} x {status}" for status, count in self.statuses.most_common()),
        ]


COLUMNS = (
    "attack",
    "first token p50, ms",
    "p99, ms",
    "times",
    "longest gap, ms",
    "longest /health, ms",
    "memory before / most / after, MiB",
    "its sender gets",
    "processors that others had",
)


def p99(seconds: list[float]) -> float:
    """The p99; infinite if nothing arrived."""
    return sorted(seconds)[int(0.99 * len(seconds))] if seconds else math.inf


def _pair(seconds: Iterable[float]) -> str:
    return " / ".join(f"{1e3 * value:.0f}" for value in seconds)


class Quiet:
    """The observed tenant. Its measurements go to `span`, if there is one."""

    def __init__(self, client: httpx.AsyncClient, model: str) -> None:
        self._client = client
        self._model = model
        self._rng = random.Random(0)
        self.span: Watched | None = None

    async def ask(self) -> None:
        """One answer after another, forever."""
        while True:
            prompt = self._rng.choices(range(100, 1000), k=PROMPT)
            body = {"model": self._model, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0}
            span, begun, last = self.span, time.perf_counter(), None
            body |= {"stream": True, "ignore_eos": True}
            async with self._client.stream("POST", "/v1/completions", json=body) as response:
                response.raise_for_status()
                async for line in sse.async_lines(response):
                    if not line.startswith("data: {"):
                        continue
                    now = time.perf_counter()
                    if span is not None and span is self.span:
                        (span.first if last is None else span.gaps).append(now - (last or begun))
                    last = now

    async def fill(self) -> None:
        """Fill the memory for keys and values, which would otherwise be counted as the attack's."""
        for _ in range(FILLED // FILLING):
            prompt = self._rng.choices(range(100, 1000), k=FILLING)
            body = {"model": self._model, "prompt": prompt, "max_tokens": 1}
            (await self._client.post("/v1/completions", json=body)).raise_for_status()

    async def look(self) -> None:
        """Request `/health` regularly."""
        while True:
            span, begun = self.span, time.perf_counter()
            (await self._client.get("/health")).raise_for_status()
            if span is not None and span is self.span:
                span.health.append(time.perf_counter() - begun)
            await anyio.sleep(HEALTH_SECONDS)

    async def watched(self, seconds: float) -> Watched:
        """Its measurements during the next seconds."""
        self.span = span = Watched()
        await anyio.sleep(seconds)
        self.span = None
        return span

    @asynccontextmanager
    async def verifications(self) -> AsyncIterator[None]:
        """While the block runs."""
        async with anyio.create_task_group() as tasks:
            for _ in range(STREAMS):
                tasks.start_soon(self.ask)
            tasks.start_soon(self.look)
            await anyio.sleep(0.5)
            yield
            tasks.cancel_scope.cancel()


class Loud:
    """The tenant that attacks a server."""

    def __init__(self, url: str, key: str, folder: Path) -> None:
        self._url = httpx.URL(url)
        self._key = key
        self._file = folder / "request"

    async def prepare(self, attack: Attack, model: str) -> None:
        """Write the request, or upload the batch's file to the server."""
        body = await anyio.to_thread.run_sync(attack.body, model)
        path = attack.path
        if path == "/v1/files":
            headers = {"authorization": f"Bearer {self._key}"}
            async with httpx.AsyncClient(base_url=self._url, headers=headers, timeout=120) as client:
                form = {"file": ("batch.jsonl", body)}
                answer = await client.post(path, data={"purpose": "batch"}, files=form)
            answer.raise_for_status()
            path = "/v1/batches"
            batch = {"input_file_id": answer.json()["id"], "endpoint": "/v1/completions"}
            body = json.dumps(batch | {"completion_window": "24h"}).encode()
        self._file.write_bytes(http_request(path, self._key, body))

    async def attack(self, attack: Attack, seconds: float) -> Counter[str]:
        """The answers to its clients, by status."""
        host, port = self._url.host, self._url.port or 80
        command = sender(host, port, str(self._file), attack.way, attack.clients, seconds)
        answer = await anyio.run_process(command, stderr=subprocess.DEVNULL)
        return Counter(json.loads(answer.stdout))


async def play(
    served: Served, quiet: Quiet, loud: Loud, attack: Attack, seconds: float, rounds: int
) -> Found:
    """Calm and attacked in turn, then silence."""
    found = Found(before=memory_of(served.pid))

    async def note_memory() -> None:
        while True:
            found.most = max(found.most, memory_of(served.pid))
            await anyio.sleep(0.05)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(note_memory)
        async with quiet.verifications():
            for _ in range(rounds):
                found.calm.add(await quiet.watched(seconds))

                async def attacking() -> None:
                    found.statuses += await loud.attack(attack, seconds + 0.5)

                async with anyio.create_task_group() as both:
                    both.start_soon(attacking)
                    await anyio.sleep(0.5)
                    found.attacked.add(await quiet.watched(seconds))
                await anyio.sleep(1)
        await anyio.sleep(SETTLE_SECONDS)
        tasks.cancel_scope.cancel()
    found.after = memory_of(served.pid)
    return found


async def measure(
    served: Served, keys: dict[str, str], attack: Attack, seconds: float, rounds: int, folder: Path
) -> Found:
    """One attack on a server that has been warmed up."""
    headers = {"authorization": f"Bearer {keys['quiet']}"}
    async with httpx.AsyncClient(base_url=served.url, headers=headers, timeout=120) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        quiet, loud = Quiet(client, model), Loud(served.url, keys["loud"], folder)
        await quiet.fill()
        async with quiet.verifications():
            await anyio.sleep(2)
        await loud.prepare(attack, model)
        return await play(served, quiet, loud, attack, seconds, rounds)


def keys_in(folder: Path) -> dict[str, str]:
    """A key for each tenant of a new data directory. The attacker has no limits but the defaults."""
    data = DataDir(folder)
    try:
        store = TenantStore(data)
        for name in TENANTS:
            store.create_tenant(name, TenantLimits())
        return {name: store.create_key(name, "tenant") for name in TENANTS}
    finally:
        data.close()


def main(
    seconds: Annotated[float, typer.Option(help="Of each span.")] = 8.0,
    rounds: Annotated[int, typer.Option(min=1, help="Calm and attacked, in turn.")] = 3,
    attack: Annotated[list[str] | None, typer.Option(help="Only these, by name.")] = None,
    most: Annotated[float, typer.Option(help="The most that a p99 may be, in calm ones.")] = 2.0,
    kept: Annotated[int, typer.Option(help="The most memory that may be kept, in MiB.")] = 64,
    model: Annotated[Path | None, typer.Option(help="A model folder; else the bundled one.")] = None,
) -> None:
    """Measure."""
    names = [name for name in ATTACKS if not attack or any(one in name for one in attack)]
    table, bad = Table(*COLUMNS, box=None), False
    for name in names:
        with exit_on_sigterm(), tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            keys = keys_in(folder / "data")
            arguments = ["--data-dir", str(folder / "data"), "--kv-memory", KV_MEMORY]
            with Served([*([str(model)] if model else []), *arguments], folder / "log") as served:
                others = Others(served.pid)
                found = anyio.run(measure, served, keys, ATTACKS[name], seconds, rounds, folder)
                row = [name, *found.row(), f"{others.share():.0%}"]
        print("; ".join(row), flush=True)
        table.add_row(*row)
        bad = bad or found.ratio > most or found.kept > kept
    Console(width=220).print(table)
    sys.exit(bad)


if __name__ == "__main__":
    typer.run(main)
