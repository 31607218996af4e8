"""A target that answers by script, and a small suite for it."""

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, ClassVar

import anyio

from personae.evals.harness.subject import Subject
from personae.evals.harness.target import TargetModel
from personae.evals.suites.suite import CONSTRAINED, FREE, Case, Outcome, Skipped, Suite, SuiteSettings

Body = dict[str, Any]
MODELS = (TargetModel("base", True), TargetModel("poet", False))


class ScriptedTarget:
    """`say` makes the text of an answer from a request's body, or raises. An answer takes `seconds`."""

    url: str | None = None
    about = "a script"
    source = None
    key = None

    def __init__(
        self, say: Callable[[Body], str], models: Sequence[TargetModel] = MODELS, seconds: float = 1.0
    ) -> None:
        self.say = say
        self.served = models
        self.seconds = seconds
        self.asked: list[Body] = []
        self.at_once = self.most_at_once = 0

    async def models(self) -> list[TargetModel]:
        return list(self.served)

    async def chat(self, body: Body) -> Body:
        text = await self._answer(body)
        return {"choices": [{"message": {"role": "assistant", "content": text}}], "usage": self._usage}

    async def complete(self, body: Body) -> Body:
        return {"choices": [{"text": await self._answer(body)}], "usage": self._usage}

    async def stream_chat(self, body: Body) -> AsyncIterator[Body]:
        for envelope in await self._answer(body):
            yield {"choices": [{"delta": {"content": envelope}}]}

    _usage: ClassVar = {"prompt_tokens": 5, "completion_tokens": 2}

    async def _answer(self, body: Body) -> str:
        self.asked.append(body)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            await anyio.sleep(self.seconds)
            return self.say(body)
        finally:
            self.at_once -= 1


class SumSettings(SuiteSettings, frozen=True):
    count: int = 4
    words: tuple[str, ...] = ()


class Sums(Suite):
    """Adds numbers. Adapters run only even cases, and 13 is skipped."""

    settings: ClassVar = SumSettings
    about: ClassVar = "sums"
    modes: ClassVar = (FREE, CONSTRAINED)
    concurrency: ClassVar[int | None] = None

    def __init__(self, settings: SumSettings) -> None:
        self.count = settings.count

    def cases(self) -> Sequence[Case]:
        return [Case(f"sum/{n}", "even" if n % 2 == 0 else "odd", n) for n in range(self.count)]

    def plays(self, case: Case, model: str, mode: str, *, base: bool) -> bool:
        return (base or case.task == "even") and mode in self.modes

    async def play(self, case: Case, subject: Subject) -> Sequence[Outcome]:
        if case.data == 13:
            raise Skipped("unlucky")
        answer = await subject.chat([{"role": "user", "content": f"{case.data} + 1"}])
        text = answer["choices"][0]["message"]["content"]
        passed = text == str(case.data + 1)
        return [
            Outcome(
                passed=passed,
                scores={"digits": float(text.isdigit())},
                values={"length": len(text)},
                prompt=f"{case.data} + 1",
                expected=str(case.data + 1),
                answer=text,
            )
        ]
