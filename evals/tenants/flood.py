"""One tenant always has 200 requests waiting: how long does another wait for its first tokens, compared with
FCFS?

    python -m personae.evals.tenants.flood --model models/smol135

The engine runs in this process, without HTTP. The quiet tenant sends one request after another, first alone,
then during the other tenant's flood: with virtual token counters, and first come, first served. In the
latter, one request is enough, because it waits for the whole flood. Prints p50, p99 and maximum of its times
to the first token, how long steps took, tokens per second, and the bound for p99: twice its unloaded value
plus one step, by the mean of the steps and by their p99 (many prompts of the flood at once).
"""

import math
import random
import statistics
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Annotated

import anyio
import typer

from personae.actors.assembly import assemble
from personae.actors.frontend.frontend import LocalClient
from personae.actors.in_process import open_in_process
from personae.actors.options import EngineOptions
from personae.api.bundled import DEMO
from personae.engine.params import SamplingParams
from personae.engine.plan import MemoryLayout, StepResult
from personae.engine.scheduling.fairness import FairnessPolicy, VirtualTokenCounters
from personae.engine.scheduling.scheduler import Scheduler
from personae.engine.sequence import Delta, SequenceLog
from personae.evals.tenants.fcfs import FirstComeFirstServed

FLOOD = 200
POLICIES: dict[str, Callable[[], FairnessPolicy]] = {
    "vtc": VirtualTokenCounters,
    "fcfs": FirstComeFirstServed,
}


def log(id: str, tenant: str, prompt: int, tokens: int) -> SequenceLog:
    """A request of random tokens."""
    rng = random.Random(id)
    text = tuple(rng.choices(range(10, 1000), k=prompt))
    params = SamplingParams(max_tokens=tokens, temperature=0.0, seed=0, ignore_eos=True)
    return SequenceLog(id, text, prompt, params, tenant=tenant, salt=tenant.encode())


async def first_token(client: LocalClient, sequence: SequenceLog) -> float:
    """Seconds to the first token. Waits for the whole answer."""
    begun, first = anyio.current_time(), 0.0
    async with client.stream([sequence]) as stream:
        async for delta in stream:
            if delta.tokens and not first:
                first = anyio.current_time() - begun
    return first


async def quiet(client: LocalClient, name: str, requests: int, prompt: int) -> list[float]:
    """The quiet tenant's times."""
    return [await first_token(client, log(f"{name}-{i}", "quiet", prompt, 8)) for i in range(requests)]


class Timed(Scheduler):
    """Records how long steps take and how many tokens they emit."""

    def __init__(self, layout: MemoryLayout, policy: FairnessPolicy, *, sharing: bool) -> None:
        super().__init__(layout, policy, sharing=sharing)
        self.seconds: list[float] = []
        self.tokens = 0

    def commit(self, result: StepResult, seconds: float = 0.0) -> tuple[Delta, ...]:
        """As a scheduler does."""
        deltas = super().commit(result, seconds)
        self.seconds.append(seconds)
        self.tokens += sum(len(delta.tokens) for delta in deltas)
        return deltas


async def flood(client: LocalClient, policy: str, number: int, prompt: int, tokens: int) -> None:
    """Send the flood's requests one after another, forever."""
    for turn in count():
        await first_token(client, log(f"{policy}-flood-{number}-{turn}", "loud", prompt, tokens))


def percentile(times: list[float], share: float) -> float:
    """The smallest value that at least this percentage does not exceed."""
    return sorted(times)[max(math.ceil(len(times) * share / 100) - 1, 0)]


async def play(model: Path, policy: str, requests: int, prompt: int, tokens: int, max_seqs: int) -> None:
    """One engine with that policy: alone, and during the flood."""
    options = EngineOptions(model, device="cpu", max_seqs=max_seqs, max_model_len=1024)
    engine_spec = assemble(options).engine_spec
    scheduler = Timed(engine_spec.layout, POLICIES[policy](), sharing=policy == "vtc")
    engine_spec = replace(engine_spec, build_scheduler=lambda: scheduler, window=FLOOD + 1)
    async with open_in_process(engine_spec) as client:
        await quiet(client, f"{policy}-warm", 3, prompt)
        alone = await quiet(client, f"{policy}-alone", requests, prompt)
        async with anyio.create_task_group() as tasks:
            for number in range(FLOOD):
                tasks.start_soon(flood, client, policy, number, prompt, tokens)
            await anyio.sleep(1)
            steps, before, begun = len(scheduler.seconds), scheduler.tokens, anyio.current_time()
            flooded = await quiet(client, f"{policy}-flooded", requests, prompt)
            speed = (scheduler.tokens - before) / (anyio.current_time() - begun)
            tasks.cancel_scope.cancel()
        while client.stats().running:  # noqa: ASYNC110  a step is under way
            await anyio.sleep(0.05)
    mean, longest = statistics.mean(scheduler.seconds[steps:]), percentile(scheduler.seconds[steps:], 99)
    twice = 2 * percentile(alone, 99)
    print(
        f"{policy}: alone {in_words(alone)}; flooded {in_words(flooded)}; "
        f"steps {mean * 1e3:.0f}, p99 {longest * 1e3:.0f}; {speed:.0f} tokens/s; "
        f"bounds {(twice + mean) * 1e3:.0f} and {(twice + longest) * 1e3:.0f}",
        flush=True,
    )


def in_words(times: list[float]) -> str:
    """The result as text."""
    return (
        f"p50 {statistics.median(times) * 1e3:.0f} ms, p99 {percentile(times, 99) * 1e3:.0f}, "
        f"most {max(times) * 1e3:.0f}"
    )


def main(
    model: Annotated[Path, typer.Option(help="A model folder.")] = DEMO / "model",
    requests: Annotated[int, typer.Option(help="Of the quiet tenant, by virtual token counters.")] = 100,
    prompt: Annotated[int, typer.Option(help="Tokens of a prompt.")] = 64,
    tokens: Annotated[int, typer.Option(help="Of a flooding request's answer.")] = 64,
    max_seqs: Annotated[int, typer.Option(help="Sequences that run at a time.")] = 16,
    only: Annotated[str, typer.Option(help="One of the policies.")] = "",
) -> None:
    """Measure."""
    for policy in [only] if only else POLICIES:
        anyio.run(play, model, policy, requests if policy == "vtc" else 1, prompt, tokens, max_seqs)


if __name__ == "__main__":
    typer.run(main)
