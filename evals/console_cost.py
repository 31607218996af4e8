"""What an open console costs a server under load: windows with a console and without, in turn.

    python -m personae.evals.console_cost --minutes 60 --window 30 --streams 16

The console is a real Chromium on the page Live, opened anew in every second window. With `--polls` it is a
program that sends the page's requests instead, and so leaves the machine to the server. The server is under
the same endless load all the time. Prints the ratios of neighbouring windows, median and 95 % interval
(bootstrap): tokens a second; tokens for a second of the processor time of all the server's processes, which
hardly depends on what else the machine does; and the frontend's processor time for 1,000 tokens, since
only the frontend answers the page.
"""

import random
import shutil
import statistics
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import anyio
import httpx
import typer

from personae.evals.bench.client import Request, ask
from personae.evals.processes import processor_of
from personae.evals.served import Served

EVERY = 2.0  # seconds between two polls, as in `api/console/static/live.js`
PATIENCE = 300.0  # seconds, of a machine that has much else to do
POLLS = 300  # that are timed, one after the other
APART = 30  # that are timed, each when the server's document is too old
_RESAMPLED = 10_000
_SHOWN = 10  # pairs between two reports


@dataclass(frozen=True, slots=True)
class Window:
    """A stretch of the load: seconds, tokens, the processor seconds of all the server's processes, those of
    the frontend's event loop alone, and the requests of a console."""

    seconds: float
    tokens: float
    server: float
    frontend: float
    polls: int = 0

    @classmethod
    def all(cls, windows: Sequence["Window"]) -> "Window":
        """All of them as one."""
        return cls(
            sum(each.seconds for each in windows),
            sum(each.tokens for each in windows),
            sum(each.server for each in windows),
            sum(each.frontend for each in windows),
            sum(each.polls for each in windows),
        )


@dataclass(slots=True)
class Console:
    """What opens a console and closes it; `polls` counts its requests for figures."""

    polls: int = 0

    async def open(self, url: str) -> None:
        """Begin to ask."""
        raise NotImplementedError

    async def close(self) -> None:
        """Ask no more."""
        raise NotImplementedError


@asynccontextmanager
async def chromium() -> AsyncIterator[Console]:
    """A real browser, without a window."""
    from playwright.async_api import Request as Asked
    from playwright.async_api import async_playwright

    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        page = await browser.new_page()
        page.set_default_timeout(1000 * PATIENCE)

        class Page(Console):
            async def open(self, url: str) -> None:
                await page.goto(f"{url}/#live")

            async def close(self) -> None:
                await page.goto("about:blank")

        console = Page()

        def saw(request: Asked) -> None:
            console.polls += request.url.endswith("/v1/stats")

        page.on("request", saw)
        yield console
        await browser.close()


@asynccontextmanager
async def program() -> AsyncIterator[Console]:
    """The page's requests without a page."""
    async with anyio.create_task_group() as tasks:

        class Program(Console):
            _scope = anyio.CancelScope()

            async def open(self, url: str) -> None:
                self._scope = anyio.CancelScope()
                tasks.start_soon(self._ask, url, self._scope)

            async def close(self) -> None:
                self._scope.cancel()

            async def _ask(self, url: str, scope: anyio.CancelScope) -> None:
                with scope:
                    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE) as client:
                        while True:
                            self.polls += 1
                            (await client.get("/v1/stats")).raise_for_status()
                            await anyio.sleep(EVERY)

        yield Program()
        tasks.cancel_scope.cancel()


def frontend_seconds(pid: int) -> float:
    """Processor seconds of the main thread of the server's own process: its event loop."""
    fields = Path(f"/proc/{pid}/schedstat").read_text().split()
    return int(fields[0]) / 1e9


async def generated(client: httpx.AsyncClient) -> float:
    """The tokens that the server has generated since it began."""
    lines = (await client.get("/metrics")).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:generation_tokens_total{"))


async def measured(server: Served, client: httpx.AsyncClient, seconds: float, console: Console) -> Window:
    """Watch the load for so long."""
    tokens, polls = await generated(client), console.polls
    begun, used, front = time.perf_counter(), processor_of(server.pid), frontend_seconds(server.pid)
    await anyio.sleep(seconds)
    used, front = processor_of(server.pid) - used, frontend_seconds(server.pid) - front
    took = time.perf_counter() - begun
    return Window(took, await generated(client) - tokens, used, front, console.polls - polls)


async def load(url: str, model: str, number: int, tokens: int) -> None:
    """One client that always has a stream."""
    turn = 0
    while True:
        turn += 1
        body = {"model": model, "prompt": f"{number} {turn} Once", "max_tokens": tokens, "ignore_eos": True}
        await ask(url, Request("/v1/completions", body))


async def compare(
    server: Served, client: httpx.AsyncClient, console: Console, pairs: int, window: float
) -> None:
    """Measure pairs of windows, without a console and with it, in changing order. Print what they come to so
    far."""
    found: list[tuple[Window, Window]] = []
    for number in range(pairs):
        made: dict[bool, Window] = {}
        for opened in (False, True) if number % 2 else (True, False):
            if opened:
                await console.open(server.url)
            made[opened] = await measured(server, client, window, console)
            if opened:
                await console.close()
        found.append((made[False], made[True]))
        print(".", end="", flush=True)
        if (number + 1) % _SHOWN == 0 or number + 1 == pairs:
            print("", *report(found), sep="\n", flush=True)


def interval(ratios: Sequence[float]) -> tuple[float, float, float]:
    """The median, and its 95 % interval by bootstrap."""
    dice = random.Random(0)  # the same figures for the same windows
    medians = sorted(
        statistics.median(dice.choices(ratios, k=len(ratios))) for _ in range(_RESAMPLED if ratios else 0)
    )
    return statistics.median(ratios), medians[_RESAMPLED // 40], medians[-_RESAMPLED // 40]


def report(pairs: Sequence[tuple[Window, Window]]) -> list[str]:
    """What the pairs come to, in lines of text."""
    without, with_it = (Window.all([pair[on] for pair in pairs]) for on in (0, 1))
    lines = [
        f"{len(pairs)} pairs, {without.seconds / 60:.1f} min without a console, "
        f"{with_it.seconds / 60:.1f} min with it; {with_it.polls} polls",
        f"cores without and with it: the server {without.server / without.seconds:.3f} and "
        f"{with_it.server / with_it.seconds:.3f}, its frontend {without.frontend / without.seconds:.4f} and "
        f"{with_it.frontend / with_it.seconds:.4f}",
    ]
    figures: dict[str, Callable[[Window], float]] = {
        "tokens/s": lambda one: one.tokens / one.seconds,
        "tokens for a processor second of the server": lambda one: one.tokens / one.server,
        "the frontend's processor ms for 1,000 tokens": lambda one: 1e6 * one.frontend / one.tokens,
    }
    for name, figure in figures.items():
        middle, low, high = interval([figure(one) / figure(other) - 1 for other, one in pairs])
        lines.append(
            f"{name}: {figure(without):.1f}, with a console {figure(with_it):.1f}; "
            f"by pairs {middle:+.2%} ({low:+.2%} to {high:+.2%})"
        )
    more = statistics.median(
        1000 * (one.frontend / one.tokens - other.frontend / other.tokens) * one.tokens / max(one.polls, 1)
        for other, one in pairs
    )
    share = more / 1000 * with_it.polls / with_it.server
    lines.append(f"a poll: {more:.2f} ms more of the frontend, {share:.3%} of the server's processor time")
    return lines


async def run(minutes: float, window: float, streams: int, tokens: int, polls: bool) -> None:
    """Measure and print."""
    async with program() if polls else chromium() as console:
        with Served(["demo", "--device", "cpu"], Path("/dev/null")) as server:
            async with (
                httpx.AsyncClient(base_url=server.url, timeout=PATIENCE) as client,
                anyio.create_task_group() as tasks,
            ):
                model = (await client.get("/v1/models")).json()["data"][0]["id"]
                await _poll_cost(server, client)
                for number in range(streams):
                    tasks.start_soon(load, server.url, model, number, tokens)
                await measured(server, client, min(window, 20), console)
                pairs = max(round(60 * minutes / (2 * window)), 1)
                await compare(server, client, console, pairs, window)
                tasks.cancel_scope.cancel()


async def _poll_cost(server: Served, client: httpx.AsyncClient) -> None:
    """Time polls of an idle server: one after the other, of which most get the answer of that second, and
    apart, each of which makes an answer."""
    await client.get("/v1/stats")
    used = frontend_seconds(server.pid)
    for _ in range(POLLS):
        answer = await client.get("/v1/stats")
    cost = (frontend_seconds(server.pid) - used) / POLLS
    print(
        f"one of {POLLS} polls in a row: {len(answer.content):,} bytes, {1000 * cost:.2f} ms of the frontend"
    )
    idle, apart = [await _apart(server, client, asks) for asks in (False, True)]
    front, used = ((with_polls - without) / APART for without, with_polls in zip(idle, apart, strict=True))
    print(
        f"one of {APART} polls {EVERY:g} s apart: {1000 * front:.2f} ms of the frontend, "
        f"{1000 * used:.2f} ms of all the server's processes, "
        f"besides {1000 * idle[1] / APART:.2f} ms of those without a poll",
        flush=True,
    )


async def _apart(server: Served, client: httpx.AsyncClient, asks: bool) -> tuple[float, float]:
    """The processor seconds of an idle server, its frontend's and all of its processes', while polls come one
    by one, or while none come for as long."""
    front, used = frontend_seconds(server.pid), processor_of(server.pid)
    for _ in range(APART):
        if asks:
            await client.get("/v1/stats")
        await anyio.sleep(EVERY)
    return frontend_seconds(server.pid) - front, processor_of(server.pid) - used


def main(
    minutes: Annotated[float, typer.Option(min=0.01)] = 10,
    window: Annotated[float, typer.Option(min=0.1)] = 30,
    streams: Annotated[int, typer.Option(min=1)] = 16,
    tokens: Annotated[int, typer.Option(min=1)] = 200,
    polls: Annotated[
        bool, typer.Option("--polls", help="Send the page's requests without a browser.")
    ] = False,
) -> None:
    """Run."""
    anyio.run(run, minutes, window, streams, tokens, polls)


if __name__ == "__main__":
    typer.run(main)
