"""Where a step's time goes, without HTTP: the parts of a decode step, and the host's time between two steps.

    personae bench steps --model models/smol135 --adapters models/lora --rows 64 --profile

First the engine alone, each part timed separately. Then the same rows through the actors, in one process and
in two: the gap is the time from the end of one step's reading to the beginning of the next step, on the
executor's own clock.

On a busy machine wall time mainly shows which program got a core. `--busy` measures CPU time on one thread
instead, for the engine alone, and shows the minimum: the cost of the work, although memory and caches are
still shared.
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import anyio
import torch
from rich.console import Console
from rich.table import Table

from personae.actors.assembly import assemble
from personae.actors.client import EngineClient
from personae.actors.enginecore.scheduler import SchedulerActor
from personae.actors.frontend.streamer import LatestStats
from personae.actors.in_process import open_in_process
from personae.actors.messages import StepFinished
from personae.actors.multi_process import open_multi_process
from personae.actors.options import EngineOptions
from personae.actors.spawn import COMMAND
from personae.actors.spec import EngineSpec
from personae.api.bundled import DEMO
from personae.engine.params import SamplingParams
from personae.engine.sequence import SequenceLog
from personae.engine.stats import SchedulerStats
from personae.engine.step import StepEngine
from personae.lora.stored import finished

WARM_UP = 8  # steps
PROMPTS = 8  # tokens per row from which on a step counts as mostly prompts
OPERATORS = 15  # the number of operators in the table


class Parts:
    """Seconds spent in named parts, one sample per step."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.samples: dict[str, list[float]] = defaultdict(list)
        self.prompts: list[float] = []  # seconds a token of forward passes that mostly read prompts

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time a block."""
        begun = self._clock()
        yield
        self.samples[name].append(self._clock() - begun)


def digests(engine_spec: EngineSpec) -> list[str]:
    """The adapters that are loaded from the start."""
    return [card.adapter for card in engine_spec.models.values() if card.adapter is not None]


def logs(engine_spec: EngineSpec, rows: int, mixed: bool, prompt: int, steps: int) -> list[SequenceLog]:
    """`rows` greedy sequences that do not end before their budget."""
    adapters = digests(engine_spec) if mixed else []
    return [
        SequenceLog(
            id=f"{row}",
            tokens=tuple((1000 + row * 977 + i * 131) % engine_spec.vocab_size for i in range(prompt)),
            prompt_length=prompt,
            params=SamplingParams(max_tokens=steps, seed=row, temperature=0.0, ignore_eos=True),
            adapter=adapters[row % len(adapters)] if adapters else None,
        )
        for row in range(rows)
    ]


def engine_parts(
    engine_spec: EngineSpec,
    rows: int,
    mixed: bool,
    prompt: int,
    steps: int,
    clock: Callable[[], float] = time.perf_counter,
) -> Parts:
    """The engine alone: plan, prepare, forward, sample, finish and commit of pure decode steps; for earlier
    steps that are mostly prompts, the forward pass."""
    engine, scheduler, parts = engine_spec.build_step_engine(), engine_spec.build_scheduler(), Parts(clock)
    assert isinstance(engine, StepEngine)
    for digest in digests(engine_spec):
        finished(engine.worker.load_adapter(digest, engine_spec.library.read(digest)).pieces())
    for log in logs(engine_spec, rows, mixed, prompt, steps):
        scheduler.add(log)
    while True:
        before = {name: len(samples) for name, samples in parts.samples.items()}
        with parts.part("plan"):
            plan = scheduler.plan()
        if plan is None:
            return parts
        with parts.part("prepare"):
            packed = engine.prepare(plan, {})
        with parts.part("forward"):
            forward = engine.forward(packed)
        with parts.part("sample"):
            launched = engine.sample(plan, forward)
        with parts.part("finish"):
            result = engine.finish(launched)
        with parts.part("commit"):
            scheduler.commit(result)
        tokens = sum(row.count for row in plan.rows)
        if tokens >= PROMPTS * len(plan.rows) > 0:
            parts.prompts.append(parts.samples["forward"][-1] / tokens)
        if len(plan.rows) != rows or any(row.count != 1 for row in plan.rows):  # not a pure decode step
            for name, samples in parts.samples.items():
                del samples[before.get(name, 0) :]


async def in_process_gaps(
    engine_spec: EngineSpec, rows: int, mixed: bool, prompt: int, steps: int
) -> tuple[list[float], list[float]]:
    """Through the actors: (gaps, step seconds) of the steps that carried all rows."""
    gaps: list[float] = []
    seconds: list[float] = []
    commit = SchedulerActor._commit

    def watching(self: SchedulerActor, sampled: StepFinished) -> object:
        if len(sampled.result.tokens) == rows and all(sampled.result.tokens):
            gaps.append(sampled.gap_seconds)
            seconds.append(sampled.seconds)
        return commit(self, sampled)

    SchedulerActor._commit = watching  # type: ignore[method-assign, assignment]  # looks on, for the benchmark alone
    try:
        async with open_in_process(engine_spec) as client, anyio.create_task_group() as tasks:
            for log in logs(engine_spec, rows, mixed, prompt, steps):
                tasks.start_soon(_drain, client, log)
    finally:
        SchedulerActor._commit = commit  # type: ignore[method-assign]  # as it was
    return gaps[WARM_UP:], seconds[WARM_UP:]


async def multi_process_gaps(
    options: EngineOptions,
    engine_spec: EngineSpec,
    rows: int,
    mixed: bool,
    prompt: int,
    steps: int,
    command: Sequence[str] = COMMAND,
) -> tuple[list[float], list[float]]:
    """The same with the engine core in a separate process: its load messages have every step's figures."""
    gaps: list[float] = []
    seconds: list[float] = []
    update = LatestStats.update
    before = SchedulerStats()

    def watching(self: LatestStats, stats: SchedulerStats) -> None:
        nonlocal before
        now, past = stats.counters, before.counters
        if now.steps == past.steps + 1 and stats.running == rows:
            gaps.append(now.gap_seconds - past.gap_seconds)
            seconds.append(now.step_seconds - past.step_seconds)
        before = stats
        update(self, stats)

    LatestStats.update = watching  # type: ignore[method-assign]  # looks on, for the benchmark alone
    try:
        async with (
            open_multi_process(options, command=command) as engine_processes,
            anyio.create_task_group() as tasks,
        ):
            for log in logs(engine_spec, rows, mixed, prompt, steps):
                tasks.start_soon(_drain, engine_processes.client, log)
    finally:
        LatestStats.update = update  # type: ignore[method-assign]  # as it was
    return gaps[WARM_UP:], seconds[WARM_UP:]


async def _drain(client: EngineClient, log: SequenceLog) -> None:
    async with client.stream([log]) as stream:
        async for _ in stream:
            pass


def operators(
    engine_spec: EngineSpec, rows: int, mixed: bool, prompt: int, steps: int
) -> list[tuple[str, int, float]]:
    """Where the host's time goes: operators by name, how often each is called and its own seconds in total,
    the longest first. Profiling itself takes time, more for small operators."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        engine_parts(engine_spec, rows, mixed, prompt, steps)
    events = sorted(profiler.key_averages(), key=lambda event: -event.self_cpu_time_total)
    return [(event.key, event.count, event.self_cpu_time_total / 1e6) for event in events]


def report(
    model: Path | None,
    adapters: Path | None,
    rows: int,
    prompt: int,
    steps: int,
    *,
    quantize: str | None = None,
    profile: bool = False,
    busy: bool = False,
) -> None:
    """Print the tables, in microseconds."""
    if busy:
        torch.set_num_threads(1)
    folders = (adapters,) if adapters else () if model else (DEMO / "adapters",)
    options = EngineOptions(
        model or DEMO / "model", folders, max_seqs=rows, max_model_len=2048, quantize=quantize
    )
    engine_spec = assemble(options).engine_spec
    console = Console()
    for mixed in (False, True) if folders else (False,):
        title = f"{rows} rows, {'all adapters in turn' if mixed else 'base'}"
        if busy:
            table = Table("part", "least us", "p50 us", title=f"{title}: CPU time on one thread")
            parts = engine_parts(engine_spec, rows, mixed, prompt, steps, time.process_time)
            for name, samples in parts.samples.items():
                table.add_row(name, f"{1e6 * min(samples[WARM_UP:]):.0f}", _quantiles(samples[WARM_UP:])[0])
            if parts.prompts:
                table.add_row(
                    "prompts, a token", f"{1e6 * min(parts.prompts):.0f}", _quantiles(parts.prompts)[0]
                )
            console.print(table)
            continue
        table = Table("part", "p50 us", "p95 us", title=f"{title}: the engine alone")
        parts = engine_parts(engine_spec, rows, mixed, prompt, steps)
        for name, samples in parts.samples.items():
            table.add_row(name, *_quantiles(samples[WARM_UP:]))
        if parts.prompts:
            table.add_row("prompts, a token", *_quantiles(parts.prompts))
        console.print(table)
        if profile:
            console.print(_profile(operators(engine_spec, rows, mixed, prompt, steps), title))
        together = anyio.run(
            in_process_gaps, engine_spec, rows, mixed, prompt, steps, backend_options={"use_uvloop": True}
        )
        apart = anyio.run(
            multi_process_gaps,
            options,
            engine_spec,
            rows,
            mixed,
            prompt,
            steps,
            backend_options={"use_uvloop": True},
        )
        for name, (gaps, seconds) in {"one process": together, "two processes": apart}.items():
            table = Table("", "p50 us", "p95 us", title=f"{title}: through the actors, {name}")
            table.add_row("step", *_quantiles(seconds))
            table.add_row("host time between steps", *_quantiles(gaps))
            console.print(table)


def _profile(found: list[tuple[str, int, float]], title: str) -> Table:
    total = sum(seconds for _, _, seconds in found)
    table = Table("operator", "calls", "ms", "share", title=f"{title}: operators, prompts included")
    for name, calls, seconds in found[:OPERATORS]:
        table.add_row(name, str(calls), f"{1000 * seconds:.1f}", f"{seconds / total:.1%}")
    return table


def _quantiles(samples: list[float]) -> tuple[str, str]:
    ordered = sorted(samples)
    if not ordered:  # no step after the warm-up had all rows
        return "-", "-"
    return f"{1e6 * statistics.median(ordered):.0f}", f"{1e6 * ordered[int(len(ordered) * 0.95)]:.0f}"
