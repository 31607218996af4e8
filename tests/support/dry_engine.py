"""An engine as `actors/assembly.py` builds it for `cuda`, on a simulated GPU, driven as the executor drives
it.

    engine = DryEngine(gpu, folder, adapters=root)
    engine.play([engine.log("a", [5, 6, 7], "poet")])     # {"a": Played}
    engine.waits["forward"]                               # what made the host wait, by what it was doing

Step N + 1 is launched before the tokens of step N are read.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engine_harness import Played, log_of
from paper_gpu import PaperGpu, Wait

from personae.actors.assembly import assemble
from personae.actors.options import EngineOptions
from personae.engine.sequence import SequenceLog
from personae.engine.step import by_tenant
from personae.grammar.matcher import Grammar
from personae.grammar.spec import GrammarSpec
from personae.lora.adapter import Adapter
from personae.lora.source import AdapterSource


class DryEngine:
    """`options` are passed to EngineOptions."""

    def __init__(self, gpu: PaperGpu, folder: Path, adapters: Path | None = None, **options: Any) -> None:
        self.gpu = gpu
        self.waits: dict[str, list[Wait]] = {}
        with self.doing("assemble"):
            roots = () if adapters is None else (adapters,)
            self.assembly = assemble(EngineOptions(folder, roots, **{"device": "cuda", **options}))
        engine_spec = self.assembly.engine_spec
        self.layout = engine_spec.layout
        with self.doing("build"):
            self.engine = engine_spec.build_step_engine()
        self.scheduler = engine_spec.build_scheduler()
        self.grammars: dict[GrammarSpec, Grammar] = {}
        self.cards = {name: card for name, card in engine_spec.models.items() if card.adapter}
        self.reads = 0  # one for a step's tokens, one for the log-probabilities of its prompts

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Count waits within the block as waits of this activity."""
        with self.gpu.waiting() as found:
            yield
        self.waits.setdefault(what, []).extend(found)

    def adapter(self, name: str) -> Adapter:
        """An adapter as the library has it."""
        digest = self.cards[name].adapter
        assert digest is not None
        return self.assembly.engine_spec.library.take(digest, AdapterSource(()))

    def place(self, *names: str) -> None:
        """Have adapters copied to the device, without waiting for the copies."""
        for name in names:
            with self.doing("place"):
                assert self.engine.worker.place(self.adapter(name))

    @property
    def held(self) -> tuple[str, ...]:
        """The digests of the adapters on the device."""
        return self.engine.worker.adapters.residents

    def play(self, logs: Iterable[SequenceLog]) -> dict[str, Played]:
        """Run the logs to their end. All are offered at once."""
        played: dict[str, Played] = {}
        for log in logs:
            played[log.id] = Played()
            self.scheduler.add(log)
        unread = None
        while True:
            plan, result = self.scheduler.plan(), None
            if plan is not None:
                with self.doing("prepare"):
                    packed = self.engine.prepare(plan, by_tenant(plan, self.grammars))
                with self.doing("forward"):
                    forward = self.engine.forward(packed)
            if unread is not None:
                with self.doing("finish"):
                    result = self.engine.finish(unread)
                unread = None
            if plan is not None:
                with self.doing("sample"):
                    unread = self.engine.sample(plan, forward)
                self.reads += (unread.sampled is not None) + (unread.arrival is not None)
            if result is not None:
                for delta in self.scheduler.commit(result):
                    one = played[delta.id]
                    one.tokens += delta.tokens
                    one.logprobs += delta.logprobs
                    one.prompt_logprobs += delta.prompt_logprobs
                    one.finish, one.error = delta.finish, delta.error
            elif plan is None:
                break
        self.scheduler.check_integrity()
        assert all(one.finish is not None for one in played.values())
        return played

    def log(self, id: str, tokens: Sequence[int], adapter: str | None = None, **changes: Any) -> SequenceLog:
        """See `log_of`."""
        if adapter is None:
            return log_of(id, tokens, **changes)
        return log_of(id, tokens, self.cards[adapter].adapter, self.adapter(adapter).invocation, **changes)
