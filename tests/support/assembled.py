"""The engine as a server assembles it, without actors: with several ranks, their processes too."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine_harness import EngineHarness, log_of

from personae.actors.assembly import assemble
from personae.actors.options import EngineOptions
from personae.engine.sequence import SequenceLog
from personae.lora.stored import finished


class Assembled(EngineHarness):
    """An EngineHarness whose engine is that of a server with these options. `ranks`: of the model."""

    def __init__(
        self, model: Path, adapters: dict[str, Path] | None = None, ranks: int = 1, **options: Any
    ) -> None:
        named = tuple((adapters or {}).items())
        asked = {
            "device": "cpu",
            "dtype": "float32",
            "kv_memory": 2**22,
            "max_model_len": 512,
            "speculate": "off",
        } | options
        assembly = assemble(EngineOptions(model, named_adapters=named, tensor_parallel_size=ranks, **asked))
        self.spec = assembly.engine_spec
        self.grammars, self.adapters = {}, {}
        self.begin_epoch()

    def begin_epoch(self) -> None:
        """Build the engine as after a crash: with new processes of the other ranks and empty caches."""
        self.engine = self.spec.build_step_engine()
        self.scheduler = self.spec.build_scheduler()
        self.digests = {}
        self.stages, self.lookahead, self.steps, self.resumed = 1, 2, 0, 0
        for name, card in self.spec.models.items():
            if card.adapter is not None:
                source = self.spec.library.find(card.adapter) or self.spec.library.read(card.adapter)
                ticket = self.engine.worker.load_adapter(card.adapter, source)
                assert finished(ticket.pieces()) is None
                self.digests[name] = card.adapter

    def end(self) -> None:
        """End the processes of the other ranks."""
        if (ranks := self.spec.build_step_engine.__self__.ranks) is not None:  # type: ignore[attr-defined]  # an EngineBuilder's
            ranks.end()

    def log(self, id: str, tokens: Sequence[int], adapter: str | None = None, **changes: Any) -> SequenceLog:
        """A log with greedy sampling of 16 tokens, unless `changes` say otherwise."""
        if adapter is None:
            return log_of(id, tokens, **changes)
        card = self.spec.models[adapter]
        return log_of(id, tokens, card.adapter, card.invocation, **changes)
