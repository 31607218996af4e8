"""Checks whether an answer depends only on its request.

Through the target: the same request repeated, among many others, streamed, and after its prompt is in the
cache; greedy and seeded. On our own engines also: with so little memory for the KV cache that requests are
preempted, and with the engine killed in the middle of its answers.
"""

import random
import sys
from collections.abc import Sequence
from typing import Any, ClassVar

import anyio

from personae.evals.harness.subject import Subject
from personae.evals.harness.target import Body, closing
from personae.evals.suites.disturbed import SAMPLING, Answers, messages, preempted, restarted
from personae.evals.suites.suite import FREE, Case, Outcome, Skipped, Suite, SuiteSettings

AGAIN, COMPANY, STREAMED, PREEMPTED, RESTARTED = (
    "asked again",
    "in company",
    "streamed",
    "preempted",
    "restarted",
)


class DeterminismSettings(SuiteSettings, frozen=True):
    """tokens: length of the answers. requests: how many are compared. others: how many other requests run at
    the same time."""

    tokens: int = 48
    requests: int = 4
    others: int = 24


class Determinism(Suite):
    """One case per disturbance. It passes if every answer is the same as without it."""

    settings: ClassVar = DeterminismSettings
    about: ClassVar = "answers do not depend on batch, cache, streaming, preemption or restarts"
    modes: ClassVar = (FREE,)
    concurrency: ClassVar = 1

    def __init__(self, settings: DeterminismSettings) -> None:
        self._settings = settings

    def cases(self) -> Sequence[Case]:
        """Each disturbance, greedy and seeded. Those with our own engines do both at once."""
        return [
            *(
                Case(f"{disturbance}/{sampling}", disturbance, sampling)
                for disturbance in (AGAIN, COMPANY, STREAMED)
                for sampling in SAMPLING
            ),
            *(Case(f"{disturbance}/both", disturbance) for disturbance in (PREEMPTED, RESTARTED)),
        ]

    def plays(self, case: Case, model: str, mode: str, *, base: bool) -> bool:
        """A case with its own engine runs once, over base and adapters."""
        return mode == FREE and (base or case.task not in (PREEMPTED, RESTARTED))

    async def play(self, case: Case, subject: Subject) -> Sequence[Outcome]:
        """Compare all answers of the case."""
        happened = 1
        if case.task in (PREEMPTED, RESTARTED):
            calm, disturbed, happened = await _on_our_own(case.task, subject)
        else:
            calm, disturbed = await self._through_the_target(case, subject)
        wrong = [place for place, (a, b) in enumerate(zip(calm, disturbed, strict=True)) if a != b]
        notes = [f"{len(wrong)} of {len(calm)} answers differ"] if wrong else []
        if not happened:
            notes.append("nothing was disturbed, so this shows nothing")
        first = wrong[0] if wrong else 0
        return [
            Outcome(
                passed=not wrong and happened > 0,
                scores={"same": 1.0 - len(wrong) / len(calm)},
                values={"disturbances": happened} if case.data is None else {},
                expected=calm[first],
                answer=disturbed[first],
                note="; ".join(notes),
            )
        ]

    async def _through_the_target(self, case: Case, subject: Subject) -> tuple[list[str], list[str]]:
        fields = {**SAMPLING[case.data], "max_tokens": self._settings.tokens}
        requests = [
            (messages(number), {**fields, "seed": number}) for number in range(self._settings.requests)
        ]
        calm = [await _text(subject, *request) for request in requests]
        if case.task == COMPANY:
            return calm, await self._multi_process(subject, requests, fields)
        how = _text if case.task == AGAIN else _streamed
        return calm, [await how(subject, *request) for request in requests]

    async def _multi_process(self, subject: Subject, requests: list[Any], fields: Body) -> list[str]:
        """The same requests among many others, which come and go."""
        answers = [""] * len(requests)

        async def one(place: int) -> None:
            answers[place] = await _text(subject, *requests[place])

        async def other(number: int) -> None:
            length = random.Random(number).randrange(1, self._settings.tokens)
            await _text(subject, messages(1000 + number), {**fields, "max_tokens": length, "seed": number})

        async with anyio.create_task_group() as tasks:
            for number in range(self._settings.others):
                tasks.start_soon(other, number)
                if number < len(requests):
                    tasks.start_soon(one, number)
            for place in range(self._settings.others, len(requests)):
                tasks.start_soon(one, place)
        return answers


async def _on_our_own(disturbance: str, subject: Subject) -> Answers:
    source = subject.target.source
    if source is None:
        raise Skipped("it needs an engine of its own, and the server's folders are not known here")
    if disturbance == RESTARTED and sys.platform != "linux":
        raise Skipped("the engine's process is found in /proc")
    return await (preempted if disturbance == PREEMPTED else restarted)(source)


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
