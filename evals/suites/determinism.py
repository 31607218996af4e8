"""Whether an answer depends on anything but its request.

Through the target: the same request again, beside many others, streamed, and after its prompt has been seen
before; greedy and seeded. On engines of our own besides: with so little memory for the KV cache that requests
are preempted, and with the engine killed in the middle of its answers.
"""

import json
import os
import random
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, ClassVar

import anyio

from personae.evals.harness.subject import Subject
from personae.evals.harness.target import Body, Source, closing
from personae.evals.suites.suite import FREE, Case, Outcome, Skipped, Suite, SuiteSettings

AGAIN, COMPANY, STREAMED, PREEMPTED, RESTARTED = (
    "asked again",
    "in company",
    "streamed",
    "preempted",
    "restarted",
)
WORDS = ["lamp", "tea", "mask", "red", "seven", "river", "parcel", "stage", "actor", "verse", "moon", "bread"]
SAMPLING = {"greedy": {"temperature": 0.0}, "seeded": {"temperature": 1.0, "top_p": 0.9}}


class DeterminismSettings(SuiteSettings, frozen=True):
    """tokens: length of the answers. requests: how many are compared. crowd: how many others run beside."""

    tokens: int = 48
    requests: int = 4
    crowd: int = 24


class Determinism(Suite):
    """One case a disturbance and way of sampling; it passes if every answer is what it was undisturbed."""

    settings: ClassVar = DeterminismSettings
    about: ClassVar = "answers do not depend on batch, cache, streaming, preemption or restarts"
    modes: ClassVar = (FREE,)
    concurrency: ClassVar = 1

    def __init__(self, settings: DeterminismSettings) -> None:
        self._settings = settings

    def cases(self) -> Sequence[Case]:
        """Each disturbance, greedy and seeded."""
        return [
            Case(f"{disturbance}/{sampling}", disturbance, sampling)
            for disturbance in (AGAIN, COMPANY, STREAMED, PREEMPTED, RESTARTED)
            for sampling in SAMPLING
        ]

    def plays(self, case: Case, model: str, mode: str, *, base: bool) -> bool:
        """What needs an engine of its own is done once, over base and adapters."""
        return mode == FREE and (base or case.task not in (PREEMPTED, RESTARTED))

    async def play(self, case: Case, subject: Subject) -> Sequence[Outcome]:
        """Compare all answers of the case."""
        fields = {**SAMPLING[case.data], "max_tokens": self._settings.tokens}
        requests = [
            (messages(number), {**fields, "seed": number}) for number in range(self._settings.requests)
        ]
        calm = [await _text(subject, *request) for request in requests]
        values: dict[str, float] = {}
        if case.task == AGAIN:
            disturbed = [await _text(subject, *request) for request in requests]
        elif case.task == STREAMED:
            disturbed = [await _streamed(subject, *request) for request in requests]
        elif case.task == COMPANY:
            disturbed = await self._in_company(subject, requests, fields)
        else:
            source = subject.target.source
            if source is None:
                raise Skipped("it needs an engine of its own, and the server's folders are not known here")
            if case.task == RESTARTED and sys.platform != "linux":
                raise Skipped("processes are found in /proc")
            how = _preempted if case.task == PREEMPTED else _restarted
            calm, disturbed, values = await how(source, fields)
        wrong = [place for place, (a, b) in enumerate(zip(calm, disturbed, strict=True)) if a != b]
        notes = [f"{len(wrong)} of {len(calm)} answers differ"] if wrong else []
        happened = values.get("disturbances", 1.0) > 0
        if not happened:
            notes.append("nothing was disturbed, so this shows nothing")
        first = wrong[0] if wrong else 0
        return [
            Outcome(
                passed=not wrong and happened,
                scores={"same": 1.0 - len(wrong) / len(calm)},
                values=values,
                expected=calm[first],
                answer=disturbed[first],
                note="; ".join(notes),
            )
        ]

    async def _in_company(self, subject: Subject, requests: list[Any], fields: Body) -> list[str]:
        """The same requests among a crowd of others, which come and go meanwhile."""
        answers = [""] * len(requests)

        async def one(place: int) -> None:
            answers[place] = await _text(subject, *requests[place])

        async def other(number: int) -> None:
            length = random.Random(number).randrange(1, self._settings.tokens)
            await _text(subject, messages(1000 + number), {**fields, "max_tokens": length, "seed": number})

        async with anyio.create_task_group() as tasks:
            for number in range(self._settings.crowd):
                tasks.start_soon(other, number)
                if number < len(requests):
                    tasks.start_soon(one, number)
            for place in range(self._settings.crowd, len(requests)):
                tasks.start_soon(one, place)
        return answers


def messages(number: int, words: int = 24) -> list[Body]:
    """A conversation that is the same for a number, and another for every other."""
    rng = random.Random(number)
    return [{"role": "user", "content": " ".join(rng.choices(WORDS, k=words))}]


async def _text(subject: Subject, said: list[Body], fields: Body) -> str:
    choice = (await subject.chat(said, **fields))["choices"][0]
    return f"{choice['message'].get('content')} [{choice['finish_reason']}]"


async def _streamed(subject: Subject, said: list[Body], fields: Body) -> str:
    text, finish = "", None
    async with closing(subject.stream_chat(said, **fields)) as chunks:
        async for chunk in chunks:
            for choice in chunk["choices"]:
                text += choice["delta"].get("content") or ""
                finish = choice.get("finish_reason") or finish
    return f"{text} [{finish}]"


Answers = tuple[list[str], list[str], dict[str, float]]


async def _preempted(source: Source, fields: Body) -> Answers:
    """All at once with plenty of KV cache, and with room for a few; long answers, so that it gets tight."""
    fields = {**fields, "max_tokens": 160, "ignore_eos": True}
    calm, _ = await _all_at_once(source, fields, {})
    tight, happened = await _all_at_once(source, fields, {"kv_memory": _tight(source), "max_model_len": 512})
    return calm, tight, {"disturbances": happened}


async def _restarted(source: Source, fields: Body) -> Answers:
    """All at once, and again with the engine's process killed twice while it answers."""
    fields = {**fields, "max_tokens": 160, "ignore_eos": True}
    calm, _ = await _all_at_once(source, fields, {})
    killed, happened = await _all_at_once(source, fields, {"one_process": False}, _kill_twice)
    return calm, killed, {"disturbances": happened}


def _tight(source: Source) -> int:
    """Bytes of KV cache, in single precision, for some 800 tokens: a fifth of what all requests want."""
    config = json.loads((source.model / "config.json").read_text())
    heads = config["num_attention_heads"]
    width = config.get("head_dim") or config["hidden_size"] // heads
    per_token = 2 * 4 * config["num_hidden_layers"] * config.get("num_key_value_heads", heads) * width
    return int(800 * per_token)


Disturb = Callable[[Any], Coroutine[Any, Any, None]]


async def _all_at_once(
    source: Source, fields: Body, options: Body, disturb: Disturb | None = None, requests: int = 24
) -> tuple[list[str], float]:
    """Answers of an engine of its own, of base and adapters in turn; how often it was disturbed."""
    import personae

    folders = {path.parent for path in source.adapters.values()}
    answers = [""] * requests
    own = {"adapters": sorted(folders), "device": "cpu", "dtype": "float32", **options}
    async with personae.open(source.model, **own) as engine:

        async def ask(place: int) -> None:
            model = engine.models[place % len(engine.models)]
            answer = await engine.chat(messages(place), model=model, **{**fields, "seed": place})
            choice = answer.choices[0]
            answers[place] = f"{choice.message.content} [{choice.finish_reason}]"

        async with anyio.create_task_group() as around:
            if disturb is not None:
                around.start_soon(disturb, engine)
            async with anyio.create_task_group() as tasks:
                for place in range(requests):
                    tasks.start_soon(ask, place)
            around.cancel_scope.cancel()
        stats = engine.stats()
    return answers, float(stats.restarts if disturb else stats.preemptions)


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
        if b"personae.actors.back" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
