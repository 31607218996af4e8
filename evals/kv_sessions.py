"""Conversations whose keys and values do not fit in memory, with --kv-disk and without it.

    python -m personae.evals.kv_sessions --sessions 64 --turns 8

All sessions have their first turn, then all have their second, and so on; so many `--clients` ask at once. A
turn is the conversation so far and `--tokens` new ones. The KV cache has `--memory`; by default about 30 % of
the sessions of SmolLM2-135M fit. Plays the same turns with the tier and without it, and compares the answers.
Prints turns per second, the prompt tokens that were cached, and the ratio. With SmolLM2-135M on two cores it
takes about five minutes.
"""

import random
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, NamedTuple

import anyio
import typer
from anyio import to_thread

from personae.actors.assembly import assemble
from personae.actors.client import EngineClient
from personae.actors.in_process import open_in_process
from personae.actors.options import EngineOptions, parse_size
from personae.api.bundled import DEMO, smollm2
from personae.engine.params import SamplingParams
from personae.engine.sequence import SequenceLog
from personae.engine.tiers.disk import DiskTier

ANSWER = 8  # tokens


class Talk(NamedTuple):
    """How many sessions there are, and how they go on."""

    sessions: int
    turns: int
    tokens: int
    clients: int


class Figures(NamedTuple):
    """What a run took, how many prompt tokens were cached, and the answers by session and turn."""

    seconds: float
    cached: int
    answers: dict[tuple[int, int], tuple[int, ...]]


async def play(client: EngineClient, talk: Talk) -> Figures:
    """Play all turns."""
    conversations: list[tuple[int, ...]] = [()] * talk.sessions
    answers: dict[tuple[int, int], tuple[int, ...]] = {}
    cached = 0

    async def turn(number: int, session: int) -> None:
        nonlocal cached
        dice = random.Random(f"{number} {session}")
        asked = conversations[session] + tuple(dice.choices(range(10, client.vocab_size), k=talk.tokens))
        log = SequenceLog(
            f"{number}-{session}",
            asked,
            len(asked),
            SamplingParams(max_tokens=ANSWER, temperature=0.0, seed=0, ignore_eos=True),
            session=f"{session}",
            session_seconds=3600.0,
        )
        answer: tuple[int, ...] = ()
        async with client.stream([log]) as stream:
            async for delta in stream:
                cached += delta.cached or 0
                answer += delta.tokens
        answers[session, number] = answer
        conversations[session] = asked + answer

    async def ask(number: int, sessions: list[int]) -> None:
        while sessions:
            await turn(number, sessions.pop())

    begun = time.perf_counter()
    for number in range(talk.turns):
        left = list(range(talk.sessions))[::-1]
        async with anyio.create_task_group() as tasks:
            for _ in range(talk.clients):
                tasks.start_soon(ask, number, left)
        print(f"  turn {number + 1}: {time.perf_counter() - begun:.0f} s", flush=True)
    return Figures(time.perf_counter() - begun, cached, answers)


async def measure(options: EngineOptions, talk: Talk) -> None:
    """Play with the tier and without it, and print."""
    found: dict[str, Figures] = {}
    for name, one in {"with the disk": options, "without": replace(options, kv_disk=None)}.items():
        print(name, flush=True)
        assembly = assemble(one)
        async with open_in_process(assembly.engine_spec) as client:
            found[name] = figures = await play(client, talk)
        tier = assembly.engine_spec.tier
        if isinstance(tier, DiskTier):
            await to_thread.run_sync(tier.close)
        rate = talk.sessions * talk.turns / figures.seconds
        print(f"{name}: {rate:.2f} turns/s, {figures.cached} prompt tokens cached", flush=True)
    disk, without = found["with the disk"], found["without"]
    if disk.answers != without.answers:
        raise SystemExit("the answers differ")
    print(f"{without.seconds / disk.seconds:.2f} times the turns per second, and the same answers")


def main(
    sessions: Annotated[int, typer.Option(min=1)] = 64,
    turns: Annotated[int, typer.Option(min=1)] = 8,
    tokens: Annotated[int, typer.Option(min=1, help="New ones in each turn.")] = 64,
    clients: Annotated[int, typer.Option(min=1, help="Turns at once.")] = 8,
    memory: Annotated[str, typer.Option(help="Of the KV cache.")] = "256MiB",
    model: Annotated[
        Path | None, typer.Option(help="A model; without it SmolLM2-135M if it is installed, or the demo's.")
    ] = None,
) -> None:
    """Measure and print."""
    folder = model or smollm2() or DEMO / "model"
    talk = Talk(sessions, turns, tokens, clients)
    context = turns * (tokens + ANSWER)
    with tempfile.TemporaryDirectory() as disk:
        options = EngineOptions(
            folder,
            kv_memory=parse_size(memory),
            kv_disk=Path(disk),
            kv_disk_bytes=2**33,
            max_model_len=context + 16,
            max_seqs=clients,
        )
        anyio.run(measure, options, talk)


if __name__ == "__main__":
    typer.run(main)
