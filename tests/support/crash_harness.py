"""Submissions of every kind to an engine whose engine core may die, and their results."""

import json
import random
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import anyio
import pytest
from engine_harness import Played
from msgspec.structs import replace
from tiny_adapters import ZOO, make_zoo
from tiny_models import VOCAB

from personae.actors.client import EngineClient
from personae.actors.multi_process import MultiProcessEngine
from personae.actors.options import EngineOptions
from personae.engine.params import SamplingParams
from personae.engine.sequence import SequenceLog
from personae.grammar.spec import GrammarSpec

NAMES = [*list(ZOO)[:2], None]
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["bug", "wish"]}, "urgent": {"type": "boolean"}},
    "required": ["kind", "urgent"],
    "additionalProperties": False,
}


def with_adapters(folder: Path, base: Path, *, max_seqs: int, kv_memory: int) -> EngineOptions:
    """A small engine of a base with the adapters of `NAMES`, which are made in the folder."""
    make_zoo(folder, base, NAMES)
    return EngineOptions(
        base,
        (folder,),
        device="cpu",
        dtype="float32",
        max_seqs=max_seqs,
        max_batch_tokens=64,
        kv_memory=kv_memory,
    )


def mixed(engine_processes: MultiProcessEngine) -> list[list[SequenceLog]]:
    """Submissions: greedy, seeded, bound, with logprobs, of every adapter, single and with siblings."""
    models = engine_processes.client.models("default")
    cards = [next(iter(models.values())) if name is None else models[name] for name in NAMES]
    made = []
    for number, card in enumerate(cards * 2):
        rng = random.Random(number)
        log = SequenceLog(
            id=f"s{number}",
            tokens=tuple(rng.choices(range(4, VOCAB), k=5 + 9 * number)),
            prompt_length=5 + 9 * number,
            params=SamplingParams(max_tokens=40, seed=number, temperature=0.9 * (number % 2), logprobs=2),
            adapter=card.adapter,
            eos=(0, 2),
        )
        made.append([log])
    first = made[0][0]
    bound = replace(
        first,
        id="bound",
        grammar=GrammarSpec("json_schema", json.dumps(SCHEMA)),
        params=replace(first.params, max_tokens=300, temperature=1.0),
    )
    sibling = replace(first, id="twin", params=replace(first.params, seed=9, temperature=1.0), after="s0")
    made[0].append(sibling)
    return [*made, [bound]]


async def play(client: EngineClient, logs: Sequence[SequenceLog], played: dict[str, Played]) -> None:
    async with client.stream(logs) as stream:
        async for delta in stream:
            one = played[delta.id]
            assert one.finish is None, "a delta after the end"
            one.tokens += delta.tokens
            one.logprobs += delta.logprobs
            one.finish, one.error = delta.finish, delta.error


async def play_mixed(engines: MultiProcessEngine, name: str) -> dict[str, Played]:
    """Plays `mixed` once; the answers by their ids. `name`: another one each time."""
    logs = [
        [replace(log, id=f"{name}/{log.id}", after=log.after and f"{name}/{log.after}") for log in logs]
        for logs in mixed(engines)
    ]
    played = await play_all(engines.client, logs)
    return {id.removeprefix(f"{name}/"): answer for id, answer in played.items()}


async def play_all(client: EngineClient, submissions: Sequence[Sequence[SequenceLog]]) -> dict[str, Played]:
    played: dict[str, Played] = defaultdict(Played)
    async with anyio.create_task_group() as tasks:
        for logs in submissions:
            tasks.start_soon(play, client, logs, played)
    return {id: played[id] for id in sorted(played)}


def same(a: dict[str, Played], b: dict[str, Played]) -> bool:
    """Whether tokens, ends and ranks are equal, and logprobs equal up to rounding: a prompt that is computed
    again has other chunks."""
    for id in a.keys() | b.keys():
        x, y = a[id], b[id]
        assert (x.tokens, x.finish) == (y.tokens, y.finish), id
        for mine, theirs in zip(x.logprobs, y.logprobs, strict=True):
            assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)
    return True


class Clock:
    """The frontend's clock for engine cores that hang. Tests can advance it, and it is read often. So the
    engine core may have more time than any busy machine needs."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def now(self) -> float:
        return anyio.current_time() + self.ahead

    async def sleep(self, seconds: float) -> None:
        await anyio.sleep(min(seconds, 0.05))
