"""A batch together with interactive traffic, on a server that is killed halfway.

    python -m personae.evals.batches --requests 1000 --rate 2 --interactive 60 --rounds 5

Starts a server on the bundled model with its own data directory. In each round interactive requests come at
the same random times (Poisson) twice: alone, and during a batch over the base and all adapters, which is then
cancelled. The order changes from round to round, because a machine's speed drifts. The batch of the last
round is kept: the server is killed (`kill -9`) in the middle of it and started again. At the end every
`custom_id` must have one answer, and greedy answers must equal those of the same requests over HTTP. Prints
the times of interactive requests with and without the batch, and their ratios: the median of the rounds, the
least and the most. Exit code 1 if an answer is missing, duplicated or different.
"""

import asyncio
import json
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console
from rich.table import Table

from personae.api.bundled import NAMED
from personae.evals.bench.arrivals import Poisson
from personae.evals.bench.client import Answer
from personae.evals.bench.figures import MEASURES, Figures, Goals, figures, measure, ratio
from personae.evals.bench.session import subject, warm_up
from personae.evals.bench.workload import Maker, Workload, words
from personae.evals.served import Served

CHAT = "/v1/chat/completions"
ENDED = ("completed", "failed", "expired", "cancelled")
CHECKED = 40  # answers that are compared with those over HTTP


def interactive(url: str, rate: float, count: int, seed: int, name: str) -> Figures:
    """`count` requests to all models in turn, at random times that depend on `seed`. Their texts also depend
    on `name`, so no prompt repeats."""
    answers: list[Answer] = []
    load = Workload(prompt="uniform:16,64", output="32", popularity="distinct", seed=seed)

    async def run() -> None:
        one = await subject(url)
        await warm_up(one, load)
        maker = Maker(load, one.models, words_per_token=0.5, occasion=name)
        await Poisson(rate, seed).run(url, maker.make, count, answers.append)

    asyncio.run(run())
    return figures(answers, Goals())


def lines(models: Sequence[str], count: int, tokens: int) -> list[dict[str, Any]]:
    """The batch: every line has its own prompt, the models alternate, greedy."""
    made = []
    for number in range(count):
        text = words(random.Random(f"line {number}"), 8 + number % 24)
        body = {
            "model": models[number % len(models)],
            "messages": [{"role": "user", "content": text}],
            "temperature": 0,
            "max_tokens": tokens,
            "ignore_eos": True,
        }
        made.append({"custom_id": f"line-{number}", "method": "POST", "url": CHAT, "body": body})
    return made


def start_batch(client: httpx.Client, requests: list[dict[str, Any]]) -> str:
    """Upload the file and start the batch. Returns its id."""
    content = "\n".join(map(json.dumps, requests)).encode()
    file = client.post("/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", content)}).json()
    body = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h"}
    return str(client.post("/v1/batches", json=body).json()["id"])


def wait(client: httpx.Client, id: str, done: int, console: Console) -> dict[str, Any]:
    """Wait until this many requests are done, or the batch has ended."""
    while True:
        batch: dict[str, Any] = client.get(f"/v1/batches/{id}").json()
        if batch["request_counts"]["completed"] >= done or batch["status"] in ENDED:
            console.print(f"batch {batch['status']}, {batch['request_counts']}", highlight=False)
            return batch
        time.sleep(0.5)


def wait_for_end(client: httpx.Client, id: str) -> dict[str, Any]:
    """Wait until the batch has ended."""
    while True:
        batch: dict[str, Any] = client.get(f"/v1/batches/{id}").json()
        if batch["status"] in ENDED:
            return batch
        time.sleep(0.2)


def judge(
    client: httpx.Client, batch: dict[str, Any], requests: list[dict[str, Any]]
) -> tuple[int, int, int]:
    """Requests without an answer, with several answers, and with an answer that differs from the one over
    HTTP."""
    text = client.get(f"/v1/files/{batch['output_file_id']}/content").text
    answers = [json.loads(line) for line in text.splitlines()]
    counts = Counter(answer["custom_id"] for answer in answers)
    lost = sum(request["custom_id"] not in counts for request in requests)
    doubled = sum(count > 1 for count in counts.values())
    by_id = {answer["custom_id"]: answer["response"]["body"]["choices"][0] for answer in answers}
    different = 0
    for request in random.Random(0).sample(requests, min(CHECKED, len(requests))):
        again = client.post(CHAT, json=request["body"], timeout=300).json()["choices"][0]
        different += again["message"]["content"] != by_id[request["custom_id"]]["message"]["content"]
    return lost, doubled, different


def show(alone: Sequence[Figures], together: Sequence[Figures]) -> Table:
    """Interactive times without and with the batch: medians of the rounds, and the rounds' ratios."""
    table = Table("ms", "alone", "with the batch", "ratio", "least", "most", title="interactive requests")
    for name, value in MEASURES.items():
        if value[1]:  # of rates there is nothing to say: requests come when they come
            continue
        without, with_them = (
            statistics.median(measure(each, name) for each in found) for found in (alone, together)
        )
        found = ratio(together, alone, name)
        table.add_row(
            name,
            f"{1000 * without:.0f}",
            f"{1000 * with_them:.0f}",
            *(f"{each:.2f}" for each in (found.median, found.least, found.most)),
        )
    table.add_row("requests", *(str(sum(each.requests for each in found)) for found in (alone, together)))
    errors = (sum((Counter(each.errors) for each in found), Counter()) for found in (alone, together))
    table.add_row("errors", *(str(dict(found) or "") for found in errors))
    return table


def main(
    requests: Annotated[int, typer.Option(help="Of the batch.")] = 1000,
    tokens: Annotated[int, typer.Option(help="Of each answer of the batch.")] = 32,
    count: Annotated[int, typer.Option("--interactive", help="Interactive requests, each time.")] = 60,
    rate: Annotated[float, typer.Option(help="Interactive requests a second.")] = 2.0,
    rounds: Annotated[
        int, typer.Option(min=1, help="Of interactive requests, alone and with the batch.")
    ] = 5,
    seed: int = 0,
) -> None:
    """Run, print, judge."""
    console = Console()
    alone: list[Figures] = []
    together: list[Figures] = []
    with tempfile.TemporaryDirectory(prefix="personae-batches-") as folder:
        log = Path(folder) / "server.log"
        arguments = [str(NAMED), "--data-dir", str(Path(folder) / "data")]
        with Served(arguments, log) as server, httpx.Client(base_url=server.url, timeout=60) as client:
            models = [entry["id"] for entry in client.get("/v1/models").json()["data"]]
            made = lines(models, requests, tokens)

            def play_alone(number: int) -> None:
                alone.append(interactive(server.url, rate, count, seed + number, f"alone {number}"))

            def play_with_batch(number: int) -> str:
                id = start_batch(client, made)
                wait(client, id, 1, console)
                together.append(interactive(server.url, rate, count, seed + number, f"beside {number}"))
                if client.get(f"/v1/batches/{id}").json()["status"] != "in_progress":
                    console.print("[red]the batch ended before the interactive requests: make it longer[/]")
                return id

            interactive(server.url, rate, 2 * len(models), seed - 1, "first")  # every thread awake
            for number in range(rounds):
                last = number == rounds - 1
                if number % 2 == 0 or last:
                    play_alone(number)
                id = play_with_batch(number)
                if not last:
                    client.post(f"/v1/batches/{id}/cancel")
                    wait_for_end(client, id)
                    if number % 2:
                        play_alone(number)
            wait(client, id, requests // 2, console)
            server.kill()
            console.print("killed")
        begun = time.monotonic()
        with Served(arguments, log) as server, httpx.Client(base_url=server.url, timeout=60) as client:
            batch = wait_for_end(client, id)
            took = time.monotonic() - begun
            lost, doubled, different = judge(client, batch, made)
    console.print(show(alone, together))
    console.print(
        f"{requests} requests over {len(models)} models, {batch['status']}: {lost} lost, {doubled} doubled, "
        f"{different} of {min(CHECKED, requests)} different; {took:.0f} s from the restart to the end"
    )
    raise typer.Exit(1 if lost or doubled or different else 0)


if __name__ == "__main__":
    typer.run(main)
