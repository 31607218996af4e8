"""What one tenant's long prompts and new grammars cost another tenant.

    python -m personae.evals.neighbours

Many clients of one tenant send prompts or grammars that the server has never seen, each client the next one
when it has its answer. Meanwhile a client of another tenant repeatedly requests 16 tokens. In the last two
cases the processes that make the masks, and the one that they come from, are in turns killed or stopped,
every three seconds. Calm and attack alternate. Prints the neighbour's first token and its wait between two
tokens (p99), each with the ratio, how the attackers' answers ended, and the memory of the server's processes
before, in and half a minute after the attack.
"""

import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import anyio
import httpx
import typer
from rich.console import Console
from rich.table import Table

from personae.api.bundled import NAMED
from personae.evals.hostile import outcome_of
from personae.evals.served import Served
from personae.evals.slow_grammars import Seen, ask, memory_of

CONTROL = "as many answers without a grammar"
_COMPLETIONS = "/v1/completions"
_PROMPT_TOKENS = 2000
_ADMIN = "neighbours-admin"
_LIMITS = {
    "requests_per_minute": 1_000_000,
    "tokens_per_minute": 10**9,
    "concurrent": 1000,
    "schemas_per_minute": 1_000_000,
}
_AFTERWARDS = 30.0  # seconds until memory is measured again
_FAULT_SECONDS = 3.0


def _regex(number: int) -> dict[str, Any]:
    return {"structured_outputs": {"regex": rf"(ab|c{number})*[0-9]{{2}}(x|y)*"}}


def _set(number: int) -> dict[str, Any]:
    items = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True, "maxItems": 4}
    return _strict({f"list_{number}": items})


def _checked(number: int) -> dict[str, Any]:
    rows = {"type": "array", "items": {"type": "integer"}, "maxItems": 4}
    barred = {"not": {"properties": {f"count_{number}": {"multipleOf": 7}}}}
    return _strict({"rows": rows, f"count_{number}": {"type": "integer"}}, barred)


def _strict(properties: dict[str, Any], more: dict[str, Any] | None = None) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
        **(more or {}),
    }
    named = {"name": "answer", "schema": schema, "strict": True}
    return {"response_format": {"type": "json_schema", "json_schema": named}}


def _choice(number: int) -> dict[str, Any]:
    return {"structured_outputs": {"choice": [f"choice {number} {n:04} {'word ' * 9}" for n in range(1000)]}}


def _prompt(number: int) -> dict[str, Any]:
    ids = random.Random(number).choices(range(100, 400), k=_PROMPT_TOKENS)
    return {"prompt": ids, "max_tokens": 1}


def _scored_prompt(number: int) -> dict[str, Any]:
    return {**_prompt(number), "prompt_logprobs": 20}


def _gbnf(number: int) -> dict[str, Any]:
    rule = f'root ::= "{number}: " word ("," word)*\nword ::= [a-z]+ | "(" word ")"'
    return {"structured_outputs": {"grammar": rule}}


def _embedded_ids(number: int) -> dict[str, Any]:
    return {"input": [_prompt(number * 64 + n)["prompt"] for n in range(64)]}


def _embedded_texts(number: int) -> dict[str, Any]:
    return {"input": [f"Text {number} of {n}" for n in range(2000)]}


@dataclass(frozen=True, slots=True)
class Flood:
    """Attackers: how many, the request of each number, what is done to the sandbox's processes, and the
    route."""

    clients: int
    body: Callable[[int], dict[str, Any]]
    fault: signal.Signals | None = None
    path: str = _COMPLETIONS


FLOODS = {
    CONTROL: Flood(20, lambda number: {}),
    "a prompt of 2,000 tokens": Flood(1, _prompt),
    "eight prompts of 2,000 tokens": Flood(8, _prompt),
    "prompt_logprobs of 2,000 tokens": Flood(2, _scored_prompt),
    "16 answers of 64 tokens": Flood(8, lambda number: {"n": 16, "max_tokens": 64, "seed": number}),
    "new regular expressions": Flood(20, _regex),
    "new schemas of sets": Flood(20, _set),
    "new checked schemas": Flood(20, _checked),
    "choice lists of 60 kB": Flood(16, _choice),
    "new GBNF grammars": Flood(20, _gbnf),
    "GBNF, processes killed": Flood(8, _gbnf, signal.SIGKILL),
    "GBNF, processes stopped": Flood(8, _gbnf, signal.SIGSTOP),
    "embeddings of 64 x 2,000 ids": Flood(2, _embedded_ids, path="/v1/embeddings"),
    "embeddings of 2,000 short texts": Flood(2, _embedded_texts, path="/v1/embeddings"),
}


@dataclass(slots=True)
class FloodFindings:
    """The neighbour's times in calm and under attack, and the memory after it."""

    calm: Seen = field(default_factory=Seen)
    attacked: Seen = field(default_factory=Seen)
    before: int = 0
    after: int = 0

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
        return [*cells, memory, outcomes]


def sandbox_processes(server: int) -> list[int]:
    """The fork server of the sandbox and its children."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                if b"sandbox.forkserver" in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
    return [pid for pid in found if _descends(pid, server)]


def _descends(pid: int, ancestor: int) -> bool:
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


async def _attack(
    client: httpx.AsyncClient, model: str, flood: Flood, number: "count[int]", seen: Seen
) -> None:
    while True:
        body: dict[str, Any] = {"model": model}
        if flood.path == _COMPLETIONS:
            body |= {"prompt": "Say", "max_tokens": 32, "temperature": 1.0}
        response = await client.post(flood.path, json=body | flood.body(next(number)))
        seen.outcomes[outcome_of(response)] += 1
        if response.is_error:
            await anyio.sleep(float(response.headers.get("retry-after", 0.5)))


async def _disturb(server: int, fault: signal.Signals) -> None:
    for turn in count():
        found = sandbox_processes(server)
        forkserver = [pid for pid in found if _parent(pid) not in found]
        for pid in forkserver if turn % 2 else set(found).difference(forkserver):
            with suppress(ProcessLookupError):
                os.kill(pid, fault)
        await anyio.sleep(_FAULT_SECONDS)


async def _key(admin: httpx.AsyncClient, tenant: str) -> dict[str, str]:
    (await admin.post("/v1/tenants", json={"name": tenant, "limits": _LIMITS})).raise_for_status()
    response = await admin.post("/v1/keys", json={"tenant": tenant, "role": "tenant", "label": "eval"})
    response.raise_for_status()
    return {"authorization": f"Bearer {response.json()['secret']}"}


async def measure(served: Served, names: list[str], seconds: float, rounds: int) -> dict[str, FloodFindings]:
    """Each flood in turns with calm."""
    found = {name: FloodFindings() for name in names}
    number = count(1)
    headers = {"authorization": f"Bearer {_ADMIN}"}
    async with httpx.AsyncClient(base_url=served.url, headers=headers, timeout=300) as admin:
        keys = [await _key(admin, tenant) for tenant in ("attacker", "neighbour")]
    limits = httpx.Limits(max_connections=100)
    async with (
        httpx.AsyncClient(base_url=served.url, headers=keys[0], timeout=300, limits=limits) as attacker,
        httpx.AsyncClient(base_url=served.url, headers=keys[1], timeout=300) as neighbour,
    ):
        model = (await neighbour.get("/v1/models")).json()["data"][0]["id"]
        for _ in range(5):
            await ask(neighbour, model, Seen())
        for name, seen in found.items():
            flood = FLOODS[name]
            seen.before = memory_of(served.pid)
            for _ in range(rounds):
                await _turn(neighbour, model, seconds, seen.calm)
                async with anyio.create_task_group() as tasks:
                    for _ in range(flood.clients):
                        tasks.start_soon(_attack, attacker, model, flood, number, seen.attacked)
                    if flood.fault is not None:
                        tasks.start_soon(_disturb, served.pid, flood.fault)
                    await anyio.sleep(1.0)
                    await _turn(neighbour, model, seconds, seen.attacked)
                    seen.attacked.bytes.append(memory_of(served.pid))
                    tasks.cancel_scope.cancel()
                await anyio.sleep(2.0)
            await anyio.sleep(_AFTERWARDS)
            seen.after = memory_of(served.pid)
    return found


async def _turn(client: httpx.AsyncClient, model: str, seconds: float, seen: Seen) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        await ask(client, model, seen)


def main(
    model: Annotated[Path | None, typer.Option(help="A model folder or file; else the demo.")] = None,
    seconds: Annotated[float, typer.Option(help="Of each turn.")] = 10.0,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each kind.")] = 2,
    flood: Annotated[list[str] | None, typer.Option(help="Only these, by name.")] = None,
) -> None:
    """Measure."""
    names = flood or [*FLOODS]
    if unknown := set(names) - set(FLOODS):
        raise typer.BadParameter(f"{', '.join(unknown)}: not one of {', '.join(FLOODS)}")
    with Served([str(model or NAMED), "--api-key", _ADMIN]) as served:
        found = anyio.run(measure, served, names, seconds, rounds)
    columns = (
        "one tenant sends", "first token p50, ms", "p90", "p99", "gap p99, ms", "MiB before / in / after",
        "it got",
    )  # fmt: skip
    table = Table(*columns, box=None)
    for name, seen in found.items():
        table.add_row(name, *seen.row())
    Console(width=160).print(table)


if __name__ == "__main__":
    typer.run(main)
