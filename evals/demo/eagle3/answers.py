"""Has SmolLM2-135M-Instruct answer the questions of `prompts.py`; it can be stopped and started again.

    python -m personae.evals.demo.eagle3.answers --out DIR --seconds 900

The answers are appended to DIR/answers.jsonl. A head learns from the model's own words, so no other text is
needed. Every second answer is greedy; the others are sampled, so that they differ more.
"""

import argparse
import itertools
import json
import time
from pathlib import Path
from typing import Any

import anyio
import httpx

from personae.evals.demo.eagle3.prompts import prompts
from personae.evals.served import Served, exit_on_sigterm

ANSWERS = "answers.jsonl"
TOKENS = 192  # of an answer at most


def bodies(seeds: int) -> list[dict[str, Any]]:
    """The requests, in order: all questions with the first seed, then with the next."""
    found = []
    for index, question in enumerate(itertools.chain.from_iterable(map(prompts, range(seeds)))):
        sampling = {"temperature": 0} if index % 2 else {"temperature": 0.8, "seed": index}
        message = {"role": "user", "content": question}
        found.append({"messages": [message], "max_tokens": TOKENS, **sampling})
    return found


async def ask(url: str, wanted: list[dict[str, Any]], clients: int, seconds: float, file: Path) -> None:
    """Ask until all is answered or the time is over. Each answer is written as soon as it is there."""
    ends = time.monotonic() + seconds
    waiting = iter(wanted)
    with file.open("a", encoding="utf-8") as out:

        async def client(http: httpx.AsyncClient) -> None:
            for body in waiting:
                if time.monotonic() > ends:
                    return
                answer = await http.post("/v1/chat/completions", json=body)
                answer.raise_for_status()
                (choice,) = answer.json()["choices"]
                line = {
                    "question": body["messages"][0]["content"],
                    "answer": choice["message"]["content"],
                    "ended": choice["finish_reason"] == "stop",
                }
                out.write(json.dumps(line) + "\n")
                out.flush()

        limits = httpx.Limits(max_connections=clients)
        async with (
            httpx.AsyncClient(base_url=url, timeout=900, limits=limits) as http,
            anyio.create_task_group() as group,
        ):
            for _ in range(clients):
                group.start_soon(client, http)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the run")
    parser.add_argument("--seconds", type=float, default=900)
    parser.add_argument("--clients", type=int, default=24, help="requests at once")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    file = given.out / ANSWERS
    done = len(file.read_text(encoding="utf-8").splitlines()) if file.exists() else 0
    with exit_on_sigterm(), Served(["--max-model-len", "1024"]) as server:
        anyio.run(ask, server.url, bodies(4)[done:], given.clients, given.seconds, file)


if __name__ == "__main__":
    main()
