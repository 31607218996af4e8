"""Kills the engine core repeatedly under load, and compares every answer with that of an undisturbed run.

    python -m personae.evals.chaos --model models/smol135 --adapters models/lora --kills 50 --streams 64
    python -m personae.evals.chaos --replicas 2 --kills 50
    python -m personae.evals.chaos --replicas 2 --prefill-replicas 1 --kills 50
    python -m personae.evals.chaos --ray --replicas 3 --kills 3
    python -m personae.evals.chaos --speculate ngram --kills 50

Streams are greedy and seeded, of the base and of every adapter in turn. A third of them is bound to a schema,
some have two choices, half have logprobs, and in the other half forced text is appended (jump-forward). Each
of the `--streams` clients requests one answer after another, until the engine core has been killed this many
times at random moments: by `kill -9`, with --stop hung by SIGSTOP, with --crash by an exception in the
executor. A sequence that runs in two hangs or crashes in a row would be quarantined, so the next of these
waits until as many answers have arrived as there are streams. With --replicas one of several engines is
killed at a time, and its streams continue on another. With --ray each engine is on a node of a Ray cluster on
loopback addresses. A whole node is killed or stopped, with all of Ray's processes there, and another one
joins. Meanwhile one request kills every engine that computes it; this request must be ended, and no other.
With --speculate the answers are compared with those of requests without speculation.
Prints the answers that are missing or differ, and for each kill the longest pause of any running stream. Exit
code 1 if an answer is missing or differs.
"""

import json
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Annotated

import anyio
import typer
from anyio import to_thread
from msgspec.structs import replace

from personae.actors.cluster import ray_cluster
from personae.actors.cluster.launch import open_cluster
from personae.actors.frontend.engine_process import EngineProcess
from personae.actors.kit.child import Incident, ReportIncident
from personae.actors.multi_process import MultiProcessEngine, open_multi_process
from personae.actors.options import ClusterOptions, EngineOptions
from personae.actors.replicas.launch import open_replicas
from personae.actors.simulation.capacity import quantile
from personae.actors.spawn import COMMAND
from personae.api.bundled import NAMED, bundled
from personae.engine.params import SamplingParams
from personae.engine.sequence import SequenceLog
from personae.errors import PersonaeError
from personae.evals.crashing_core import POISON
from personae.evals.ray_nodes import RayNodes
from personae.grammar.spec import GrammarSpec

PROMPTS = 48  # different requests
SCHEMA = {
    "type": "object",
    "properties": {"id": {"type": "integer"}, "status": {"enum": ["open", "paid", "sent"]}},
    "required": ["id", "status"],
    "additionalProperties": False,
}
STOPPED_SECONDS = 8.0
Strike = Callable[[random.Random, signal.Signals], Awaitable[str]]
"""Takes an engine down; returns which."""
Answer = tuple[tuple[tuple[int, ...], str, int], ...]  # of each choice: tokens, its end, logprobs


class Chaos:
    """One run against one engine."""

    def __init__(self, engine_processes: MultiProcessEngine, tokens: int, seed: int, streams: int) -> None:
        self.engine_processes = engine_processes
        self.streams = streams
        self.tokens = tokens
        self.rng = random.Random(seed)
        self.calm: dict[int, Answer] = {}
        self.answers = self.lost = self.different = 0
        self.done = False
        self.speculates = False
        self.killed_at = 0.0
        self.strike: Strike = _strike_process
        self.longest = 0.0  # the longest pause of a stream since the last kill
        self.pauses: list[float] = []  # the longest pause of each kill
        self.waits: list[float] = []  # the pauses of every stream that ran at a kill

    def log(self, number: int, id: str, *, speculate: bool = True) -> SequenceLog:
        """Request `number` under a fresh id."""
        client = self.engine_processes.client
        cards = list(client.models("default").values())
        rng = random.Random(number)
        length = rng.randrange(8, 200)
        log = SequenceLog(
            id=id,
            tokens=tuple(rng.choices(range(4, min(client.vocab_size, 30000)), k=length)),
            prompt_length=length,
            params=SamplingParams(
                max_tokens=self.tokens,
                seed=number,
                temperature=0.0 if number % 2 else 1.0,
                logprobs=2 if number // 2 % 2 else None,
                jump_forward=True,  # not with logprobs
                speculate=speculate,
            ),
            adapter=cards[number % len(cards)].adapter,
            eos=tuple(client.tokenizer.eos_ids),
        )
        if number % 3 == 0:
            log = replace(log, grammar=GrammarSpec("json_schema", json.dumps(SCHEMA)))
        return log

    async def ask(self, number: int, id: str, *, speculate: bool = True) -> Answer:
        """Play one request to its end."""
        first = self.log(number, id, speculate=speculate)
        logs = [first]
        if number % 8 == 5:
            other = replace(first.params, seed=number + PROMPTS, temperature=1.0)
            logs.append(replace(first, id=f"{id}-b", params=other, after=id))
        tokens: dict[str, list[int]] = {log.id: [] for log in logs}
        logprobs = dict.fromkeys(tokens, 0)
        finish = dict.fromkeys(tokens, "")
        heard = dict.fromkeys(tokens, 0.0)
        async with self.engine_processes.client.stream(logs) as stream:
            async for delta in stream:
                now = time.monotonic()
                if 0.0 < heard[delta.id] < self.killed_at:
                    self.longest = max(self.longest, now - self.killed_at)
                    self.waits.append(now - self.killed_at)
                heard[delta.id] = now
                tokens[delta.id] += delta.tokens
                logprobs[delta.id] += len(delta.logprobs)
                finish[delta.id] = delta.finish or ""
        return tuple((tuple(tokens[id]), finish[id], logprobs[id]) for id in tokens)

    async def client(self, name: int) -> None:
        """Ask, compare and repeat, until the killer is done."""
        rng = random.Random(name)
        turn = 0
        while not self.done:
            number = rng.randrange(PROMPTS)
            turn += 1
            try:
                answer = await self.ask(number, f"{name}-{turn}")
            except Exception as error:  # after any error this answer is missing
                self.lost += 1
                print(f"lost: request {number}: {error}")
                continue
            self.answers += 1
            if answer != self.calm[number]:
                self.different += 1
                for mine, calm in zip(answer, self.calm[number], strict=True):
                    pairs = enumerate(zip(mine[0], calm[0], strict=False))
                    at = next((i for i, (a, b) in pairs if a != b), -1)
                    print(f"different: request {number}, from token {at}")

    def all_ready(self) -> bool:
        """Whether every engine serves."""
        stats = self.engine_processes.client.stats()
        return all(each.ready for each in stats.replicas.values() or (stats,))

    async def _drafts_accepted(self) -> None:
        """With speculation: until drafts were right, as many as there are streams, so that the kill comes
        among them."""
        client = self.engine_processes.client
        enough = client.stats().counters.accepted_tokens + self.streams
        while self.speculates and client.stats().counters.accepted_tokens < enough:  # noqa: ASYNC110  nobody tells when it is
            await anyio.sleep(0.01)

    async def killer(self, kills: int, pause: float, how: signal.Signals) -> None:
        """Kill the engine core at random moments, each time after it is ready again."""
        for number in range(kills):
            enough = self.answers + self.streams if number and how != signal.SIGKILL else 0
            while self.answers < enough:  # noqa: ASYNC110  nobody tells when it is
                await anyio.sleep(0.01)
            await anyio.sleep(self.rng.uniform(0.1, pause))
            while not self.all_ready():  # noqa: ASYNC110  nobody tells when it is
                await anyio.sleep(0.01)
            await self._drafts_accepted()
            started = len(loads)
            self.longest, self.killed_at = 0.0, time.monotonic()
            struck = await self.strike(self.rng, how)
            print(f"kill {number + 1} ({struck}): {self.answers} answers so far", flush=True)
            while len(loads) == started or not self.all_ready():  # noqa: ASYNC110  as above
                await anyio.sleep(0.01)
            self.pauses.append(self.longest)
        self.done = True

    async def poison(self) -> str:
        """Play a request that kills each engine that computes it. Returns how it ended."""
        log = self.log(1, "poison")
        try:
            async with self.engine_processes.client.stream(
                [replace(log, tokens=POISON, prompt_length=len(POISON))]
            ) as stream:
                async for _ in stream:
                    pass
        except PersonaeError as error:
            return type(error).__name__
        return "an answer"


async def _strike_process(rng: random.Random, how: signal.Signals) -> str:
    pid = rng.choice(list(processes.values()))
    os.kill(pid, how)
    return str(pid)


@asynccontextmanager
async def here(
    engines: AbstractAsyncContextManager[MultiProcessEngine],
) -> AsyncIterator[tuple[MultiProcessEngine, Strike]]:
    """Engines on this machine, and a function that takes one down."""
    async with engines as engine_processes:
        yield engine_processes, _strike_process


@asynccontextmanager
async def on_ray(
    options: EngineOptions, replicas: int, restarts: int, report: ReportIncident
) -> AsyncIterator[tuple[MultiProcessEngine, Strike]]:
    """Engines on the nodes of a cluster, with a planted fault, and a function that takes a node down."""
    nodes = await to_thread.run_sync(RayNodes, replicas)
    cluster = ClusterOptions(ray=nodes.address, cluster_host=nodes.host)
    ray_cluster.COMMAND = (sys.executable, "-m", "personae.evals.ray_driver")

    async def strike(rng: random.Random, how: signal.Signals) -> str:
        address = nodes.strike_any(rng, how)
        tasks.start_soon(renew)
        return address

    async def renew() -> None:
        await anyio.sleep(STOPPED_SECONDS)  # long enough to detect that the node is stopped
        nodes.bury()
        await to_thread.run_sync(nodes.add)

    try:
        async with (
            anyio.create_task_group() as tasks,
            open_cluster(options, cluster, replicas, report=report, max_restarts=restarts) as engines,
        ):
            yield engines, strike
    finally:
        with anyio.CancelScope(shield=True):
            await to_thread.run_sync(nodes.close)


processes: dict[str, int] = {}
loads: list[int] = []  # process ids of all engine cores that have loaded, in order


def _note_processes() -> None:
    """Remember the process id of each engine core."""
    load = EngineProcess._load

    async def noted(self: EngineProcess) -> None:
        processes[self._frontend.ingress.path] = self._process.pid
        await load(self)
        loads.append(self._process.pid)

    EngineProcess._load = noted  # type: ignore[method-assign]  # looks on


async def run(
    options: EngineOptions,
    kills: int,
    streams: int,
    tokens: int,
    pause: float,
    seed: int,
    how: signal.Signals,
    replicas: int = 1,
    ray: bool = False,
    prefill: int = 0,
) -> bool:
    """True if no answer is missing or different."""
    _note_processes()
    hang = 3.0 if how == signal.SIGSTOP else 60.0
    command = (sys.executable, "-m", "personae.evals.crashing_core") if how == signal.SIGUSR2 else COMMAND

    def report(incident: Incident) -> None:
        """Deaths are expected and not reported."""

    engines: AbstractAsyncContextManager[tuple[MultiProcessEngine, Strike]]
    if ray:
        engines = on_ray(options, replicas, kills + 9, report)
    elif replicas == 1:
        engines = here(
            open_multi_process(
                options, max_restarts=kills + 1, hang_seconds=hang, report=report, command=command
            )
        )
    else:
        engines = here(
            open_replicas(
                options,
                replicas,
                max_restarts=kills + 1,
                hang_seconds=hang,
                report=report,
                command=command,
                prefill=prefill,
            )
        )
    async with engines as (engine_processes, strike):
        chaos = Chaos(engine_processes, tokens, seed, streams)
        chaos.strike = strike
        chaos.speculates = options.speculate != "off"
        for number in range(PROMPTS):
            chaos.calm[number] = await chaos.ask(number, f"calm-{number}", speculate=False)
        poisoned = "Quarantined"
        async with anyio.create_task_group() as tasks:
            for name in range(streams):
                tasks.start_soon(chaos.client, name)
            if ray:
                poisoned = await chaos.poison()
                print(f"poison: {poisoned}; {chaos.answers} answers, {chaos.lost} lost", flush=True)
            await chaos.killer(kills, pause, how)
        stats = engine_processes.client.stats()
        print(
            f"{kills} kills, {stats.restarts} restarts, {chaos.answers} answers, {chaos.lost} lost, "
            f"{chaos.different} different; {stats.moved} streams moved, {stats.prefilled} prefilled, "
            f"{stats.counters.tier_hits} tokens fetched, {stats.counters.tier_errors} fetches failed; "
            f"longest pause of a kill p50 "
            f"{statistics.median(chaos.pauses):.2f} s, max {max(chaos.pauses):.2f} s; a stream's "
            f"p50 {quantile(chaos.waits, 0.5):.2f} s, p99 {quantile(chaos.waits, 0.99):.2f} s; "
            f"left: {stats.running} running, {stats.pages_used} pages; "
            f"{stats.counters.accepted_tokens} of {stats.counters.draft_tokens} drafts were right in "
            f"{stats.counters.steps} steps"
        )
        return not chaos.lost and not chaos.different and poisoned == "Quarantined"


def main(
    model: Annotated[Path | None, typer.Option(help="A model folder; else the small bundled one.")] = None,
    adapters: Annotated[Path | None, typer.Option(help="A folder of adapter folders.")] = None,
    kills: int = 50,
    streams: int = 64,
    tokens: int = 64,
    pause: Annotated[
        float, typer.Option(help="Longest time from a restart to the next kill, seconds.")
    ] = 3.0,
    seed: int = 0,
    replicas: Annotated[int, typer.Option(min=1, help="Engines; one at a time is killed.")] = 1,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    max_num_seqs: Annotated[
        int | None, typer.Option(help="Sequences in a step; with --replicas enough for all streams.")
    ] = None,
    stop: Annotated[bool, typer.Option("--stop", help="SIGSTOP in place of SIGKILL.")] = False,
    speculate: Annotated[str, typer.Option(help="off, ngram, draft or auto.")] = "off",
    draft_model: Annotated[Path | None, typer.Option(help="See `personae serve`.")] = None,
    prefill_replicas: Annotated[
        int, typer.Option(min=0, help="So many of --replicas only compute prompts.")
    ] = 0,
    ray: Annotated[bool, typer.Option("--ray", help="On the nodes of a Ray cluster; nodes die.")] = False,
    crash: Annotated[bool, typer.Option("--crash", help="An exception in the executor instead.")] = False,
) -> None:
    """Run, print, judge."""
    small = bundled(NAMED)
    assert small is not None
    folders = (adapters,) if adapters else () if model else small.adapters
    options = EngineOptions(
        model or small.model,
        folders,
        dtype=dtype,  # type: ignore[arg-type]  # the engine refuses another
        max_seqs=max_num_seqs or (32 if replicas == 1 else 2 * streams),
        speculate=speculate,  # type: ignore[arg-type]  # the engine refuses another
        draft_model=draft_model,
        kv_transfer=prefill_replicas > 0,
    )
    how = signal.SIGSTOP if stop else signal.SIGUSR2 if crash else signal.SIGKILL
    fine = anyio.run(
        run,
        options,
        kills,
        streams,
        tokens,
        pause,
        seed,
        how,
        replicas,
        ray,
        prefill_replicas,
        backend_options={"use_uvloop": True},
    )
    raise typer.Exit(0 if fine else 1)


if __name__ == "__main__":
    typer.run(main)
