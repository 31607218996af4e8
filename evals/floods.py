"""What one tenant sends without pause: the floods of `neighbours.py`, and the process that sends one.

    python -m personae.evals.floods URL KEY MODEL "new GBNF grammars" SECONDS

The sender is a process of its own, as making a large body takes long, and has low priority, as clients are
elsewhere. It prints the number of answers of each kind, as JSON.
"""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Annotated, Any

import anyio
import httpx
import typer

from personae.evals.hostile import outcome_of
from personae.evals.tenants.attacks import ATTACKS, Attack, http_request, sender

CONTROL = "as many answers without a grammar"
_COMPLETIONS = "/v1/completions"
_PROMPT_TOKENS = 2000
_ANSWER = {"prompt": "Say", "max_tokens": 32, "temperature": 1.0}
_TEXTS = 1000


def _regex(number: int) -> dict[str, Any]:
    return _ANSWER | {"structured_outputs": {"regex": rf"(ab|c{number})*[0-9]{{2}}(x|y)*"}}


def _set(number: int) -> dict[str, Any]:
    items = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True, "maxItems": 4}
    return _ANSWER | strict({f"list_{number}": items})


def _checked(number: int) -> dict[str, Any]:
    rows = {"type": "array", "items": {"type": "integer"}, "maxItems": 4}
    barred = {"not": {"properties": {f"count_{number}": {"multipleOf": 7}}}}
    return _ANSWER | strict({"rows": rows, f"count_{number}": {"type": "integer"}}, barred)


def strict(properties: dict[str, Any], more: dict[str, Any] | None = None) -> dict[str, Any]:
    """The fields that bind an answer to an object with these properties."""
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
    choices = [f"choice {number} {n:04} {'word ' * 9}" for n in range(1000)]
    return _ANSWER | {"structured_outputs": {"choice": choices}}


def _gbnf(number: int) -> dict[str, Any]:
    rule = f'root ::= "{number}: " word ("," word)*\nword ::= [a-z]+ | "(" word ")"'
    return _ANSWER | {"structured_outputs": {"grammar": rule}}


def _ids(number: int) -> list[int]:
    return random.Random(number).choices(range(100, 400), k=_PROMPT_TOKENS)


def _prompt(number: int) -> dict[str, Any]:
    return {"prompt": _ids(number), "max_tokens": 1}


def _held(number: int) -> dict[str, Any]:
    return {"prompt": _ids(number)[:1000], "max_tokens": 900, "ignore_eos": True}


def _pairs(number: int) -> dict[str, Any]:
    texts = [f"Answer {number} of {n}" for n in range(_TEXTS)]
    return {"text_1": f"Question {number}?", "text_2": texts}


def _documents(number: int) -> dict[str, Any]:
    documents = [f"Document {number} of {n}" for n in range(_TEXTS)]
    return {"query": f"Question {number}?", "documents": documents}


@dataclass(frozen=True, slots=True)
class Flood:
    """How many clients, the request of each number, the route, and what is done to the sandbox's processes
    meanwhile. With `attack`, that is sent."""

    clients: int
    body: Callable[[int], dict[str, Any]] = lambda number: {}
    path: str = _COMPLETIONS
    fault: signal.Signals | None = None
    attack: Attack | None = None


FLOODS = {
    CONTROL: Flood(20, lambda number: _ANSWER),
    "answers of 200 tokens, 100 at once": Flood(100, lambda number: {**_ANSWER, "max_tokens": 200}),
    "a prompt of 2,000 tokens": Flood(1, _prompt),
    "eight prompts of 2,000 tokens": Flood(8, _prompt),
    "prompt_logprobs of 2,000 tokens": Flood(2, lambda number: {**_prompt(number), "prompt_logprobs": 20}),
    "16 answers of 64 tokens": Flood(8, lambda number: {"prompt": "Say", "n": 16, "max_tokens": 64}),
    "answers that hold all KV pages": Flood(32, _held),
    "new regular expressions": Flood(20, _regex),
    "new schemas of sets": Flood(20, _set),
    "new checked schemas": Flood(20, _checked),
    "choice lists of 60 kB": Flood(16, _choice),
    "new GBNF grammars": Flood(20, _gbnf),
    "GBNF, processes killed": Flood(8, _gbnf, fault=signal.SIGKILL),
    "GBNF, processes stopped": Flood(8, _gbnf, fault=signal.SIGSTOP),
    "embeddings of 64 x 2,000 ids": Flood(
        2, lambda number: {"input": [_ids(number * 64 + n) for n in range(64)]}, "/v1/embeddings"
    ),
    "embeddings of 2,000 short texts": Flood(
        2, lambda number: {"input": [f"Text {number} of {n}" for n in range(2000)]}, "/v1/embeddings"
    ),
    "scores of 1,000 pairs": Flood(2, _pairs, "/v1/score"),
    "rerank of 1,000 documents": Flood(2, _documents, "/v1/rerank"),
    **{
        name: Flood(1, attack=ATTACKS[name])
        for name in ("/tokenize of 8 MiB", "300 bodies that stop at 7 MiB")
    },
}


async def _client(
    client: httpx.AsyncClient, model: str, flood: Flood, number: "count[int]", seen: Counter[str]
) -> None:
    """Each request after the answer to the one before."""
    while True:
        response = await client.post(flood.path, json={"model": model} | flood.body(next(number)))
        seen[outcome_of(response)] += 1
        if response.is_error:
            await anyio.sleep(float(response.headers.get("retry-after", 0.5)))


async def send(url: str, key: str, model: str, flood: Flood, seconds: float) -> Counter[str]:
    """Send a flood for so long. Returns the answers."""
    seen, number = Counter[str](), count(1000 * os.getpid())
    headers, limits = {"authorization": f"Bearer {key}"}, httpx.Limits(max_connections=flood.clients)
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=300, limits=limits) as client:
        with anyio.move_on_after(seconds):
            async with anyio.create_task_group() as tasks:
                for _ in range(flood.clients):
                    tasks.start_soon(_client, client, model, flood, number, seen)
    return seen


def _attack(url: str, key: str, model: str, attack: Attack, seconds: float) -> Counter[str]:
    with tempfile.NamedTemporaryFile() as file:
        file.write(http_request(attack.path, key, attack.body(model)))
        file.flush()
        at = httpx.URL(url)
        command = sender(at.host, at.port or 80, file.name, attack.way, attack.clients, seconds)
        answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)  # noqa: S603 - ours
    return Counter(json.loads(answer.stdout))


def main(
    url: Annotated[str, typer.Argument(help="The server.")],
    key: Annotated[str, typer.Argument(help="The attacking tenant's.")],
    model: Annotated[str, typer.Argument(help="The model's name.")],
    name: Annotated[str, typer.Argument(help="Which flood.")],
    seconds: Annotated[float, typer.Argument(help="For how long.")],
) -> None:
    """Send a flood."""
    os.nice(19)
    flood = FLOODS[name]
    if flood.attack is not None:
        seen = _attack(url, key, model, flood.attack, seconds)
    else:
        seen = anyio.run(send, url, key, model, flood, seconds)
    print(json.dumps(seen))


def command(url: str, key: str, model: str, name: str, seconds: float) -> list[str]:
    """The command of a process that sends a flood and prints the answers."""
    return [sys.executable, "-m", "personae.evals.floods", url, key, model, name, f"{seconds}"]


if __name__ == "__main__":
    typer.run(main)
