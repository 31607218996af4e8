"""Engines that do all compared with prefill engines and others, while long prompts come, in alternation.

    python -m personae.evals.prefill --rounds 6
    python -m personae.evals.prefill --model models/smol135 --prompt 2000 --every 1.5

Both servers have two engines with one core each and are open all the time; one works at a time. So many
`--streams` answer one after another, and a request with a long prompt comes every so many seconds. Prints for
each round the 99th percentile of the gaps between two tokens of the streams, their tokens a second, and the
median time to the first token of the long prompts; then the medians and the median of the rounds' ratios.
"""

import random
import statistics
import time
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple

import anyio
import typer

from personae.actors.client import EngineClient
from personae.actors.options import EngineOptions
from personae.actors.replicas.launch import open_replicas
from personae.api.bundled import NAMED, bundled
from personae.engine.params import SamplingParams
from personae.engine.sequence import SequenceLog

ANSWER = 200  # tokens of a stream's answer
LONG_ANSWER = 16


class Figures(NamedTuple):
    """Of a round: the 99th percentile of the gaps, tokens a second, and the median first token of long
    prompts, in seconds."""

    gap: float
    rate: float
    first: float


class Load:
    """Both kinds of requests at one server for `seconds`."""

    def __init__(self, client: EngineClient, prompt: int, every: float, streams: int) -> None:
        self.client, self.prompt, self.every, self.streams = client, prompt, every, streams
        self._dice = random.Random(0)
        self._number = 0

    def _log(self, prompt: int, answer: int) -> SequenceLog:
        self._number += 1
        tokens = tuple(self._dice.choices(range(4, min(self.client.vocab_size, 30000)), k=prompt))
        params = SamplingParams(max_tokens=answer, seed=self._number, ignore_eos=True)
        return SequenceLog(f"{self._number}", tokens, prompt, params)

    async def run(self, seconds: float) -> Figures:
        """Run for a while."""
        gaps: list[float] = []
        firsts: list[float] = []
        tokens = 0
        end = time.perf_counter() + seconds

        async def answers() -> None:
            nonlocal tokens
            while time.perf_counter() < end:
                latest = 0.0
                async with self.client.stream([self._log(8, ANSWER)]) as stream:
                    async for delta in stream:
                        now = time.perf_counter()
                        if delta.tokens:
                            tokens += len(delta.tokens)
                            if latest:
                                gaps.append(now - latest)
                            latest = now
                        if now > end:
                            return

        async def prompt() -> None:
            begun = time.perf_counter()
            async with self.client.stream([self._log(self.prompt, LONG_ANSWER)]) as stream:
                async for delta in stream:
                    if delta.tokens:
                        firsts.append(time.perf_counter() - begun)
                        break
                async for _ in stream:
                    pass

        async with anyio.create_task_group() as tasks:
            for _ in range(self.streams):
                tasks.start_soon(answers)
            while time.perf_counter() < end:
                tasks.start_soon(prompt)
                await anyio.sleep(self.every)
        gaps.sort()
        return Figures(gaps[int(len(gaps) * 0.99)], tokens / seconds, statistics.median(firsts))


async def run(
    options: EngineOptions, rounds: int, seconds: float, prompt: int, every: float, streams: int
) -> None:
    """Measure and print."""
    async with AsyncExitStack() as stack:
        mixed = await stack.enter_async_context(open_replicas(options, 2))
        apart = await stack.enter_async_context(
            open_replicas(replace(options, kv_transfer=True), 2, prefill=1)
        )
        loads = {
            "mixed": Load(mixed.client, prompt, every, streams),
            "apart": Load(apart.client, prompt, every, streams),
        }
        for load in loads.values():
            await load.run(min(seconds, 5.0))
        found: dict[str, list[Figures]] = {name: [] for name in loads}
        for number in range(rounds):
            for name in ("mixed", "apart") if number % 2 else ("apart", "mixed"):
                figures = await loads[name].run(seconds)
                found[name].append(figures)
                print(
                    f"{name}: gap p99 {1000 * figures.gap:.0f} ms, {figures.rate:.0f} tokens/s, "
                    f"first token of long prompts {figures.first:.2f} s",
                    flush=True,
                )
        stats = apart.client.stats()
    for name, figures_of in found.items():
        gap, rate, first = (statistics.median(column) for column in zip(*figures_of, strict=True))
        print(
            f"{name}: gap p99 {1000 * gap:.0f} ms, {rate:.0f} tokens/s, first token {first:.2f} s (medians)"
        )
    ratios = [a.gap / m.gap for a, m in zip(found["apart"], found["mixed"], strict=True)]
    print(f"ratio of the gaps' p99: {statistics.median(ratios):.2f}")
    print(
        f"{stats.prefilled} prefilled, {stats.counters.tier_hits} tokens fetched, "
        f"{stats.counters.tier_errors} errors"
    )


def main(
    model: Annotated[Path | None, typer.Option(help="A model folder; else the small bundled one.")] = None,
    rounds: int = 6,
    seconds: float = 15.0,
    prompt: Annotated[int, typer.Option(min=16, help="Tokens of a long prompt.")] = 1000,
    every: Annotated[float, typer.Option(help="Seconds from one long prompt to the next.")] = 1.0,
    streams: Annotated[int, typer.Option(min=1)] = 8,
    dtype: str = "float32",
) -> None:
    """Run."""
    small = bundled(NAMED)
    assert small is not None
    options = EngineOptions(model or small.model, (), dtype=dtype)  # type: ignore[arg-type]  # the engine refuses another
    anyio.run(
        partial(run, options, rounds, seconds, prompt, every, streams), backend_options={"use_uvloop": True}
    )


if __name__ == "__main__":
    typer.run(main)
