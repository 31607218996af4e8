"""A model with its adapters and grammars, and requests played alone on a new engine, which is the truth."""

import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from msgspec.structs import replace

from personae.actors.assembly import EngineBuilder
from personae.actors.sizing import Sizes
from personae.engine.heads.head import Head
from personae.engine.heads.loader import is_head, load_head
from personae.engine.loader import load_model
from personae.engine.lora_shapes import lora_shapes
from personae.engine.models.decoder import Decoder
from personae.engine.plan import MemoryLayout
from personae.engine.scheduling.fairness import VirtualTokenCounters
from personae.engine.scheduling.scheduler import Scheduler
from personae.engine.sequence import Delta, SequenceLog, TokenLogprobs
from personae.engine.speculation.forced import Retokenizer
from personae.engine.step import StepEngine, by_tenant
from personae.engine.tiers.tier import Tier
from personae.engine.tokens import Tokenizer
from personae.engine.worker.runner import Runner
from personae.errors import GrammarError
from personae.evals.tenants.making import AdapterMaker
from personae.grammar.compiler import GrammarCompiler
from personae.grammar.matcher import Grammar
from personae.grammar.spec import GrammarSpec
from personae.grammar.vocabulary import Vocabulary
from personae.kernels.sgmv import RANK_PAGE
from personae.lora.adapter import Adapter
from personae.lora.peft import read_adapter
from personae.lora.peft_names import CONFIG_FILE
from personae.lora.source import AdapterSource
from personae.lora.stacking import stacked

LONGEST = 192  # tokens of a sequence
RANDOM_RANKS = (1, 5, 24, 64)  # the ranks of additional random adapters


@dataclass
class ObservedStream:
    """What a client has received of one sequence."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    end: tuple[str, str | None] | None = None  # its finish reason, and its error

    def take(self, delta: Delta) -> None:
        """Add a step's delta."""
        assert self.end is None, f"sequence {delta.id} goes on after its end"
        self.tokens += delta.tokens
        self.logprobs += delta.logprobs
        self.prompt_logprobs += delta.prompt_logprobs
        if delta.finish is not None:
            self.end = delta.finish, delta.error


def device_of(engine: StepEngine) -> Runner:
    """Its only worker."""
    assert isinstance(engine.worker, Runner)
    return engine.worker


class EngineFixture:
    """What all engines share. `adapters` are by digest: those of the sub-folders of `roots`, and random
    ones. `draft`: the folder of a draft model or a trained head."""

    def __init__(
        self,
        folder: Path,
        roots: Iterable[Path],
        dtype: str,
        quantize: str | None,
        draft: Path | None = None,
    ) -> None:
        cpu = torch.device("cpu")
        self.model = load_model(folder, device=cpu, dtype=dtype, quantize=quantize, max_position=LONGEST)
        self._draft: Decoder | Head | None = None
        if draft is not None and is_head(draft):
            self._draft = load_head(draft, self.model, quantize=quantize, max_position=LONGEST)
        elif draft is not None:
            self._draft = load_model(draft, device=cpu, dtype=dtype, quantize=quantize, max_position=LONGEST)
        self.vocab_size = self.model.config.vocab_size
        self.eos = tuple(Tokenizer.load(folder).eos_ids)
        self._shapes = lora_shapes(self.model)
        found = [self._read(path.parent) for root in roots for path in root.glob(f"*/{CONFIG_FILE}")]
        with tempfile.TemporaryDirectory() as made:
            for rank in RANDOM_RANKS:
                for name, content in AdapterMaker(folder).make(rank, seed=rank).items():
                    (Path(made) / name).write_bytes(content)
                found.append(self._read(Path(made)))
        self.adapters = {adapter.digest: adapter for adapter in found}
        self.ranks = sorted(-(-adapter.rank // RANK_PAGE) * RANK_PAGE for adapter in found)
        self.grammars: dict[GrammarSpec, Grammar] = {}
        text, tokenizer = (folder / "tokenizer.json").read_bytes(), Tokenizer.load(folder)
        vocabulary = Vocabulary.from_tokenizer_json(text, self.vocab_size, tokenizer.eos_ids)
        self._retokenizer = Retokenizer(tokenizer, vocabulary.tokens)
        self._compiler = GrammarCompiler(vocabulary, sandboxed=False)

    def _read(self, folder: Path) -> Adapter:
        return stacked(read_adapter(folder, self._shapes), self.model.config.layers, self.model.dtype)

    def bound(self, spec: GrammarSpec) -> Grammar | None:
        """The grammar; None if it is rejected."""
        if spec not in self.grammars:
            try:
                self.grammars[spec] = self._compiler.compile(spec)
            except GrammarError:
                return None
        return self.grammars[spec]

    def engine(
        self, layout: MemoryLayout, ranks: int, speculate: str = "off", tier: Tier | None = None
    ) -> StepEngine:
        """A new engine with room for this many ranks of adapters. Unwritten memory is NaN. `speculate`: as
        `--speculate`; unless it is "off" or "ngram", the draft model or head guesses too."""
        sizes = Sizes(layout, self.model.dtype, 0, ranks, 0, 0)
        draft = None if speculate in ("off", "ngram") else self._draft
        engine = EngineBuilder(
            self.model,
            self._shapes,
            sizes,
            lambda: self._retokenizer,
            False,
            self._taken,
            speculate,
            lambda: self._retokenizer.spaceless,
            draft=draft,
            tier=tier,
        ).build()
        assert isinstance(engine, StepEngine)
        device_of(engine).kv.data.fill_(torch.nan)
        return engine

    def page_bytes(self, layout: MemoryLayout, speculate: str) -> int:
        """The bytes of a page of such an engine, as a tier gets them."""
        return device_of(self.engine(layout, self.ranks[-1], speculate)).kv.content_bytes

    def _taken(self, digest: str, source: AdapterSource) -> Adapter:
        return self.adapters[digest]

    def alone(self, log: SequenceLog) -> ObservedStream:
        """One sequence on a new engine: the whole prompt at once, then one token per step, each read before
        the next step is planned."""
        layout = MemoryLayout(LONGEST // 16, 16, 1, LONGEST, LONGEST)
        engine, scheduler = self.engine(layout, self.ranks[-1]), Scheduler(layout, VirtualTokenCounters())
        if log.adapter is not None:
            assert device_of(engine).place(self.adapters[log.adapter])
        stream = ObservedStream()
        scheduler.add(replace(log, after=None))
        while (plan := scheduler.plan()) is not None:
            launched = engine.sample(
                plan, engine.forward(engine.prepare(plan, by_tenant(plan, self.grammars)))
            )
            for delta in scheduler.commit(engine.finish(launched)):
                stream.take(delta)
            for id in engine.resumable():
                scheduler.resume(id)
        assert stream.end is not None
        return stream
