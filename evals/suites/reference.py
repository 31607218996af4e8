"""The models of a run through plain transformers and PEFT, for comparison."""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from personae.engine.tokens import Tokenizer
from personae.evals.harness.subject import Subject
from personae.evals.harness.target import Source
from personae.evals.suites.suite import Skipped


class Reference:
    """A base with all its adapters, loaded when first needed. Not thread-safe."""

    def __init__(self, source: Source, dtype: str = "float32") -> None:
        self._source = source
        self._dtype = dtype
        self._tokenizer = Tokenizer.load(source.model)
        self._loaded: Any = None

    @contextmanager
    def model(self, adapter: str | None) -> Iterator[Any]:
        """The model with an adapter, by name, or without any."""
        if self._loaded is None:
            self._loaded = self._load()
        if adapter is not None:
            self._loaded.set_adapter(adapter)
        plain = adapter is None and self._source.adapters
        with self._loaded.disable_adapter() if plain else nullcontext():
            yield self._loaded

    def logprobs(self, adapter: str | None, ids: list[int]) -> list[float]:
        """The log-probabilities of all tokens but the first."""
        import torch

        with torch.inference_mode(), self.model(adapter) as model:
            logits = model(torch.tensor([ids])).logits[0, :-1].float()
            chosen = logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        values: list[float] = chosen.tolist()
        return values

    def greedy(self, adapter: str | None, ids: list[int], limit: int) -> str:
        """The text that follows the tokens."""
        import torch

        ends = list(self._tokenizer.eos_ids)
        with torch.inference_mode(), self.model(adapter) as model:
            made = model.generate(
                input_ids=torch.tensor([ids]),
                max_new_tokens=limit,
                do_sample=False,
                eos_token_id=ends,
                pad_token_id=ends[0],
            )
        return self._tokenizer.decode(made[0, len(ids) :].tolist())

    def _load(self) -> Any:
        import torch
        from peft import PeftModel
        from transformers import AutoModelForCausalLM

        path, dtype = self._source.model, getattr(torch, self._dtype)
        where = (path, {}) if path.is_dir() else (path.parent, {"gguf_file": path.name})
        model: Any = AutoModelForCausalLM.from_pretrained(where[0], dtype=dtype, **where[1])
        for place, (name, folder) in enumerate(self._source.adapters.items()):
            if place == 0:
                model = PeftModel.from_pretrained(
                    model, str(folder), adapter_name=name, autocast_adapter_dtype=False
                )
            else:
                model.load_adapter(str(folder), adapter_name=name, autocast_adapter_dtype=False)
        return model.eval()


def source_for(subject: Subject) -> Source:
    """The folders of the subject's model. Raises Skipped if a reference cannot be made."""
    source = subject.target.source
    if source is None:
        raise Skipped("the folders that the server has loaded are not known here")
    if not subject.base and subject.model not in source.adapters:
        raise Skipped("the adapter has no folder that is known here")
    if importlib.util.find_spec("peft") is None or importlib.util.find_spec("transformers") is None:
        raise Skipped("it needs the packages transformers and peft")
    return source
