"""How `--speculate` changes the speed: five loads through two or three servers, in alternation.

    python -m personae.evals.speculation --clients 1,8,32 --rounds 3

One server speculates, the other does not; with `--draft-model` a third one also guesses with that model or
head. Every load is sent to all, the order changes each round, and all answers must be the same; the last
column counts those that differ from the first server's. The speed of a round is its completion tokens divided
by the seconds until the last answer. Their ratio includes prompts, which guesses make no faster; the column
"after the first token" compares the rest of the answers alone. Where other programs use the machine, the
tokens for a second of the server's own processor time say more, and their ratio is the column "processor".
Right guesses are those of all rounds, as the servers count them.

`--urls OFF,ON` measures two servers that already run, for example llama.cpp's without and with guesses; their
answers need not be the same, and neither their processor time nor the time of their prompts is known. A
server that lacks a load's adapter is asked for its base model instead.
"""

import functools
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import anyio
import httpx
import typer
from rich.console import Console
from rich.table import Table

from personae.evals.demo.finetune.questions import Question, held_out
from personae.evals.processes import processor_of
from personae.evals.served import Served, exit_on_sigterm

Body = dict[str, Any]
_NAMES = ("Account", "Invoice", "Sensor", "Ticket", "Vessel", "Parcel", "Recipe", "Player")
_FIELDS = ("owner", "amount", "label", "created", "status", "weight", "origin", "color")
_CHAT = (
    "Tell me a story about a lighthouse and a {}.",
    "Explain to a child how a {} works.",
    "Write a short letter to a friend about a {}.",
    "What should I know before I buy a {}?",
)
_HELD = 512  # questions per task
_DRAFTED = "vllm:spec_decode_num_draft_tokens_total"
_ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
_DECODING = "vllm:request_decode_time_seconds_sum"
TOKENS = 160  # of an answer at most
_THINGS = ("bicycle", "kite", "radio", "violin", "clock", "boat", "camera", "stove", "lantern", "tent")


@functools.cache
def _questions(task: str) -> list[Question]:
    return list(held_out(task, _HELD))


_KINDS = ("cheap", "new", "red", "small", "broken", "lost", "golden", "wooden", "borrowed", "heavy")


def extraction(index: int) -> Body:
    """The text is in the prompt, the schema is strict."""
    return {"model": "extract", **_questions("extract")[index % _HELD].body(bound=True)}


def tool_call(index: int) -> Body:
    """Up to eight tools, and the grammar of their calls."""
    return {"model": "tools", **_questions("tools")[index % _HELD].body(bound=True)}


def edit(index: int) -> Body:
    """A class is renamed; the old code is the `prediction`."""
    draw = random.Random(index)
    old, new = draw.sample(_NAMES, 2)
    fields = draw.sample(_FIELDS, 4)
    lines = [f"class {old}:", f'    """One {old.lower()}."""', ""]
    lines += [f"    def __init__(self, {', '.join(fields)}):"]
    lines += [f"        self.{field} = {field}" for field in fields]
    code = "\n".join(lines)
    return {
        "messages": [{"role": "user", "content": f"Rename the class {old} to {new}. Only code.\n\n{code}"}],
        "prediction": {"type": "content", "content": code},
    }


def chat(index: int) -> Body:
    """Text that repeats little of the prompt."""
    rest, place = divmod(index, len(_CHAT))
    kind, thing = divmod(rest, len(_THINGS))
    question = _CHAT[place].format(f"{_KINDS[kind % len(_KINDS)]} {_THINGS[thing]}")
    return {"messages": [{"role": "user", "content": question}]}


def noise(index: int) -> Body:
    """Sampled at temperature 1.5: nothing can be guessed."""
    return {**chat(index), "temperature": 1.5, "seed": index}


LOADS: dict[str, Callable[[int], Body]] = {
    "extraction": extraction,
    "edit": edit,
    "tool calls": tool_call,
    "chat": chat,
    "noise": noise,
}


async def run(url: str, bodies: list[Body], clients: int) -> tuple[float, int, list[str]]:
    """Tokens per second over all answers, their tokens, and the answers.

    Raises httpx.HTTPStatusError if a request is refused.
    """
    answers: list[str] = [""] * len(bodies)
    tokens = 0
    waiting = iter(enumerate(bodies))

    async def client(http: httpx.AsyncClient) -> None:
        nonlocal tokens
        for index, body in waiting:
            answer = await http.post("/v1/chat/completions", json={"temperature": 0, **body})
            answer.raise_for_status()
            found = answer.json()
            answers[index] = _text(found["choices"][0]["message"])
            tokens += found["usage"]["completion_tokens"]

    begun = time.monotonic()
    limits = httpx.Limits(max_connections=clients)
    async with (
        httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as http,
        anyio.create_task_group() as group,
    ):
        for _ in range(clients):
            group.start_soon(client, http)
    return tokens / (time.monotonic() - begun), tokens, answers


def _text(message: Body) -> str:
    """Without the ids of calls, which are random."""
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return f"{message.get('content')} {calls}"


async def metrics(url: str) -> dict[str, float]:
    """The sums of a server's metrics over their labels, by name. Zeros if it has none."""
    async with httpx.AsyncClient(timeout=60) as http:
        answer = await http.get(f"{url}/metrics")
    sums: defaultdict[str, float] = defaultdict(float)
    for line in answer.text.splitlines() if answer.is_success else ():
        if line and not line.startswith("#"):
            sums[line.partition("{")[0].partition(" ")[0]] += float(line.split()[-1])
    return sums


async def models(url: str) -> set[str]:
    """The names that a server answers to."""
    async with httpx.AsyncClient(timeout=60) as http:
        answer = await http.get(f"{url}/v1/models")
    return {model["id"] for model in answer.json()["data"]}


def spread(ratios: list[float]) -> str:
    """Their median, and the least and the most."""
    return f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"


async def compare(
    urls: dict[str, str],
    load: str,
    clients: int,
    requests: int,
    rounds: int,
    pids: Mapping[str, int] = MappingProxyType({}),
    first: int = 0,
) -> list[str]:
    """One row of the table. `urls`: the servers by their names, first the one that the others are compared
    with. `pids`: their processes, if they run on this machine. `first`: the first question's number."""
    speeds: dict[str, list[float]] = {way: [] for way in urls}
    efforts: dict[str, list[float]] = {way: [] for way in urls}  # tokens for a second of a processor
    paces: dict[str, list[float]] = {way: [] for way in urls}  # tokens for a second after first tokens
    names = set.intersection(*[await models(url) for url in urls.values()])
    different = 0
    before = {way: await metrics(url) for way, url in urls.items()}
    for turn in range(rounds + 1):
        # No round repeats a prompt: the prefix cache and the tenant's earlier answers would change the load.
        bodies = [LOADS[load](first + turn * requests + index) for index in range(requests)]
        bodies = [{**body, "max_tokens": TOKENS} for body in bodies]
        for body in bodies:
            if body.get("model") not in names:
                body.pop("model", None)
        answers = {}
        for way in list(urls)[:: -1 if turn % 2 else 1]:
            used = processor_of(pids[way]) if way in pids else 0.0
            begun = (await metrics(urls[way]))[_DECODING]
            speed, tokens, answers[way] = await run(urls[way], bodies, clients)
            if turn:  # the first round only warms up
                speeds[way].append(speed)
                if seconds := (await metrics(urls[way]))[_DECODING] - begun:
                    paces[way].append(tokens / seconds)
                if way in pids:
                    efforts[way].append(tokens / (processor_of(pids[way]) - used))
        plain, *guessed = answers.values()
        different += sum(one != two for other in guessed for one, two in zip(plain, other, strict=True))
    off, *others = speeds.values()
    plain_efforts, plain_paces = next(iter(efforts.values())), next(iter(paces.values()))
    row = [load, str(clients), f"{statistics.median(off):.0f}"]
    for (way, url), on in zip(list(urls.items())[1:], others, strict=True):
        found = await metrics(url)
        computed, accepted = (int(found[name] - before[way][name]) for name in (_DRAFTED, _ACCEPTED))
        row += [f"{statistics.median(on):.0f}", spread(_ratios(off, on))]
        row.append(spread(_ratios(plain_paces, paces[way])) if plain_paces else "")
        row.append(spread(_ratios(plain_efforts, efforts[way])) if plain_efforts else "")
        row.append(f"{accepted} of {computed}")
    return [*row, str(different)]


def _ratios(first: list[float], second: list[float]) -> list[float]:
    return [two / one for one, two in zip(first, second, strict=True)]


def main(
    model: Annotated[Path | None, typer.Option(help="Else the default model with its adapters.")] = None,
    way: Annotated[str, typer.Option(help="The `--speculate` to compare with off.")] = "auto",
    draft_model: Annotated[
        Path | None, typer.Option(help="Of a third server: a draft model or a head, see `personae serve`.")
    ] = None,
    clients: Annotated[str, typer.Option(help="Concurrent clients, with commas.")] = "1,8,32",
    loads: Annotated[str, typer.Option(help="With commas.")] = ",".join(LOADS),
    rounds: Annotated[int, typer.Option(min=1, help="Rounds after the one that warms up.")] = 3,
    requests: Annotated[int, typer.Option(min=1, help="A client, in each round.")] = 3,
    urls: Annotated[str | None, typer.Option(help="OFF,ON: two servers that already run.")] = None,
) -> None:
    """Measure and print."""
    arguments = [] if model is None else [str(model)]
    servers = {"off": ["--speculate", "off"], way: ["--speculate", way]}
    if draft_model is not None and urls is None:
        drafting = ["--speculate", way, "--draft-model", str(draft_model)]
        servers[f"{way} with {draft_model.name}"] = drafting
        if way == "draft":
            del servers[way]  # there is no such server without a model
    columns = [
        name
        for each in list(servers)[1:]
        for name in (
            f"{each}, tokens/s",
            "ratio (least to most)",
            "after the first token",
            "processor",
            "right guesses",
        )
    ]
    table = Table("load", "clients", "off, tokens/s", *columns, "different")
    with exit_on_sigterm(), ExitStack() as stack:
        if urls is None:
            running = [stack.enter_context(Served([*arguments, *more])) for more in servers.values()]
            addresses = [server.url for server in running]
            pids = {way: server.pid for way, server in zip(servers, running, strict=True)}
        else:
            addresses, pids = urls.split(","), {}
        ways = dict(zip(servers, addresses, strict=True))
        for load in loads.split(","):
            first = 0
            for count in map(int, clients.split(",")):
                row = anyio.run(compare, ways, load, count, count * requests, rounds, pids, first)
                first += count * requests * (rounds + 1)
                table.add_row(*row)
                typer.echo("  ".join(row), err=True)
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
