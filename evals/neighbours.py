"""What one tenant's floods cost another tenant.

    python -m personae.evals.neighbours
    python -m personae.evals.neighbours --flood "new GBNF grammars" --model SMOLLM2.gguf

Clients of one tenant send requests from a process of their own (`floods.py`). Meanwhile a client of another
tenant repeatedly requests 16 tokens. In two cases the processes that make the masks, and the one that they
come from, are in turns killed or stopped, every three seconds. Calm and attack alternate. Prints the
neighbour's first token and its wait between two tokens, each with the ratio, how the attackers' answers
ended, and the memory of the server's processes: before, in the attack, and as soon as it is within a tenth of
that before, or after half a minute. All cases with their default times take about twelve minutes.
"""

import json
import os
import random
import signal
import subprocess
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import anyio
import httpx
import typer
from rich.console import Console
from rich.table import Table

from personae.api.bundled import NAMED
from personae.evals.floods import FLOODS, command
from personae.evals.served import Served
from personae.evals.slow_grammars import Seen, ask, memory_of

_ADMIN = "neighbours-admin"
_LIMITS = {
    "requests_per_minute": 1_000_000,
    "tokens_per_minute": 10**9,
    "concurrent": 1000,
    "schemas_per_minute": 1_000_000,
}
_KV_MEMORY = "192MiB"
_FILL = 2000  # tokens of a prompt that fills this memory
_MOST_FILL = 40
_AFTERWARDS = 30.0  # seconds until memory is measured again, at most
_KEPT = 1.1  # memory that counts as that before
_FAULT_SECONDS = 3.0
_STARTS = 2.0  # seconds until a sender has begun


@dataclass(slots=True)
class FloodFindings:
    """The neighbour's times in calm and under attack, and the memory after it."""

    calm: Seen = field(default_factory=Seen)
    attacked: Seen = field(default_factory=Seen)
    before: int = 0
    after: int = 0
    back: float = 0.0  # seconds until the memory was measured last

    def row(self) -> list[str]:
        """A row of the table: milliseconds, ratios and MiB."""
        cells = []
        for waits, part in (("first", 0.5), ("first", 0.9), ("first", 0.99), ("gaps", 0.99)):
            calm, attacked = (
                sorted(getattr(seen, waits))[int(part * (len(getattr(seen, waits)) - 1))]
                for seen in (self.calm, self.attacked)
            )
            cells.append(f"{1e3 * calm:.0f} / {1e3 * attacked:.0f} ({attacked / calm:.1f}x)")
        memory = " / ".join(
            f"{size / 2**20:.0f}" for size in (self.before, max(self.attacked.bytes), self.after)
        )
        outcomes = ", ".join(f"{n} x {name}" for name, n in self.attacked.outcomes.most_common())
        return [*cells, memory, f"{self.back:.0f}", outcomes]


def sandbox_processes(server: int) -> list[int]:
    """The fork server of the sandbox and its children."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                if b"sandbox.forkserver" in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
    return [pid for pid in found if descends(pid, server)]


def descends(pid: int, ancestor: int) -> bool:
    """Whether a process is another one, or comes from it."""
    while pid > 1:
        if pid == ancestor:
            return True
        pid = _parent(pid)
    return False


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    except OSError:
        return 0


async def _disturb(server: int, fault: signal.Signals, seconds: float) -> None:
    for turn in range(int(seconds / _FAULT_SECONDS) + 1):
        found = sandbox_processes(server)
        forkserver = [pid for pid in found if _parent(pid) not in found]
        for pid in forkserver if turn % 2 else set(found).difference(forkserver):
            with suppress(ProcessLookupError):
                os.kill(pid, fault)
        await anyio.sleep(_FAULT_SECONDS)


async def _key(admin: httpx.AsyncClient, tenant: str) -> str:
    (await admin.post("/v1/tenants", json={"name": tenant, "limits": _LIMITS})).raise_for_status()
    response = await admin.post("/v1/keys", json={"tenant": tenant, "role": "tenant", "label": "eval"})
    response.raise_for_status()
    return str(response.json()["secret"])


async def measure(served: Served, names: list[str], seconds: float, rounds: int) -> dict[str, FloodFindings]:
    """Each flood in turns with calm."""
    found = {name: FloodFindings() for name in names}
    headers = {"authorization": f"Bearer {_ADMIN}"}
    async with httpx.AsyncClient(base_url=served.url, headers=headers, timeout=300) as admin:
        attacker, own = [await _key(admin, tenant) for tenant in ("attacker", "neighbour")]
    headers = {"authorization": f"Bearer {own}"}
    async with httpx.AsyncClient(base_url=served.url, headers=headers, timeout=300) as neighbour:
        model = (await neighbour.get("/v1/models")).json()["data"][0]["id"]
        await _fill(neighbour, served.pid, model)
        for _ in range(5):
            await ask(neighbour, model, Seen())
        for name, seen in found.items():
            seen.before = memory_of(served.pid)
            for _ in range(rounds):
                await _turn(neighbour, model, seconds, seen.calm)
                sender = command(served.url, attacker, model, name, _STARTS + seconds)
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(_send, sender, seen.attacked)
                    if (fault := FLOODS[name].fault) is not None:
                        tasks.start_soon(_disturb, served.pid, fault, _STARTS + seconds)
                    await anyio.sleep(_STARTS)
                    await _turn(neighbour, model, seconds, seen.attacked)
                    seen.attacked.bytes.append(memory_of(served.pid))
                await anyio.sleep(1.0)
            seen.after, seen.back = await _settled(served.pid, seen.before)
            print("; ".join((name, *seen.row())), flush=True)
    return found


async def _send(sender: list[str], seen: Seen) -> None:
    answer = await anyio.run_process(sender, stderr=subprocess.DEVNULL)
    seen.outcomes += Counter(json.loads(answer.stdout))


async def _settled(server: int, before: int) -> tuple[int, float]:
    """The memory as soon as it is that before or half a minute has passed, and after how many seconds."""
    begun = time.perf_counter()
    while True:
        after, passed = memory_of(server), time.perf_counter() - begun
        if after <= _KEPT * before or passed >= _AFTERWARDS:
            return after, passed
        await anyio.sleep(1.0)


async def _fill(client: httpx.AsyncClient, server: int, model: str) -> None:
    """Fill the memory for keys and values. Its first use would otherwise count as the attack's memory."""
    rng, before = random.Random(0), 0
    for _ in range(_MOST_FILL):
        body = {"model": model, "prompt": rng.choices(range(100, 400), k=_FILL), "max_tokens": 1}
        (await client.post("/v1/completions", json=body)).raise_for_status()
        before, last = memory_of(server), before
        if before < last + 2**19:
            return


async def _turn(client: httpx.AsyncClient, model: str, seconds: float, seen: Seen) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        await ask(client, model, seen)


def main(
    model: Annotated[Path | None, typer.Option(help="A model folder or file; else the demo.")] = None,
    seconds: Annotated[float, typer.Option(help="Of each turn.")] = 5.0,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each kind.")] = 2,
    flood: Annotated[list[str] | None, typer.Option(help="Only these, by name.")] = None,
) -> None:
    """Measure."""
    names = flood or [*FLOODS]
    if unknown := set(names) - set(FLOODS):
        raise typer.BadParameter(f"{', '.join(unknown)}: not one of {', '.join(FLOODS)}")
    with Served(
        [str(model or NAMED), "--api-key", _ADMIN, "--kv-memory", _KV_MEMORY], Path(os.devnull)
    ) as served:
        found = anyio.run(measure, served, names, seconds, rounds)
    columns = (
        "one tenant sends", "first token p50, ms", "p90", "p99", "gap p99, ms", "MiB before / in / after",
        "after s", "it got",
    )  # fmt: skip
    table = Table(*columns, box=None)
    for name, seen in found.items():
        table.add_row(name, *seen.row())
    Console(width=160).print(table)


if __name__ == "__main__":
    typer.run(main)
