"""Our own engines, disturbed while they answer: by too little memory, or by killing their process."""

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
TOKENS = 96  # per answer, so that there is time for a disturbance
ROUNDS = 10  # the most rounds until answers were disturbed

Answers = tuple[list[str], list[str], int]
"""The answers undisturbed and disturbed, and the number of disturbances."""


def messages(number: int, words: int = 24) -> list[Body]:
    """A conversation that is the same for a number, and different for other numbers."""
    rng = random.Random(number)
    return [{"role": "user", "content": " ".join(rng.choices(WORDS, k=words))}]


async def preempted(source: Source) -> Answers:
    """All requests at once, first with plenty of KV cache, then with room for a few, so that they are
    preempted."""
    calm, _ = await _all_at_once(source, {})
    tight, happened = await _all_at_once(source, {"kv_memory": _tight(source), "max_model_len": 256})
    return calm, tight, happened


async def restarted(source: Source) -> Answers:
    """All requests at once, first undisturbed, then with the engine's process killed while it answers, twice
    if there is time."""
    calm, _ = await _all_at_once(source, {})
    supervision = logging.getLogger("personae")
    level = supervision.level
    supervision.setLevel(logging.CRITICAL)  # the reported deaths are caused here
    try:
        killed, happened = await _all_at_once(source, {"one_process": False}, _kill_twice)
    finally:
        supervision.setLevel(level)
    return calm, killed, happened


def _tight(source: Source) -> int:
    """Bytes of KV cache, in single precision, for about 500 tokens: a quarter of what all requests need."""
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
    """`kill -9` of the engine's process after it has begun to answer."""
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
    """The engine processes started by this process."""
    listed = [file.read_text().split() for file in Path("/proc/self/task").glob("*/children")]
    return [
        int(pid)
        for pid in {pid for pids in listed for pid in pids}
        if b"personae.actors.enginecore" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
