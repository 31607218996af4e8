"""What hostile schemas cost their senders, and the others.

    python -m personae.evals.hostile

Schemas that mean far more than they say are sent to a server one by one, while another client reads an answer
that goes on and on. Prints what each sender got, after how long, and how long the other had to wait for a
token meanwhile, against how long it waits in any case.
"""

import statistics
import time
from pathlib import Path
from typing import Annotated, Any

import anyio
import httpx
import typer
from rich.console import Console
from rich.table import Table

from personae.evals.served import Served


def laughs(depth: int) -> dict[str, Any]:
    """References whose inlined form doubles with each level."""
    definitions = {
        f"d{n}": {"items": {"$ref": f"#/$defs/d{n + 1}"}, "contains": {"$ref": f"#/$defs/d{n + 1}"}}
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
    """Alternatives that a validator tries twice on each level, all in vain for a short text."""
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
    """An object with so many properties, all of them wanted."""
    names = [f"property_{n}" for n in range(properties)]
    return {
        "type": "object",
        "properties": {name: {"type": "string"} for name in names},
        "required": names,
        "additionalProperties": False,
    }


def alternatives(objects: int, properties: int) -> dict[str, Any]:
    """So many objects, each with so many properties of its own, none of them wanted."""
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
    """Objects, each of which has one of its own properties otherwise: as many alternatives as choices."""
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

CALM = 5.0  # seconds before each


class Bystander:
    """Reads a long answer, token by token, again and again; `gaps` are the seconds between two."""

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
        """For ever."""
        while True:
            async with self._client.stream("POST", "/v1/completions", json=self._body) as response:
                response.raise_for_status()
                last = None
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        now = time.perf_counter()
                        if last is not None:
                            self.gaps.append(now - last)
                        last = now

    def taken(self) -> list[float]:
        """The gaps since the last call."""
        gaps, self.gaps = self.gaps, []
        return gaps


async def send(
    client: httpx.AsyncClient, model: str, schema: Any, *, max_tokens: int = 64
) -> tuple[str, float]:
    """What a schema's sender gets, and after how many seconds."""
    named = {"name": "answer", "schema": schema, "strict": True}
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "?"}],
        "max_tokens": max_tokens,
        "response_format": {"type": "json_schema", "json_schema": named},
    }
    started = time.perf_counter()
    response = await client.post("/v1/chat/completions", json=body)
    seconds = time.perf_counter() - started
    error = response.json().get("error")
    return f"{response.status_code} {error['code'] if error else ''}".strip(), seconds


async def measure(url: str, calm: float) -> None:
    """Print the table."""
    table = Table("schema", "its sender gets", "after, s", "longest wait for a token, ms", "calm", box=None)
    async with httpx.AsyncClient(base_url=url, timeout=120) as client, anyio.create_task_group() as tasks:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        bystander = Bystander(client, model)
        tasks.start_soon(bystander.read)
        for _ in range(2):  # the first compile starts the process in which they are made
            await send(client, model, SCHEMAS["conditions that multiply"])
        calms, during = [], []
        for name, schema in SCHEMAS.items():
            bystander.taken()
            await anyio.sleep(calm)
            before = bystander.taken()
            got, seconds = await send(client, model, schema)
            gaps = bystander.taken() or [seconds]
            table.add_row(name, got, f"{seconds:.2f}", f"{1e3 * max(gaps):.0f}", f"{1e3 * max(before):.0f}")
            calms += before
            during += gaps
        tasks.cancel_scope.cancel()
    console = Console()
    console.print(table)
    for what, gaps in (("calm", calms), ("meanwhile", during)):
        ordered = sorted(gaps)
        p50, p99 = statistics.median(ordered), ordered[int(0.99 * len(ordered))]
        console.print(
            f"{what}: p50 {1e3 * p50:.1f} ms, p99 {1e3 * p99:.1f} ms, longest {1e3 * ordered[-1]:.0f} ms"
        )


def main(
    model: Annotated[Path | None, typer.Option(help="A model folder; else the bundled one.")] = None,
    calm: Annotated[float, typer.Option(help="Seconds of calm before each schema.")] = CALM,
) -> None:
    """Measure."""
    with Served([str(model)] if model else []) as served:
        anyio.run(measure, served.url, calm)


if __name__ == "__main__":
    typer.run(main)
