"""The demo model's own tasks on held-out conversations: unseen tools, parameters and values.

free: the rendered conversation to /v1/completions, not bound. constrained: the conversation to
/v1/chat/completions with strict tools or schema. transformers: the same conversations through plain
transformers and PEFT, for comparison; runs only if it is named.
"""

import json
from collections.abc import Sequence
from typing import Any, ClassVar

from anyio import Lock, to_thread

from personae.evals.demo import data
from personae.evals.demo.grading import grade, held_out, malformed
from personae.evals.demo.sample import END_OF_TURN, Sample, call_text, dumps
from personae.evals.harness.subject import Subject
from personae.evals.suites.suite import CONSTRAINED, FREE, Case, Outcome, Suite, SuiteSettings

TRANSFORMERS = "transformers"


class DemoSettings(SuiteSettings, frozen=True):
    """count: conversations per task. limit: tokens of an answer."""

    count: int = 64
    limit: int = 192


class DemoTasks(Suite):
    """Tools, extraction and chat for the base; each adapter's task for the adapter and, for comparison, for
    the base."""

    settings: ClassVar = DemoSettings
    about: ClassVar = "held-out tasks of the bundled demo model and its adapters"
    modes: ClassVar = (FREE, CONSTRAINED)

    def __init__(self, settings: DemoSettings) -> None:
        self._settings = settings
        self._reference: dict[tuple[str, str], list[str]] = {}
        self._lock: Lock | None = None

    def cases(self) -> Sequence[Case]:
        """The tasks' samples, as evals/demo/measure.py draws them."""
        return [
            Case(f"{task}/{number:04}", task, (number, sample))
            for task in data.TASKS | data.ADAPTER_TASKS
            for number, sample in enumerate(held_out(task, self._settings.count))
        ]

    def plays(self, case: Case, model: str, mode: str, *, base: bool) -> bool:
        """The base plays everything, an adapter its own task; `constrained` only if something binds the
        answer."""
        sample: Sample = case.data[1]
        if not base and model != case.task:
            return False
        if mode == CONSTRAINED:
            return bool(sample.tools or sample.schema) and case.task != "verse"
        return mode in (FREE, TRANSFORMERS)

    async def play(self, case: Case, subject: Subject) -> Sequence[Outcome]:
        """`exact` passes. The other scores are those of evals/demo/grading.py, and how the answer ended."""
        number, sample = case.data
        if subject.mode == FREE:
            text = await self._free(sample, subject)
        elif subject.mode == CONSTRAINED:
            text = await self._constrained(sample, subject)
        else:
            text = await self._transformers(case.task, number, None if subject.base else subject.model)
        scores = grade(sample, text)
        if sample.tools or sample.schema:
            scores["well-formed"] = 1.0 - malformed(sample, text)
        return [
            Outcome(
                passed=scores["exact"] == 1.0,
                scores={name: score for name, score in scores.items() if name != "exact"},
                prompt=sample.prompt,
                expected=sample.answer,
                answer=text,
            )
        ]

    async def _free(self, sample: Sample, subject: Subject) -> str:
        answer = await subject.complete(
            sample.prompt,
            max_tokens=self._settings.limit,
            add_special_tokens=False,
            skip_special_tokens=False,
        )
        return str(answer["choices"][0]["text"]).partition(END_OF_TURN)[0]

    async def _constrained(self, sample: Sample, subject: Subject) -> str:
        fields: dict[str, Any] = {"max_tokens": self._settings.limit}
        if sample.tools:
            fields["tools"] = [
                {"type": "function", "function": {**tool["function"], "strict": True}}
                for tool in sample.tools
            ]
        elif sample.schema:
            fields["response_format"] = {
                "type": "json_schema",
                "json_schema": {"name": sample.task, "schema": sample.schema, "strict": True},
            }
        if sample.thinking:
            fields["chat_template_kwargs"] = {"enable_thinking": True}
        answer = await subject.chat(wire(sample.messages), **fields)
        return as_text(answer["choices"][0]["message"])

    async def _transformers(self, task: str, number: int, adapter: str | None) -> str:
        """All conversations of a task at once, when the first is needed: one by one they would take far
        longer."""
        self._lock = self._lock or Lock()
        async with self._lock:
            key = (task, adapter or "")
            if key not in self._reference:
                self._reference[key] = await to_thread.run_sync(self._generate, task, adapter)
        return self._reference[key][number]

    def _generate(self, task: str, adapter: str | None) -> list[str]:
        from personae.evals.demo.measure import ADAPTERS, through_transformers

        generate = through_transformers(ADAPTERS / adapter if adapter else None, limit=self._settings.limit)
        return generate(held_out(task, self._settings.count))


def wire(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages in the API's form: arguments of calls are JSON text, calls and results have ids."""
    made = []
    for message in messages:
        if calls := message.get("tool_calls"):
            message = {
                **message,
                "tool_calls": [
                    {
                        "id": f"call-{place}",
                        "type": "function",
                        "function": {**call["function"], "arguments": dumps(call["function"]["arguments"])},
                    }
                    for place, call in enumerate(calls)
                ],
            }
        elif message["role"] == "tool":
            message = {"tool_call_id": "call-0", **message}
        made.append(message)
    return made


def as_text(message: dict[str, Any]) -> str:
    """An answer of the API in the model's own form, without thoughts."""
    pieces = [message.get("content") or ""]
    for call in message.get("tool_calls") or ():
        function = call["function"]
        try:
            pieces.append(
                call_text([{"name": function["name"], "arguments": json.loads(function["arguments"])}])
            )
        except ValueError:  # as far as it came
            pieces.append(
                f'<tool_call>\n{{"name": "{function["name"]}", "arguments": {function["arguments"]}'
            )
    return "\n".join(piece for piece in pieces if piece)
