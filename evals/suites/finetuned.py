"""The tasks of the real model's adapters, on held-out questions (evals/demo/finetune).

free: the prompt alone. constrained: strict tools, or a schema or regular expression for the answer.
transformers: the free prompts through plain transformers and PEFT, for comparison; runs only if it is named.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

from anyio import Lock, to_thread

from personae.errors import GrammarError
from personae.evals.demo.finetune.questions import Question, grade, held_out
from personae.evals.demo.finetune.tasks import GENERATORS
from personae.evals.harness.subject import Subject
from personae.evals.suites.reference import Reference, source_for
from personae.evals.suites.suite import CONSTRAINED, FREE, Case, Outcome, Suite, SuiteSettings

TRANSFORMERS = "transformers"


class FinetunedSettings(SuiteSettings, frozen=True):
    """count: questions per task. limit: tokens of an answer. dtype: of transformers and PEFT."""

    count: int = 50
    limit: int = 256
    dtype: str = "bfloat16"


class Finetuned(Suite):
    """One case per question: for the base, and for the adapter with the task's name."""

    settings: ClassVar = FinetunedSettings
    about: ClassVar = "held-out tasks of the adapters of SmolLM2: tools, extract, sql, triage, verse"
    modes: ClassVar = (FREE, CONSTRAINED)

    def __init__(self, settings: FinetunedSettings) -> None:
        self._settings = settings
        self._reference: Reference | None = None
        self._lock: Lock | None = None

    def cases(self) -> Sequence[Case]:
        """The questions of all tasks."""
        return [
            Case(question.id, task, question)
            for task in GENERATORS
            for question in held_out(task, self._settings.count)
        ]

    def plays(self, case: Case, model: str, mode: str, *, base: bool) -> bool:
        """The base plays everything, an adapter its own task."""
        return (base or model == case.task) and mode in (FREE, CONSTRAINED, TRANSFORMERS)

    async def play(self, case: Case, subject: Subject) -> Sequence[Outcome]:
        """`right` passes. If the server rejects the request, the case fails with that message."""
        question: Question = case.data
        shown: dict[str, Any] = {
            "prompt": "\n\n".join(str(one["content"]) for one in question.body(bound=False)["messages"]),
            "expected": question.turn.answer,
        }
        try:
            message = await self._answer(question, subject)
        except GrammarError as refusal:
            note = f"The request was refused: {refusal.message}"
            return [Outcome(passed=False, note=note, **shown)]
        scores = grade(question, message)
        passed = scores.pop("right") == 1.0
        return [Outcome(passed=passed, scores=scores, answer=_written(message), **shown)]

    async def _answer(self, question: Question, subject: Subject) -> dict[str, Any]:
        if subject.mode == TRANSFORMERS:
            return {"content": await self._through_transformers(question, subject)}
        body = question.body(bound=subject.mode == CONSTRAINED)
        answer = await subject.chat(**body, max_tokens=self._settings.limit)
        message: dict[str, Any] = answer["choices"][0]["message"]
        return message

    async def _through_transformers(self, question: Question, subject: Subject) -> str:
        """The server tokenizes the prompt; transformers and PEFT do everything else."""
        source = source_for(subject)
        body = question.body(bound=False)
        ids = (await subject.chat(**body, max_tokens=1, return_token_ids=True))["prompt_token_ids"]
        self._lock = self._lock or Lock()
        async with self._lock:
            self._reference = self._reference or Reference(source, self._settings.dtype)
            adapter = None if subject.base else subject.model
            return await to_thread.run_sync(self._reference.greedy, adapter, ids, self._settings.limit)


def _written(message: dict[str, Any]) -> str:
    """The answer as text for the report."""
    calls = [
        f'<tool_call>{{"name": "{one["name"]}", "arguments": {one["arguments"]}}}</tool_call>'
        for one in (call["function"] for call in message.get("tool_calls") or ())
    ]
    return "\n".join([*([message["content"]] if message.get("content") else []), *calls])
