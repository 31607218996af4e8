"""The engine without actors: a scheduler and a step engine in one synchronous loop, over tiny models.

`EngineHarness(folder, adapters=..., ...)` loads. `play(logs)` runs token logs to their end and returns what
each produced. Up to `lookahead` plans are in flight, and a step is read while the next one runs, if there is
one, as the actors do it; with stages, while as many others are in these. With `capture` decode steps run as
graphs, with `prefill` those with prompts. With a `policy` rows have drafts, also those of the model or head
in `draft` and from earlier `answers`. With several `ranks` each has the whole model, or its part of it if
they are `shared`; then `ranks` of them share each of the `stages`. `attention_ranks`: so
many have attention, for sequences of their own, and the others the MLPs; all have both, if these are all.
With `two_batches` the halves of larger steps take turns. `library`: what carries what ranks exchange.
"""

import os
import time
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch

from personae.engine.base_weights import DecoderBaseWeights
from personae.engine.heads.loader import is_head, load_head
from personae.engine.heads.states import HeadStates
from personae.engine.kv import KVCache
from personae.engine.loader import load_model
from personae.engine.lora_shapes import lora_shapes, pool_rows, rank_shapes
from personae.engine.models.decoder import Decoder
from personae.engine.parallel.comm import ONE_RANK, Comm, SharedMemory
from personae.engine.parallel.expert_placement import ExpertGroups
from personae.engine.parallel.pipeline import Pipeline, ring
from personae.engine.parallel.process import preparation
from personae.engine.parallel.process_groups import Library, ProcessGroups, new_store, open_store
from personae.engine.parallel.shared_file import new_shared_file
from personae.engine.params import SamplingParams
from personae.engine.pipelined import PipelinedEngine
from personae.engine.plan import MemoryLayout, StepPlan
from personae.engine.scheduling.fairness import VirtualTokenCounters
from personae.engine.scheduling.scheduler import Scheduler
from personae.engine.sequence import SequenceLog, TokenLogprobs
from personae.engine.speculation.batch_proposer import BatchProposer
from personae.engine.speculation.draft_model import DraftModel
from personae.engine.speculation.forced import Retokenizer
from personae.engine.speculation.head_proposer import HeadProposer
from personae.engine.speculation.policy import Policy
from personae.engine.speculation.speculator import Propose, Speculator, own_text
from personae.engine.speculation.step import SpeculativeStepEngine
from personae.engine.speculation.tenant_answers import TenantAnswers
from personae.engine.stats import MAX_DRAFTS
from personae.engine.step import StepEngine, by_tenant
from personae.engine.worker.capture import Capture
from personae.engine.worker.graphs import DecodeGraphs
from personae.engine.worker.group import as_one
from personae.engine.worker.prefill_graphs import PrefillGraphs
from personae.engine.worker.runner import Runner
from personae.engine.worker.worker import PackedStep
from personae.grammar.matcher import Grammar
from personae.grammar.sandbox.masks import RemoteGrammar
from personae.grammar.spec import GrammarSpec
from personae.lora.activation import activation_start
from personae.lora.adapter import Adapter
from personae.lora.copies import Copies
from personae.lora.peft import read_adapter
from personae.lora.pool import LoraPool
from personae.lora.source import AdapterSource
from personae.lora.stored import finished
from personae.lora.throttle import no_rest


@dataclass
class Played:
    """What one sequence produced. `delivered`: how many tokens it had after each step that produced some."""

    tokens: list[int] = field(default_factory=list)
    delivered: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    finish: str | None = None
    error: str | None = None
    code: str | None = None
    cached: int | None = None
    embedding: bytes | None = None


def log_of(
    id: str,
    tokens: Sequence[int],
    adapter: str | None = None,
    invocation: Sequence[int] = (),
    **changes: Any,
) -> SequenceLog:
    """A log with greedy sampling of 16 tokens, unless `changes` say otherwise.

    If the adapter needs an invocation and the tokens do not contain it, the log is for the base, as in the
    API.
    """
    fields = {"grammar", "after", "tenant", "salt", "eos"}
    rest = {name: changes.pop(name) for name in fields & changes.keys()}
    start = 0
    if invocation:
        found = activation_start(tokens, invocation)
        adapter, start = (None, 0) if found is None else (adapter, found)
    params = {"max_tokens": 16, "seed": 0, "temperature": 0.0, **changes}
    return SequenceLog(
        id=id,
        tokens=tuple(tokens),
        prompt_length=len(tokens),
        params=SamplingParams(**params),
        adapter=adapter,
        adapter_start=start,
        **rest,
    )


def comms_of(
    size: int,
    stages: int = 1,
    expert_groups: int = 1,
    spare: int | None = None,
    *,
    attention_ranks: int = 0,
    two_batches: bool = False,
    library: Library | None = None,
) -> list[Comm]:
    """Ranks as threads of this process, stage by stage. `library`: see `Ranks`."""
    groups = ExpertGroups(expert_groups, spare)
    comms: list[Comm] = []
    for _ in range(stages):
        if size == 1:
            comms.append(ONE_RANK)
            continue
        if library is not None:
            joined = [
                ProcessGroups(
                    rank,
                    size,
                    _stage_ended,
                    groups,
                    attention_ranks=attention_ranks,
                    two_batches=two_batches,
                )
                for rank in range(size)
            ]
            join(joined, library)
            comms += joined
            continue
        file = new_shared_file(size)
        comms += [
            SharedMemory(
                file,
                rank,
                size,
                lambda: None,
                groups,
                attention_ranks=attention_ranks,
                two_batches=two_batches,
            )
            for rank in range(size)
        ]
        os.close(file)
    if stages == 1:
        return comms
    return [
        Pipeline(comm, number // size, stages, neighbours, _stage_ended)
        for number, (comm, neighbours) in enumerate(zip(comms, ring(size, stages), strict=True))
    ]


def join(ranks: list[ProcessGroups], library: Library) -> None:
    """Have these ranks join each other, each in a thread of its own."""
    store, port = new_store()
    cpu = torch.device("cpu")
    with ThreadPoolExecutor(len(ranks)) as threads:
        joining = [
            threads.submit(rank.join_all, library, open_store(port) if rank.rank else store, 0, cpu)
            for rank in ranks
        ]
        for each in joining:
            each.result()


def _stage_ended() -> NoReturn:
    raise RuntimeError("a stage has closed its connection")


class EngineHarness:
    """`adapters` maps names to PEFT folders; `digests` has their digests. `steps` counts plans."""

    def __init__(
        self,
        folder: Path,
        adapters: dict[str, Path] | None = None,
        *,
        num_pages: int = 256,
        page_size: int = 16,
        max_seqs: int = 16,
        max_batch_tokens: int = 512,
        max_model_len: int = 1024,
        lookahead: int = 2,
        dtype: str = "float32",
        quantize: str | None = None,
        capture: Capture | None = None,
        prefill: bool = False,
        device: str = "cpu",
        copies: Copies | None = None,
        spelling: Retokenizer | None = None,
        policy: Policy | None = None,
        propose: Propose = own_text,
        draft: Path | None = None,
        answers: TenantAnswers | None = None,
        ranks: int = 1,
        whole: bool = False,
        shared: bool = False,
        stages: int = 1,
        expert_groups: int = 1,
        spare: int | None = None,
        attention_ranks: int = 0,
        two_batches: bool = False,
        library: Library | None = None,
    ) -> None:
        at = torch.device(device)
        models = [
            load_model(
                folder, device=at, dtype=dtype, max_position=max_model_len, quantize=quantize, comm=comm
            )
            for comm in (
                comms_of(
                    ranks,
                    stages,
                    expert_groups,
                    spare,
                    attention_ranks=attention_ranks,
                    two_batches=two_batches,
                    library=library,
                )
                if shared
                else [ONE_RANK]
            )
        ] * (1 if shared else ranks)
        self.shared, model = shared, models[0]
        layout = MemoryLayout(
            num_pages,
            page_size,
            max_seqs,
            max_model_len,
            max_batch_tokens,
            whole=whole,
            regions=attention_ranks or 1,
        )
        self.shapes = lora_shapes(model)
        self.adapters: dict[str, Adapter] = {}
        self.digests: dict[str, str] = {}
        self.ranks = [
            self._rank(each, layout, getattr(torch, dtype), capture, prefill, copies) for each in models
        ]
        drafting: BatchProposer | None = None
        if draft is not None and is_head(draft):
            head = load_head(draft, model, max_position=max_model_len)
            self.ranks[0].kv.reader = states = HeadStates(head, layout)
            states.values.fill_(torch.nan)
            drafting = made = HeadProposer(head, states, layout)
            made.kv.data.fill_(torch.nan)
        elif draft is not None:
            small = load_model(draft, device=at, dtype=dtype, max_position=max_model_len)
            drafting = model_drafts = DraftModel(small, layout, model.config.vocab_size)
            model_drafts.kv.data.fill_(torch.nan)
        if answers is not None:
            propose = partial(own_text, answers=answers)
        worker = as_one(self.ranks)
        spells = None if spelling is None else lambda: spelling
        engine = StepEngine(worker, spells)
        if policy is not None:
            speculator = Speculator(policy, propose, drafting, answers)
            engine = SpeculativeStepEngine(worker, spells, speculator)
        self.stages = stages
        self.engine: Any = engine if stages == 1 else PipelinedEngine(engine)
        for name, path in (adapters or {}).items():
            self.place(name, read_adapter(path, self.shapes))
        self.scheduler = Scheduler(
            layout, VirtualTokenCounters(), drafts=MAX_DRAFTS if policy else 0, micro_batches=stages
        )
        self.grammars: dict[GrammarSpec, Grammar] = {}
        self.lookahead = max(lookahead, stages)
        self.steps = 0
        self.resumed = 0  # deferred rows that were planned again

    def _rank(
        self,
        model: Decoder,
        layout: MemoryLayout,
        dtype: torch.dtype,
        capture: Capture | None,
        prefill: bool,
        copies: Copies | None,
    ) -> Runner:
        pool = LoraPool(
            rank_shapes(model),
            capacity_rows=pool_rows(model, 512),
            max_adapters=16,
            dtype=dtype,
            device=model.device,
            base=DecoderBaseWeights(model),
            copies=copies,
        )
        kv = KVCache(model.config.kv_specs, layout, dtype, model.device, spare=capture is not None)
        for group in kv.groups.values():
            group.fill_(torch.nan)
        for states in kv.states.values():
            states.fill_(torch.nan)
        graphs = None if capture is None or prefill else DecodeGraphs(model, kv, pool, layout, capture)
        prefill_graphs = PrefillGraphs(model, kv, pool, layout, capture) if capture and prefill else None
        here = self.adapters  # not `self`, which its engine would keep alive

        def read(digest: str, source: AdapterSource) -> Adapter:
            adapter = next(adapter for adapter in here.values() if adapter.digest == digest)
            shares = model.comm.size * model.comm.stages > 1
            return preparation(model)(adapter, rest=no_rest) if shares else adapter

        return Runner(model, kv, layout, pool, read, graphs, prefill_graphs)

    def place(self, name: str, adapter: Adapter) -> None:
        """Load an adapter to the device under a name."""
        self.adapters[name] = adapter
        self.digests[name] = adapter.digest
        if self.shared:
            ticket = self.engine.worker.load_adapter(adapter.digest, AdapterSource(()))
            assert finished(ticket.pieces()) is None
        else:
            assert all(rank.place(adapter) for rank in self.ranks)

    def play(self, logs: Iterable[SequenceLog]) -> dict[str, Played]:
        """Run the logs to their end. All are offered at once."""
        played: dict[str, Played] = {}
        for log in logs:
            played[log.id] = Played()
            remote = isinstance(self.grammars.get(log.grammar), RemoteGrammar)  # type: ignore[arg-type]  # None is no key
            self.scheduler.add(log, speculates=log.params.speculate and not remote)
        flying: deque[StepPlan] = deque()
        unread: deque[Any] = deque()
        while True:
            while len(flying) + len(unread) < self.lookahead:
                plan = self.scheduler.plan()
                if plan is None:
                    break
                flying.append(plan)
                self.steps += 1
            if flying:
                plan = flying.popleft()
                packed = self.engine.prepare(plan, by_tenant(plan, self.grammars))
                forward = self.engine.forward(packed, partial(self._overlap, unread, packed, played))
                unread.append(self.engine.sample(plan, forward))
            elif unread:
                self._read(unread.popleft(), played)
            elif self.engine.deferred:
                time.sleep(0.001)
            else:
                break
            for id in self.engine.resumable():
                self.resumed += 1
                self.scheduler.resume(id)
        self.scheduler.check_integrity()
        assert all(one.finish is not None for one in played.values())
        return played

    def _overlap(self, unread: deque[Any], packed: PackedStep | None, played: dict[str, Played]) -> None:
        if unread and len(unread) >= self.stages - 1:
            self._read(unread.popleft(), played)
        self.engine.fill(packed)

    def _read(self, launched: Any, played: dict[str, Played]) -> None:
        for delta in self.scheduler.commit(self.engine.finish(launched)):
            one = played[delta.id]
            assert one.finish is None, "a delta after the end"
            one.tokens += delta.tokens
            if delta.tokens:
                one.delivered.append(len(one.tokens))
            one.logprobs += delta.logprobs
            one.prompt_logprobs += delta.prompt_logprobs
            one.finish, one.error, one.code = delta.finish, delta.error, delta.code
            one.cached = delta.cached if one.cached is None else one.cached
            one.embedding = one.embedding or delta.embedding

    def log(self, id: str, tokens: Sequence[int], adapter: str | None = None, **changes: Any) -> SequenceLog:
        """A log with greedy sampling of 16 tokens, unless `changes` say otherwise."""
        if adapter is None:
            return log_of(id, tokens, **changes)
        invocation = self.adapters[adapter].invocation
        return log_of(id, tokens, self.digests[adapter], invocation, **changes)
