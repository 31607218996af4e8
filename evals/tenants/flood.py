"""One tenant sends 200 requests at once: how long another waits for its first tokens, beside FCFS.

    python -m personae.evals.tenants.flood --model models/smol135

The engine in this process, without HTTP. The quiet tenant asks one thing after the other, first alone, then
while the other's flood is there; by virtual token counters, and first come, first served. Prints p50 and p99
of its time to the first token, how long steps took, and the bound that p99 is meant to keep: twice its
unloaded value plus one step, by the mean of the steps and by their p99 (many prompts of the flood at once).
"""

import random
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import anyio
import typer

from personae.actors.assembly import EngineOptions, assemble
from personae.actors.front import LocalClient
from personae.actors.stage import open_stage
from personae.api.local import DEMO
from personae.engine.fairness import FairnessPolicy, VirtualTokenCounters
from personae.engine.params import SamplingParams
from personae.engine.scheduler import Scheduler
from personae.engine.sequence import SequenceLog
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
    """Seconds to the first token; the answer is waited for."""
    begun, first = anyio.current_time(), 0.0
    async with client.stream([sequence]) as stream:
        async for delta in stream:
            if delta.tokens and not first:
                first = anyio.current_time() - begun
    return first


async def quiet(client: LocalClient, name: str, count: int, prompt: int) -> list[float]:
    """The quiet tenant's times."""
    return [await first_token(client, log(f"{name}-{i}", "quiet", prompt, 8)) for i in range(count)]


async def watch(client: LocalClient, steps: list[float]) -> None:
    """Note how long each step takes; for ever."""
    last = client.stats()
    while True:
        await anyio.sleep(0.001)
        now = client.stats()
        if now.steps > last.steps:
            steps.append((now.step_seconds - last.step_seconds) / (now.steps - last.steps))
            last = now


def percentile(times: list[float], share: float) -> float:
    """The value that so many per cent are not above."""
    return sorted(times)[min(int(len(times) * share / 100), len(times) - 1)]


async def play(model: Path, policy: str, count: int, prompt: int, tokens: int, max_seqs: int) -> None:
    """One engine with that policy: alone, and under the flood."""
    options = EngineOptions(model, device="cpu", max_seqs=max_seqs, max_model_len=1024)
    script = assemble(options).script
    layout = script.layout
    script = replace(
        script,
        build_scheduler=lambda: Scheduler(layout, POLICIES[policy](), sharing=policy == "vtc"),
        window=FLOOD + count,
    )
    async with open_stage(script) as client:
        await quiet(client, f"{policy}-warm", 3, prompt)
        alone = await quiet(client, f"{policy}-alone", count, prompt)
        async with anyio.create_task_group() as tasks:
            for i in range(FLOOD):
                tasks.start_soon(first_token, client, log(f"{policy}-flood-{i}", "loud", prompt, tokens))
            steps: list[float] = []
            tasks.start_soon(watch, client, steps)
            await anyio.sleep(0.5)
            flooded = await quiet(client, f"{policy}-flooded", count, prompt)
            tasks.cancel_scope.cancel()
        while client.stats().running:  # noqa: ASYNC110  a step is under way
            await anyio.sleep(0.05)
    mean, longest = statistics.mean(steps), percentile(steps, 99)
    twice = 2 * percentile(alone, 99)
    print(
        f"{policy}: alone p50 {statistics.median(alone) * 1e3:.0f} ms, "
        f"p99 {percentile(alone, 99) * 1e3:.0f}; "
        f"flooded p50 {statistics.median(flooded) * 1e3:.0f}, p99 {percentile(flooded, 99) * 1e3:.0f}; "
        f"steps {mean * 1e3:.0f}, p99 {longest * 1e3:.0f}; "
        f"bounds {(twice + mean) * 1e3:.0f} and {(twice + longest) * 1e3:.0f}",
        flush=True,
    )


def main(
    model: Annotated[Path, typer.Option(help="A model folder.")] = DEMO / "model",
    count: Annotated[int, typer.Option(help="Requests of the quiet tenant.")] = 30,
    prompt: Annotated[int, typer.Option(help="Tokens of a prompt.")] = 64,
    tokens: Annotated[int, typer.Option(help="Of a flooding request's answer.")] = 64,
    max_seqs: Annotated[int, typer.Option(help="Sequences that run at a time.")] = 16,
) -> None:
    """Measure."""
    for policy in POLICIES:
        anyio.run(play, model, policy, count, prompt, tokens, max_seqs)


if __name__ == "__main__":
    typer.run(main)
