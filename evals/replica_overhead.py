"""What the dispatcher costs: one engine behind it compared with one without it, in alternation.

    python -m personae.evals.replica_overhead --rounds 20
    python -m personae.evals.replica_overhead --processor

Both engines are open all the time, and one of them works at a time. Each round measures both: the tokens per
second of `--streams` streams, and the first tokens of requests one after the other. Prints the medians, and
the median of the rounds' ratios and differences. With `--processor` the engine cores cost nothing
(`mock_core.py`), and this process's processor time is measured, for each token of the streams and for each of
the single requests. It hardly depends on what else runs on the machine.
"""

import statistics
import sys
import time
from contextlib import AsyncExitStack
from typing import Annotated

import anyio
import typer

from personae.actors.client import EngineClient
from personae.actors.multi_process import open_multi_process
from personae.actors.options import EngineOptions
from personae.actors.replicas.launch import open_replicas
from personae.actors.spawn import COMMAND
from personae.api.bundled import NAMED, bundled
from personae.engine.params import SamplingParams
from personae.engine.sequence import SequenceLog

PROMPT = 64
FIRSTS = 20  # consecutive requests per round
MOCK = (sys.executable, "-m", "personae.evals.mock_core", "0.002")


class Client:
    """A client of one of the two."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine
        self._number = 0

    async def ask(self, tokens: int) -> float:
        """One answer of this many tokens, for a new prompt. Returns the seconds to its first token."""
        self._number += 1
        number = self._number
        prompt = tuple(4 + (number * 7919 + at * 104729) % 250 for at in range(PROMPT))
        params = SamplingParams(max_tokens=tokens, seed=number, ignore_eos=True)
        begun, first = time.perf_counter(), 0.0
        async with self._engine.stream([SequenceLog(f"{number}", prompt, PROMPT, params)]) as stream:
            async for delta in stream:
                if delta.tokens and not first:
                    first = time.perf_counter() - begun
        return first

    async def rate(self, streams: int, tokens: int) -> float:
        """Tokens a second of all streams together."""
        begun = time.perf_counter()
        async with anyio.create_task_group() as tasks:
            for _ in range(streams):
                tasks.start_soon(self.ask, tokens)
        return streams * tokens / (time.perf_counter() - begun)

    async def first(self) -> float:
        """The median of first tokens, seconds."""
        return statistics.median([await self.ask(1) for _ in range(FIRSTS)])

    async def processor(self, streams: int, tokens: int) -> tuple[float, float]:
        """Microseconds of this process per token of the streams, and per request of one token."""
        begun = time.thread_time()
        await self.rate(streams, tokens)
        together = time.thread_time() - begun
        await self.first()
        alone = time.thread_time() - begun - together
        return 1e6 * together / streams / tokens, 1e6 * alone / FIRSTS


async def run(rounds: int, streams: int, tokens: int, processor: bool) -> None:
    """Measure and print."""
    small = bundled(NAMED)
    assert small is not None
    options = EngineOptions(small.model, small.adapters, dtype="float32", max_seqs=max(streams, 8))
    command = MOCK if processor else COMMAND
    async with AsyncExitStack() as stack:
        plain = await stack.enter_async_context(open_multi_process(options, command=command))
        behind = await stack.enter_async_context(open_replicas(options, 1, command=command))
        clients = (Client(plain.client), Client(behind.client))
        for client in clients:
            await client.rate(streams, tokens)
        rates: list[tuple[float, ...]] = []
        firsts: list[tuple[float, ...]] = []
        for number in range(rounds):
            order = clients if number % 2 else clients[::-1]
            if processor:
                costs = {client: await client.processor(streams, tokens) for client in order}
                rates.append(tuple(costs[client][0] for client in clients))
                firsts.append(tuple(costs[client][1] for client in clients))
                continue
            measured = {
                client: (await client.rate(streams, tokens), await client.first()) for client in order
            }
            rates.append(tuple(measured[client][0] for client in clients))
            firsts.append(tuple(measured[client][1] for client in clients))
    if processor:
        for name, values in (("token", rates), ("request of one token", firsts)):
            one, other = (statistics.median(column) for column in zip(*values, strict=True))
            print(f"us a {name}: without the dispatcher {one:.1f}, with it {other:.1f}")
        return
    for name, unit, values in (("tokens/s", 1.0, rates), ("first token, ms", 1000.0, firsts)):
        one, other = (statistics.median(column) * unit for column in zip(*values, strict=True))
        print(f"{name}: without the dispatcher {one:.2f}, with it {other:.2f}")
    ratio = statistics.median(with_ / without for without, with_ in rates)
    later = statistics.median(with_ - without for without, with_ in firsts)
    print(f"median of {rounds} rounds: {ratio - 1:+.2%} tokens/s, {1000 * later:+.3f} ms to the first token")


def main(
    rounds: Annotated[int, typer.Option(min=1)] = 20,
    streams: Annotated[int, typer.Option(min=1)] = 32,
    tokens: Annotated[int, typer.Option(min=1)] = 128,
    processor: Annotated[bool, typer.Option("--processor", help="Processor time of this process.")] = False,
) -> None:
    """Run."""
    anyio.run(run, rounds, streams, tokens, processor, backend_options={"use_uvloop": True})


if __name__ == "__main__":
    typer.run(main)
