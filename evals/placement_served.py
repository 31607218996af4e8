"""Compares placement policies on real engines: 64 adapters by Zipf's law, prompts with common beginnings.

    python -m personae.evals.placement_served --rounds 5

Each policy has two engines of one core each, with the small bundled model and random adapters, of which a few
fit on the device. A prompt begins like others of its adapter. The policies serve the same requests in
alternation, and a round has other requests than the one before. Prints for each policy the share of prompt
tokens that were in a prefix cache, the share of requests whose adapter was on the device, tokens a second,
and first tokens: medians of the rounds, with the least and the most.
"""

import random
import statistics
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import anyio
import torch
import typer

from personae.actors.client import EngineClient
from personae.actors.options import EngineOptions
from personae.actors.process import ChildProcess
from personae.actors.replicas.launch import launch_replicas
from personae.actors.replicas.placement.base import Placement
from personae.actors.replicas.placement.estimated import EstimatedSeconds
from personae.actors.replicas.placement.least_loaded import LeastLoaded
from personae.actors.replicas.placement.prefix import LongestPrefix
from personae.actors.replicas.placement.random import RandomPlacement
from personae.actors.replicas.source import LocalSource
from personae.actors.spawn import COMMAND
from personae.api.bundled import NAMED, bundled
from personae.engine.params import SamplingParams
from personae.engine.sequence import SequenceLog
from personae.engine.tokens import Tokenizer
from personae.evals.tenants.making import AdapterMaker

ADAPTERS = 64
RANK = 8
BEGINNINGS = 2  # of each adapter's prompts
BEGINNING, OWN = 192, 16  # tokens
ENGINES = 2
KV_MEMORY = 24 * 2**20  # bytes of an engine: 8,192 tokens
DEVICE_ADAPTERS = 12  # that fit on an engine's device, without borrowing from the KV cache


@dataclass(frozen=True, slots=True)
class Ask:
    """A request: the adapter's number, the prompt, and how many tokens to answer."""

    adapter: int
    prompt: tuple[int, ...]
    tokens: int


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of a round."""

    cached: float
    resident: float
    rate: float
    first: float
    first_p99: float


def requests(number: int, count: int) -> list[Ask]:
    """The requests of a round."""
    rng = random.Random(number)
    numbers = rng.choices(range(ADAPTERS), [1 / (n + 1) for n in range(ADAPTERS)], k=count)
    asked = []
    for adapter in numbers:
        beginning = random.Random(f"{adapter} {rng.randrange(BEGINNINGS)}").choices(
            range(4, 250), k=BEGINNING
        )
        own = rng.choices(range(4, 250), k=OWN)
        asked.append(Ask(adapter, (*beginning, *own), rng.randint(8, 24)))
    return asked


async def play(
    client: EngineClient, digests: list[str], asked: list[Ask], streams: int, name: str
) -> Figures:
    """Serve the requests, `streams` at a time."""
    before, waiting, firsts = client.stats(), iter(enumerate(asked)), []

    async def work() -> None:
        for index, ask in waiting:
            params = SamplingParams(max_tokens=ask.tokens, seed=index, ignore_eos=True)
            id, adapter = f"{name}-{index}", digests[ask.adapter]
            log = SequenceLog(id, ask.prompt, len(ask.prompt), params, adapter=adapter)
            begun, came = time.perf_counter(), False
            async with client.stream([log]) as stream:
                async for delta in stream:
                    if delta.tokens and not came:
                        came = True
                        firsts.append(time.perf_counter() - begun)

    begun = time.perf_counter()
    async with anyio.create_task_group() as tasks:
        for _ in range(streams):
            tasks.start_soon(work)
    seconds = time.perf_counter() - begun
    after = client.stats()
    queries = after.counters.prefix_queries - before.counters.prefix_queries
    hits = after.counters.prefix_hits - before.counters.prefix_hits
    loads = {
        source: count - before.adapters.loads.get(source, 0) for source, count in after.adapters.loads.items()
    }
    moved = sum(count for source, count in loads.items() if source != "device")
    firsts.sort()
    return Figures(
        hits / queries,
        1 - moved / len(asked),
        sum(ask.tokens for ask in asked) / seconds,
        1000 * statistics.median(firsts),
        1000 * firsts[int(0.99 * (len(firsts) - 1))],
    )


async def run(rounds: int, count: int, streams: int, names: list[str]) -> None:
    """Measure and print."""
    small = bundled(NAMED)
    assert small is not None
    policies: dict[str, Placement] = {
        "random": RandomPlacement(),
        "least-loaded": LeastLoaded(),
        "prefix": LongestPrefix(),
        "estimated": EstimatedSeconds(),
    }
    with tempfile.TemporaryDirectory() as folder:
        maker = AdapterMaker(small.model)
        for number in range(ADAPTERS):
            place = Path(folder) / f"a{number}"
            place.mkdir()
            for file, data in maker.make(RANK, number, torch.bfloat16).items():
                (place / file).write_bytes(data)
        options = EngineOptions(
            small.model,
            (Path(folder),),
            dtype="bfloat16",
            max_seqs=streams,
            kv_memory=KV_MEMORY,
            adapter_memory=DEVICE_ADAPTERS * RANK * maker.bytes_per_rank(torch.bfloat16),
            share=ENGINES * len(names),
        )
        launch = partial(ChildProcess.launch, COMMAND, {"OMP_NUM_THREADS": "1"})
        tokenizer = Tokenizer.load(options.model)
        async with AsyncExitStack() as stack:
            clients = {}
            for name in names:
                opened = launch_replicas(
                    LocalSource([launch] * ENGINES), ENGINES, options, tokenizer, placement=policies[name]
                )
                clients[name] = (await stack.enter_async_context(opened)).client
            models = clients[names[0]].models("default")
            digests = [models[f"a{number}"].adapter or "" for number in range(ADAPTERS)]
            found: dict[str, list[Figures]] = {name: [] for name in names}
            for number in range(rounds + 1):
                asked = requests(number, count)
                for name in names if number % 2 else names[::-1]:
                    figures = await play(clients[name], digests, asked, streams, f"{number}")
                    if number:  # the first one fills the caches
                        found[name].append(figures)
    print(
        "| policy | prompt tokens cached | adapter on the device | tokens/s | first token p50, ms | p99, ms |"
    )
    print("|---|---|---|---|---|---|")
    for name, every in found.items():
        cells = [name, *(_cell(every, field) for field in Figures.__slots__)]
        print(f"| {' | '.join(cells)} |")


def _cell(every: list[Figures], field: str) -> str:
    values = [getattr(figures, field) for figures in every]
    shown = "{:.3f}" if field in ("cached", "resident") else "{:.1f}"
    median, least, most = (shown.format(f(values)) for f in (statistics.median, min, max))
    return f"{median} ({least} to {most})"


def main(
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    count: Annotated[int, typer.Option("--requests", min=1, help="Of a round, for each policy.")] = 400,
    streams: Annotated[int, typer.Option(min=1)] = 24,
    policy: Annotated[list[str] | None, typer.Option(help="Can be repeated.")] = None,
) -> None:
    """Run."""
    names = policy or ["random", "estimated"]
    anyio.run(run, rounds, count, streams, names, backend_options={"use_uvloop": True})


if __name__ == "__main__":
    typer.run(main)
