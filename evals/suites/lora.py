"""LoRA parity: log-probabilities of given texts through the server, and through PEFT on the same folders.

Every token of every text is compared, so that an adapter that is applied to the wrong layer, row or scale
shows at once. Needs an engine of our own, whose folders are known, and transformers and PEFT.
"""

import importlib.util
from collections.abc import Sequence
from typing import Any, ClassVar

from anyio import Lock, to_thread

from personae.evals.harness.subject import Subject
from personae.evals.harness.target import Source
from personae.evals.suites.suite import FREE, Case, Outcome, Skipped, Suite, SuiteSettings

TEXTS = (
    "Hello, who are you?",
    "The invoice A-17 of 3 May 2027 is for Ada Moor: 4 x lamp at 12.50 = 50.00",
    '{"name": "get_weather", "arguments": {"city": "Cologne"}}',
    "<|im_start|>user\nmy parcel has not arrived. This is urgent.<|im_end|>\n<|im_start|>assistant\n",
    "Ä, ß, 漢字 and 🎭: not only ASCII.",
    "one two three four five six seven eight nine ten " * 8,
)


class LoraSettings(SuiteSettings, frozen=True):
    """tolerance: the largest difference of a token's log-probability; in half precision it has to be more."""

    tolerance: float = 1e-3


class LoraParity(Suite):
    """One case a text."""

    settings: ClassVar = LoraSettings
    about: ClassVar = "log-probabilities of base and adapters against transformers and PEFT"
    modes: ClassVar = (FREE,)

    def __init__(self, settings: LoraSettings) -> None:
        self._settings = settings
        self._reference: dict[str, Any] = {}
        self._lock: Lock | None = None

    def cases(self) -> Sequence[Case]:
        """The texts."""
        return [Case(f"text/{number}", "logprobs", text) for number, text in enumerate(TEXTS)]

    def plays(self, case: Case, model: str, mode: str, *, base: bool) -> bool:
        """Base and adapters alike."""
        return mode == FREE

    async def play(self, case: Case, subject: Subject) -> Sequence[Outcome]:
        """differs: an adapter's log-probabilities are not the base's."""
        source = subject.target.source
        if source is None:
            raise Skipped("the folders that the server has loaded are not known here")
        if not subject.base and subject.model not in source.adapters:
            raise Skipped("the adapter has no folder that is known here")
        if importlib.util.find_spec("peft") is None or importlib.util.find_spec("transformers") is None:
            raise Skipped("it needs the packages transformers and peft")
        fields = {"max_tokens": 1, "echo": True, "logprobs": 1, "return_token_ids": True}
        choice = (await subject.complete(case.data, **fields))["choices"][0]
        tokens = choice["prompt_token_ids"]
        served = choice["logprobs"]["token_logprobs"][1 : len(tokens)]
        self._lock = self._lock or Lock()
        async with self._lock:
            adapter = None if subject.base else subject.model
            base, wanted = await to_thread.run_sync(self._score, source, adapter, tokens)
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

    def _score(self, source: Source, adapter: str | None, tokens: list[int]) -> tuple[Any, Any]:
        """Log-probabilities of all tokens but the first, of the base and of the adapter."""
        import torch

        with torch.inference_mode():
            model = self._model(source)
            ids = torch.tensor([tokens])
            scored = []
            for name in (None, adapter):
                if name is None:
                    context = model.disable_adapter() if source.adapters else torch.no_grad()
                else:
                    model.set_adapter(name)
                    context = torch.no_grad()
                with context:
                    logits = model(ids).logits[0, :-1].float()
                found = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
                scored.append(found.tolist())
        return scored[0], scored[1]

    def _model(self, source: Source) -> Any:
        """The base with all its adapters, loaded when first asked for."""
        if "model" not in self._reference:
            import torch
            from peft import PeftModel
            from transformers import AutoModelForCausalLM

            model: Any = AutoModelForCausalLM.from_pretrained(source.model, dtype=torch.float32)
            for place, (name, folder) in enumerate(source.adapters.items()):
                if place == 0:
                    model = PeftModel.from_pretrained(model, str(folder), adapter_name=name)
                else:
                    model.load_adapter(str(folder), adapter_name=name)
            model.eval()
            self._reference["model"] = model
        return self._reference["model"]
