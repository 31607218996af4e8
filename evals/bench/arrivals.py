"""When requests are sent: in a closed loop, or at times that do not depend on the answers."""

import asyncio
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from personae.errors import RequestError
from personae.evals.bench.client import Answer, Request, ask

Make = Callable[[int, int | None, int | None], Request]
OnAnswer = Callable[[Answer], None]


class RequestTime(msgspec.Struct, frozen=True):
    """A line of a trace: seconds since its beginning and, optionally, the tokens of prompt and answer."""

    at: float
    prompt_tokens: int | None = None
    output_tokens: int | None = None


class Closed(msgspec.Struct, frozen=True, tag="closed"):
    """Each of `concurrency` clients sends its next request when its last answer is complete."""

    concurrency: int = 8

    async def run(self, url: str, make: Make, count: int, on_answer: OnAnswer) -> None:
        """Send `count` requests."""
        numbers = iter(range(count))

        async def client() -> None:
            for number in numbers:
                on_answer(await ask(url, make(number, None, None)))

        async with asyncio.TaskGroup() as tasks:
            for _ in range(min(self.concurrency, count)):
                tasks.create_task(client())


class Poisson(msgspec.Struct, frozen=True, tag="poisson"):
    """`rate` requests per second on average, independent of each other."""

    rate: float
    seed: int = 0

    async def run(self, url: str, make: Make, count: int, on_answer: OnAnswer) -> None:
        """Send `count` requests, and wait for the answers."""
        await _open(url, make, self.times(count), on_answer)

    def times(self, count: int) -> Iterator[RequestTime]:
        """The times of `count` requests."""
        rng, at = random.Random(f"arrivals {self.seed}"), 0.0
        for _ in range(count):
            at += rng.expovariate(self.rate)
            yield RequestTime(at)


class Bursts(msgspec.Struct, frozen=True, tag="bursts"):
    """`size` requests at once, every `every` seconds."""

    size: int
    every: float

    async def run(self, url: str, make: Make, count: int, on_answer: OnAnswer) -> None:
        """Send `count` requests, and wait for the answers."""
        await _open(url, make, self.times(count), on_answer)

    def times(self, count: int) -> Iterator[RequestTime]:
        """The times of `count` requests."""
        return (RequestTime(number // self.size * self.every) for number in range(count))


class Trace(msgspec.Struct, frozen=True, tag="trace"):
    """Replays a file: JSON Lines of `at` in seconds, `prompt_tokens`, `output_tokens`. `speed` 2 is twice as
    fast."""

    path: str
    speed: float = 1.0

    async def run(self, url: str, make: Make, count: int, on_answer: OnAnswer) -> None:
        """Replay at most `count` of its requests, and wait for the answers."""
        await _open(url, make, self.times(count), on_answer)

    def times(self, count: int) -> Iterator[RequestTime]:
        """The times of the trace. Raises RequestError, which names the line that is not valid."""
        lines = Path(self.path).read_text(encoding="utf-8").splitlines()[:count]
        for number, line in enumerate(lines, 1):
            try:
                arrival = msgspec.json.decode(line, type=RequestTime)
            except msgspec.DecodeError as error:
                raise RequestError(f"{self.path}, line {number}: {error}.", param="trace") from None
            yield RequestTime(arrival.at / self.speed, arrival.prompt_tokens, arrival.output_tokens)


Arrivals = Closed | Poisson | Bursts | Trace


async def _open(url: str, make: Make, times: Iterator[RequestTime], on_answer: OnAnswer) -> None:
    """Send each request at its time, however many are still running."""
    begun = time.perf_counter()

    async def send(request: Request) -> None:
        on_answer(await ask(url, request))

    async with asyncio.TaskGroup() as tasks:
        for number, arrival in enumerate(times):
            request = make(number, arrival.prompt_tokens, arrival.output_tokens)
            await asyncio.sleep(begun + arrival.at - time.perf_counter())
            tasks.create_task(send(request))
