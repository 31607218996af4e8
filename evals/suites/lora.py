"""LoRA parity: log-probabilities of given texts through the server, and through PEFT on the same folders.

Every token of every text is compared, so an adapter that is applied to the wrong layer, row or scale is
detected at once. The suite needs our own engine, whose folders are known, and transformers and PEFT.
"""

from collections.abc import Sequence
from typing import ClassVar

from anyio import Lock, to_thread

from personae.evals.harness.subject import Subject
from personae.evals.suites.reference import Reference, source_for
from personae.evals.suites.suite import FREE, Case, Outcome, Suite, SuiteSettings

TEXTS = (
    "Hello, who are you?",
    "The invoice A-17 of 3 May 2027 is for Ada Moor: 4 x lamp at 12.50 = 50.00",
    '{"name": "get_weather", "arguments": {"city": "Cologne"}}',
    "<|im_start|>user\nmy parcel has not arrived. This is urgent.<|im_end|>\n<|im_start|>assistant\n",
    "Ä, ß, 漢字 and 🎭: not only ASCII.",
    "one two three four five six seven eight nine ten " * 8,
)


class LoraSettings(SuiteSettings, frozen=True):
    """tolerance: the largest difference of a token's log-probability; half precision needs a larger one."""

    tolerance: float = 1e-3


class LoraParity(Suite):
    """One case per text."""

    settings: ClassVar = LoraSettings
    about: ClassVar = "log-probabilities of base and adapters against transformers and PEFT"
    modes: ClassVar = (FREE,)

    def __init__(self, settings: LoraSettings) -> None:
        self._settings = settings
        self._reference: Reference | None = None
        self._lock: Lock | None = None

    def cases(self) -> Sequence[Case]:
        """The texts."""
        return [Case(f"text/{number}", "logprobs", text) for number, text in enumerate(TEXTS)]

    def plays(self, case: Case, model: str, mode: str, *, base: bool) -> bool:
        """Base and adapters alike."""
        return mode == FREE

    async def play(self, case: Case, subject: Subject) -> Sequence[Outcome]:
        """differs: whether an adapter's log-probabilities differ from the base's."""
        source = source_for(subject)
        fields = {"max_tokens": 1, "echo": True, "logprobs": 1, "return_token_ids": True}
        choice = (await subject.complete(case.data, **fields))["choices"][0]
        tokens = choice["prompt_token_ids"]
        served = choice["logprobs"]["token_logprobs"][1 : len(tokens)]
        self._lock = self._lock or Lock()
        async with self._lock:
            self._reference = self._reference or Reference(source)
            score = self._reference.logprobs
            base = wanted = await to_thread.run_sync(score, None, tokens)
            if not subject.base:
                wanted = await to_thread.run_sync(score, subject.model, tokens)
        off = max(abs(a - b) for a, b in zip(served, wanted, strict=True))
        moved = max(abs(a - b) for a, b in zip(wanted, base, strict=True))
        scores = {} if subject.base else {"differs": float(moved > self._settings.tolerance)}
        reasons = [] if off <= self._settings.tolerance else [f"a log-probability is {off:.2g} off"]
        if not subject.base and moved <= self._settings.tolerance:
            reasons.append("the adapter changes nothing, so this shows nothing")
        return [
            Outcome(
                passed=not reasons,
                scores=scores,
                values={"largest difference": off, "adapter moves": moved},
                prompt=case.data,
                expected=" ".join(f"{value:.4f}" for value in wanted),
                answer=" ".join(f"{value:.4f}" for value in served),
                note="; ".join(reasons),
            )
        ]
