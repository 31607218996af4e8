"""What hostile schemas cost their senders and other clients.

    python -m personae.evals.hostile

Short schemas with a very large meaning are sent to a server one by one, from a separate process, while
another client reads an endless answer. Prints what each sender got and after how long, and the longest time
that the other client waited for a token meanwhile, compared with its longest wait in an equal time of calm
afterwards: medians of the rounds. The goal is at most one step more. A harmless schema as large as the others
is sent too, to show the cost of a long request.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import anyio
import anyio.to_process
import httpx
import msgspec
import typer
from rich.console import Console
from rich.table import Table

from personae.api import sse
from personae.api.bundled import NAMED
from personae.evals.served import Served


def laughs(depth: int) -> dict[str, Any]:
    """References whose inlined form doubles with each level."""
    definitions = {
        f"d{n}": {"items": {"$ref": f"#/$defs/d{n + 1}"}, "unevaluatedItems": {"$ref": f"#/$defs/d{n + 1}"}}
        for n in range(depth)
    }
    return {"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{depth}": {"type": "null"}}}


def doubling(depth: int) -> dict[str, Any]:
    """Objects whose shortest instance doubles with each level."""
    pair = {
        f"d{n}": {
            "type": "object",
            "properties": {name: {"$ref": f"#/$defs/d{n + 1}"} for name in "ab"},
            "required": ["a", "b"],
            "additionalProperties": False,
        }
        for n in range(depth)
    }
    return {"$ref": "#/$defs/d0", "$defs": {**pair, f"d{depth}": {"type": "null"}}}


def retried(depth: int) -> dict[str, Any]:
    """Alternatives that a validator tries twice at each level, all in vain for a short text."""
    twice = {f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(depth)}
    leaf = {"type": "string", "not": {"maxLength": 9}}
    return {"$ref": "#/$defs/d0", "$defs": {**twice, f"d{depth}": leaf}}


def deep(levels: int) -> dict[str, Any]:
    """Arrays within arrays."""
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


def wide(properties: int) -> dict[str, Any]:
    """An object with this many required properties."""
    names = [f"property_{n}" for n in range(properties)]
    return {
        "type": "object",
        "properties": {name: {"type": "string"} for name in names},
        "required": names,
        "additionalProperties": False,
    }


def alternatives(objects: int, properties: int) -> dict[str, Any]:
    """This many objects, each with this many optional properties of its own."""
    return {
        "anyOf": [
            {
                "type": "object",
                "properties": {f"property_{n}_{m}": {"type": "string"} for m in range(properties)},
                "additionalProperties": False,
            }
            for n in range(objects)
        ]
    }


def complements(objects: int, properties: int) -> dict[str, Any]:
    """Objects, each of which changes one of its own properties: as many alternatives as choices."""
    barred = ({f"property_{n}_{m}": {"type": "string"} for m in range(properties)} for n in range(objects))
    return {"type": "object", "allOf": [{"not": {"properties": one}} for one in barred]}


SCHEMAS: dict[str, dict[str, Any]] = {
    "complements that multiply": complements(8, 8),
    "references that double": laughs(40),
    "instances that double": doubling(24),
    "alternatives that are tried again": retried(24),
    "deep": deep(31),
    "too deep": deep(200),
    "wide": wide(10_000),
    "wide, all of it wanted by nobody": alternatives(50, 400),
    "a long enum": {"enum": [f"value {n}" for n in range(40_000)]},
    "a huge maxLength": {"type": "string", "maxLength": 10**6},
    "a huge minLength": {"type": "string", "minLength": 10**5},
    "huge arrays of huge arrays": {
        "type": "array",
        "minItems": 500,
        "items": {"type": "array", "minItems": 500, "items": {"type": "string", "maxLength": 10**5}},
    },
    "repeated repetitions": {"type": "string", "pattern": "((a{100}){100}){100}"},
    "a pattern that backtracks": {"type": "string", "pattern": "^((a|aa)+)+$"},
    "alternatives that overlap": {"type": "string", "pattern": "(a|aa|b|ab)*c(.*d){20}"},
    "many patterns at once": {"allOf": [{"type": "string", "pattern": f".*{c}.*{c}"} for c in "abcdefghij"]},
    "conditions that multiply": {
        "allOf": [
            {"if": {"properties": {f"k{n}": {"const": 1}}}, "then": {"required": [f"r{n}"]}}
            for n in range(24)
        ]
    },
    "alternatives that multiply": {
        "allOf": [
            {"oneOf": [{"properties": {f"p{i}{j}": {"const": j}}} for j in range(9)]} for i in range(40)
        ]
    },
    "a barred list": {"type": "string", "not": {"enum": [f"value {n}" for n in range(20_000)]}},
    "recursive": {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]},
    "itself": {"$ref": "#"},
    "a far multiple": {"type": "integer", "multipleOf": 9_999_991, "minimum": 1, "maximum": 10**15},
}

# Grammars from clients: (field, value). An ambiguous one has as many parses as there are shapes of trees.
GRAMMARS: dict[str, tuple[str, Any]] = {
    "GBNF: ambiguous": ("grammar", "root ::= s\ns ::= s s | [a-z] | [a-z] s | s [a-z]"),
    "GBNF: ambiguous, of any text": ("grammar", 'root ::= s\ns ::= s s | s s s | [^x] | ""'),
    "GBNF: itself, twice": ("grammar", 'root ::= root root | "a" | ""'),
    "GBNF: itself": ("grammar", "root ::= root"),
    "GBNF: never ends": ("grammar", 'root ::= "a" root'),
    "Lark: ambiguous": ("grammar", "start: s\ns: s s | /[a-z]/ | /[a-z]/ s | s /[a-z]/"),
    "Lark: ambiguous, of any text": ("grammar", "start: s\ns: s s | s s s | /[^x]/ |"),
    "a choice of 512 KB": ("choice", ["x" * 2**19]),
    "a thousand long choices": ("choice", [f"{n:04} " * 100 for n in range(1000)]),
}

CONTROL = "(harmless, and as long)"
HARMLESS: dict[str, Any] = {"type": "string", "maxLength": 8, "description": "word " * 150_000}
AFTERWARDS = 0.1  # seconds after an answer in which its remaining work still counts as its own


@dataclass(slots=True)
class Rounds:
    """The results of one schema, one per round. Waits are the longest, in seconds."""

    outcomes: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    attacked: list[float] = field(default_factory=list)
    calm: list[float] = field(default_factory=list)

    @property
    def longer(self) -> float:
        """How many seconds longer other clients wait than in calm."""
        return statistics.median(self.attacked) - statistics.median(self.calm)

    def row(self, step: float) -> list[str]:
        """A row of the table. `step` is the duration of a step."""
        longest, calm = (1e3 * statistics.median(waits) for waits in (self.attacked, self.calm))
        outcomes = ", ".join(dict.fromkeys(self.outcomes))
        within = "yes" if self.longer <= step else "no"
        return [outcomes, f"{statistics.median(self.seconds):.2f}", f"{longest:.0f}", f"{calm:.0f}", within]


class Bystander:
    """Reads long answers token by token, again and again. `gaps` are the seconds between two tokens."""

    def __init__(self, client: httpx.AsyncClient, model: str) -> None:
        self._client = client
        self._body = {
            "model": model,
            "prompt": "Once",
            "max_tokens": 512,
            "stream": True,
            "ignore_eos": True,
            "temperature": 0,
        }
        self.gaps: list[float] = []

    async def read(self) -> None:
        """Runs forever."""
        while True:
            async with self._client.stream("POST", "/v1/completions", json=self._body) as response:
                response.raise_for_status()
                last = None
                async for line in sse.async_lines(response):
                    if line.startswith("data: {"):
                        now = time.perf_counter()
                        if last is not None:
                            self.gaps.append(now - last)
                        last = now

    def taken(self) -> list[float]:
        """The gaps since the last call."""
        gaps, self.gaps = self.gaps, []
        return gaps


def body_of(model: str, schema: Any, max_tokens: int = 64) -> dict[str, Any]:
    """The request of a schema's sender."""
    named = {"name": "answer", "schema": schema, "strict": True}
    return {
        "model": model,
        "messages": [{"role": "user", "content": "?"}],
        "max_tokens": max_tokens,
        "response_format": {"type": "json_schema", "json_schema": named},
    }


def bound_by(model: str, field: str, value: Any, max_tokens: int = 64) -> dict[str, Any]:
    """The request of a grammar's sender. The answer does not end by itself."""
    return {
        "model": model,
        "messages": [{"role": "user", "content": "?"}],
        "max_tokens": max_tokens,
        "min_tokens": max_tokens,
        "temperature": 1.5,
        "structured_outputs": {field: value},
    }


def outcome_of(response: httpx.Response) -> str:
    """The sender's result in a few words."""
    error = response.json().get("error")
    return f"{response.status_code} {error['code'] if error else ''}".strip()


async def send(
    client: httpx.AsyncClient, model: str, schema: Any, *, max_tokens: int = 64
) -> tuple[str, float]:
    """A schema's sender: its result, and after how many seconds."""
    started = time.perf_counter()
    response = await client.post("/v1/chat/completions", json=body_of(model, schema, max_tokens))
    return outcome_of(response), time.perf_counter() - started


def post(url: str, body: bytes) -> str:
    """The result of a request. It runs in a separate process: writing half a megabyte takes time, in which
    the other client could not read its tokens."""
    json = {"content-type": "application/json"}
    return outcome_of(httpx.post(f"{url}/v1/chat/completions", content=body, headers=json, timeout=300))


def new_body(model: str, name: str, number: int) -> bytes:
    """A sender's request that differs from those of the rounds before."""
    if name in GRAMMARS:
        field, value = GRAMMARS[name]
        mark = "//" if name.startswith("Lark") else "#"
        fresh = f"{value}\n{mark} round {number}" if isinstance(value, str) else [*value, f"round {number}"]
        return msgspec.json.encode(bound_by(model, field, fresh))
    schema = HARMLESS if name == CONTROL else SCHEMAS[name]
    return msgspec.json.encode(body_of(model, {**schema, "$comment": f"round {number}"}))


@dataclass(slots=True)
class HostileFindings:
    """The results of each schema, and all waits of the other client, in seconds."""

    rounds: dict[str, Rounds]
    calm: list[float] = field(default_factory=list)
    attacked: list[float] = field(default_factory=list)

    def print(self) -> None:
        """Print the table."""
        step = statistics.median(self.calm)
        columns = (
            "schema",
            "its sender gets",
            "after, s",
            "longest wait, ms",
            "in the calm",
            "within a step",
        )
        table = Table(*columns, box=None)
        for name, seen in self.rounds.items():
            table.add_row(name, *seen.row(step))
        console = Console()
        console.print(table)
        for what, waits in (("calm", sorted(self.calm)), ("attacked", sorted(self.attacked))):
            p50, p99, longest = waits[len(waits) // 2], waits[int(0.99 * len(waits))], waits[-1]
            console.print(
                f"{what}: p50 {1e3 * p50:.1f} ms, p99 {1e3 * p99:.1f} ms, longest {1e3 * longest:.0f} ms"
            )


async def measure(url: str, calm: float, rounds: int, names: Sequence[str] = ()) -> HostileFindings:
    """Send each of these schemas (default: all) repeatedly, and measure another client meanwhile."""
    found = HostileFindings({name: Rounds() for name in names or (CONTROL, *SCHEMAS, *GRAMMARS)})
    async with httpx.AsyncClient(base_url=url, timeout=120) as client, anyio.create_task_group() as tasks:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        senders = [
            (seen, new_body(model, name, number))
            for number in range(rounds)
            for name, seen in found.rounds.items()
        ]
        bystander = Bystander(client, model)
        tasks.start_soon(bystander.read)
        for number in range(2):  # the first compile starts the process in which they are made
            await anyio.to_process.run_sync(post, url, new_body(model, "deep", -1 - number))
        for seen, body in senders:
            bystander.taken()
            started = time.perf_counter()
            seen.outcomes.append(await anyio.to_process.run_sync(post, url, body))
            seen.seconds.append(time.perf_counter() - started)
            await anyio.sleep(AFTERWARDS)
            waits = bystander.taken()
            await anyio.sleep(max(calm, seen.seconds[-1]))
            afterwards = bystander.taken()
            seen.attacked.append(max(waits))
            seen.calm.append(max(afterwards))
            found.attacked += waits
            found.calm += afterwards
        tasks.cancel_scope.cancel()
    return found


def main(
    model: Annotated[Path | None, typer.Option(help="A model folder; else the bundled one.")] = None,
    calm: Annotated[float, typer.Option(help="Seconds of calm after each schema, at least.")] = 1.0,
    rounds: Annotated[int, typer.Option(min=1, help="How often each is sent.")] = 3,
    schema: Annotated[list[str] | None, typer.Option(help="Only these, by name.")] = None,
) -> None:
    """Measure."""
    with Served([str(model or NAMED)]) as served:
        anyio.run(measure, served.url, calm, rounds, schema or ()).print()


if __name__ == "__main__":
    typer.run(main)
