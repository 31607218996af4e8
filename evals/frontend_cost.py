"""What the frontend costs: its processor time for each streamed token, before an engine core that has none.

    python -m personae.evals.frontend_cost --streams 32 --tokens 400

The server is `personae serve` with `evals/mock_core.py` for its engine core. The clients read without
looking, in this process. Prints the median of the rounds.
"""

import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, NamedTuple

import anyio
import msgspec
import typer

SERVE = """
import sys
from functools import partial
from personae.api import local
from personae.api.cli import main
command = (sys.executable, "-m", "personae.evals.mock_core", sys.argv.pop(1))
local.open_multi_process = partial(local.open_multi_process, command=command)
main()
"""

ASKED: dict[str, dict[str, object]] = {
    "chat": {"messages": [{"role": "user", "content": "Hi"}]},
    "completions": {"prompt": "Once"},
}
"""What each route is asked."""


async def stream(port: int, model: str, tokens: int, route: str) -> int:
    """One streamed answer; how many events it had."""
    body = {"model": model, "max_tokens": tokens, "stream": True, "ignore_eos": True, **ASKED[route]}
    text = msgspec.json.encode(body)
    path = "chat/completions" if route == "chat" else route
    head = f"POST /v1/{path} HTTP/1.1\r\nhost: localhost\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(text)}\r\nconnection: close\r\n\r\n"
    events = 0
    async with await anyio.connect_tcp("127.0.0.1", port) as connection:
        await connection.send(head.encode() + text)
        data = b""
        while True:
            try:
                data = await connection.receive(2**18)
            except anyio.EndOfStream:
                break
            events += data.count(b"data: ")
    assert b"[DONE]" in data, data
    return events


class Cost(NamedTuple):
    """What a round costs: microseconds of processor for each token; tokens a second; and events for each
    token, under 1 where the server could not keep up and sent several tokens at once."""

    token: float
    rate: float
    events: float


class Server:
    """`personae serve` with a mock engine core whose step takes `step` seconds."""

    def __init__(self, step: float) -> None:
        arguments = ["serve", "demo", "--port", "0", "--served-model-name", "mock"]
        self.process = subprocess.Popen(  # noqa: S603 - our own interpreter and text
            [sys.executable, "-c", SERVE, str(step), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self.process.stdout is not None
        ready = re.match(r"personae ready http://127.0.0.1:(\d+)", self.process.stdout.readline())
        assert ready is not None
        self.port = int(ready[1])

    async def round(self, streams: int, tokens: int, route: str) -> Cost:
        """Answer so many streams at once."""
        events = 0

        async def one() -> None:
            nonlocal events
            mine = await stream(self.port, "mock", tokens, route)
            events += mine

        before, begun = processor_time(self.process.pid), time.perf_counter()
        async with anyio.create_task_group() as tasks:
            for _ in range(streams):
                tasks.start_soon(one)
        count, after = streams * tokens, processor_time(self.process.pid)
        return Cost((after - before) / count * 1e6, count / (time.perf_counter() - begun), events / count)

    def stop(self) -> None:
        """End it."""
        self.process.terminate()
        self.process.wait(30)


def processor_time(pid: int) -> float:
    """Seconds that all threads of a process have had a processor, to the nanosecond."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


def main(
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    streams: Annotated[int, typer.Option(min=1)] = 32,
    tokens: Annotated[int, typer.Option(min=1)] = 400,
    step: Annotated[float, typer.Option(help="Seconds of a step.")] = 0.02,
    route: Annotated[str, typer.Option(help="`chat` or `completions`.")] = "chat",
) -> None:
    """Measure."""
    server = Server(step)
    try:
        costs = [
            anyio.run(server.round, streams, tokens, route, backend_options={"use_uvloop": True})
            for _ in range(rounds + 1)
        ]
    finally:
        server.stop()
    token, rates, events = (sorted(column) for column in zip(*costs[1:], strict=True))
    print(
        f"{route}: {statistics.median(token):.1f} us of processor a token (least {token[0]:.1f}), "
        f"{statistics.median(events):.2f} events a token, {rates[-1]:.0f} tokens/s in the fastest round"
    )


if __name__ == "__main__":
    typer.run(main)
