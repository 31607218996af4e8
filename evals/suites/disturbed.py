"""Engines of our own that are disturbed while they answer: too little memory, or a process that is killed."""

import logging
import os
import random
import signal
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import anyio
import torch

from personae.engine.checkpoints import open_checkpoint
from personae.engine.kv import KVCache
from personae.evals.harness.target import Body, Source

WORDS = ["lamp", "tea", "mask", "red", "seven", "river", "parcel", "stage", "actor", "verse", "moon", "bread"]
SAMPLING: dict[str, Body] = {"greedy": {"temperature": 0.0}, "seeded": {"temperature": 1.0, "top_p": 0.9}}
REQUESTS = 12
TOKENS = 96  # of an answer, so that there is time to be disturbed
ROUNDS = 10  # of questions at most, until they were disturbed while they were answered

Answers = tuple[list[str], list[str], int]
"""Undisturbed, disturbed, and how often it was."""


def messages(number: int, words: int = 24) -> list[Body]:
    """A conversation that is the same for a number, and another for every other."""
    rng = random.Random(number)
    return [{"role": "user", "content": " ".join(rng.choices(WORDS, k=words))}]


async def preempted(source: Source) -> Answers:
    """All at once with plenty of KV cache, and with room for a few, so that requests take turns."""
    calm, _ = await _all_at_once(source, {})
    tight, happened = await _all_at_once(source, {"kv_memory": _tight(source), "max_model_len": 256})
    return calm, tight, happened


async def restarted(source: Source) -> Answers:
    """All at once, and again with the engine's process killed, twice if there is time, while it answers."""
    calm, _ = await _all_at_once(source, {})
    supervision = logging.getLogger("personae")
    level = supervision.level
    supervision.setLevel(logging.CRITICAL)  # what it will report is what is done to it here
    try:
        killed, happened = await _all_at_once(source, {"one_process": False}, _kill_twice)
    finally:
        supervision.setLevel(level)
    return calm, killed, happened


def _tight(source: Source) -> int:
    """Bytes of KV cache, in single precision, for some 500 tokens: a quarter of what all requests want."""
    config = open_checkpoint(source.model).config()
    return KVCache.bytes_per_page(config.kv_specs, 500, torch.float32)


Disturb = Callable[[Any], Coroutine[Any, Any, None]]


async def _all_at_once(
    source: Source, options: Body, disturb: Disturb | None = None
) -> tuple[list[str], int]:
    """Answers of base and adapters, greedy and seeded, and how often they were disturbed."""
    import personae

    folders = {path.parent for path in source.adapters.values()}
    answers = [""] * REQUESTS
    own = {"adapters": sorted(folders), "device": "cpu", "dtype": "float32", **options}
    async with personae.open(source.model, **own) as engine:

        async def ask(place: int) -> None:
            model = engine.models[place % len(engine.models)]
            sampling = list(SAMPLING.values())[place // len(engine.models) % 2]
            answer = await engine.chat(
                messages(place), model=model, max_tokens=TOKENS, ignore_eos=True, seed=place, **sampling
            )
            choice = answer.choices[0]
            answers[place] = f"{choice.message.content} [{choice.finish_reason}]"

        happened = 0
        for _ in range(ROUNDS):
            async with anyio.create_task_group() as around:
                if disturb is not None:
                    around.start_soon(disturb, engine)
                async with anyio.create_task_group() as tasks:
                    for place in range(REQUESTS):
                        tasks.start_soon(ask, place)
                around.cancel_scope.cancel()
            stats = engine.stats()
            happened = stats.restarts if disturb else stats.counters.preemptions
            if happened or not options:
                break
    return answers, happened


async def _kill_twice(engine: Any) -> None:
    """`kill -9` of the engine's process, when it has begun to answer."""
    for _ in range(2):
        restarts = engine.stats().restarts
        while not engine.stats().ready or engine.stats().running == 0:  # noqa: ASYNC110  nobody tells
            await anyio.sleep(0.01)
        await anyio.sleep(0.1)
        for pid in _children():
            os.kill(pid, signal.SIGKILL)
        while engine.stats().restarts == restarts:  # noqa: ASYNC110  as above
            await anyio.sleep(0.01)


def _children() -> list[int]:
    """Engine processes of this one."""
    listed = [file.read_text().split() for file in Path("/proc/self/task").glob("*/children")]
    return [
        int(pid)
        for pid in {pid for pids in listed for pid in pids}
        if b"personae.actors.enginecore.core" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
