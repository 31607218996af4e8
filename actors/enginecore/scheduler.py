"""The scheduler's actor: handles all waiting messages, then plans until the executor has work for two
steps."""

import logging
import time
from collections import deque
from collections.abc import Sequence
from copy import copy

from anyio import CapacityLimiter, current_time, sleep, sleep_until
from msgspec.structs import replace

from personae.actors.enginecore.planned_step import Grammars, PlannedStep
from personae.actors.kit.actor import Actor
from personae.actors.kit.mailbox import Ref
from personae.actors.messages import (
    Borrow,
    Cancel,
    Compile,
    Compiled,
    EngineCoreStarted,
    Execute,
    HoldPages,
    KeepSession,
    KVEvents,
    Lend,
    LetGo,
    Message,
    Preempt,
    RecallPages,
    Refused,
    Resumed,
    Return,
    StepDone,
    StepFinished,
    Submit,
)
from personae.engine.plan import StepPlan
from personae.engine.scheduling.kv_events import KVEventRecorder
from personae.engine.scheduling.scheduler import Scheduler
from personae.engine.sequence import Delta, SequenceLog
from personae.engine.stats import SchedulerStats, StepSample
from personae.engine.tiers.tier import PageFetch, Tier
from personae.grammar.matcher import Grammar
from personae.grammar.spec import GrammarKey

GAP_STEPS = 16  # steps between two measurements of the fairness gap
LOOKAHEAD = 2  # steps that the executor has, at least: one runs, one waits
MAX_FETCHES = 2  # threads that fetch pages from a tier
COUNT_SECONDS = 1.0  # until what the tier has stored meanwhile is reported, if no step does
STORE_SECONDS = 0.05  # between two attempts to store idle pages, if the tier has no room
AHEAD_SECONDS = 0.003  # with `late`, the next step is planned so long before the end of the running one
AHEAD_SHARE = 0.1  # of the step's expected time, in addition, since that is an estimate
SHORTEST_WAIT = 0.003  # seconds; a step that would be planned sooner than that is planned at once


log = logging.getLogger("personae.engine")


class SchedulerActor(Actor[Message]):
    """Owns an `engine.Scheduler`, which makes all decisions.

    Sequences whose grammar is not compiled yet wait here, outside of the scheduler, and delay no others.

    With `late` the next step is planned when the running one is about to end, estimated from earlier steps.
    Then sequences that arrive during a step join the next one, not the one after that. A device that runs
    ahead needs its plan sooner, and so do stages, which compute `steps_at_once`. If a tenant's first sequence
    arrives after that, the step is planned again, unless the executor has begun it. The next step after one
    of a few milliseconds is planned at once: a timer would take the interpreter when the executor wants it.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        epoch: int,
        compiler: Ref[Message],
        executor: Ref[Message],
        streamer: Ref[Message],
        ingress: Ref[Message],
        *,
        late: bool = False,
        steps_at_once: int = 1,
        kv_events: KVEventRecorder | None = None,
        tier: Tier | None = None,
    ) -> None:
        self._tier = tier
        self._fetchers = CapacityLimiter(MAX_FETCHES)
        self._storing = False  # a timer will plan again, to store pages
        self._counting = False  # a timer will report what the tier has stored
        self._changed = False  # there is something to report besides steps
        self._late = late
        self._lookahead = max(steps_at_once, LOOKAHEAD)
        self._due = self._timer = 0.0  # when the next step may be planned; the due time of the current timer
        self._scheduler = scheduler
        self._lends = scheduler.layout.lendable > 0
        self._kv_events = kv_events
        if kv_events is not None:
            scheduler.observe_cache(kv_events)
        if adopted := scheduler.adopt():
            log.info("%d pages of the KV cache are there already", adopted)
        self._epoch = epoch
        self._compiler = compiler
        self._executor = executor
        self._streamer = streamer
        self._ingress = ingress
        self._known: set[str] = set()
        self._compiling: dict[GrammarKey, dict[str, SequenceLog]] = {}
        self._grammars: dict[str, Grammar] = {}
        self._in_flight = 0
        self._last: PlannedStep | None = None
        self._added = False  # a sequence came after the last step was planned
        self._sizes: deque[tuple[int, int]] = deque()  # rows and tokens of the steps in flight
        self._ended: list[StepSample] = []  # not reported yet
        self._counters = scheduler.counters
        self._fairness_gap = 0.0
        self._planning = 0.0

    async def started(self) -> None:
        """Drop messages of an earlier epoch, and report that this one has begun without sequences."""
        self.drain()
        self._ingress.tell(EngineCoreStarted(self._epoch, self._stats()))

    async def receive(self, message: Message) -> None:
        """Handle all waiting messages, then act once."""
        begun = time.perf_counter()
        deltas: list[Delta] = []
        stepped = False
        self._scheduler.tick(current_time())
        for each in (message, *self.drain()):
            match each:
                case StepFinished():
                    deltas += self._commit(each)
                    stepped = True
                case Submit(logs=logs, epoch=self._epoch):
                    for log in logs:
                        self._submit(log)
                case Cancel(ids=ids, epoch=self._epoch):
                    deltas += self._end(ids, "cancelled")
                case Preempt(ids=ids, epoch=self._epoch):
                    deltas += self._end(ids, "preempted")
                case KeepSession(tenant=tenant, session=session, forget=True):
                    self._scheduler.forget_session(tenant, session)
                    self._changed = True
                case KeepSession(tenant=tenant, session=session, seconds=seconds):
                    self._scheduler.keep_session(tenant, session, seconds)
                    self._changed = True
                case HoldPages(root=root, chunks=chunks, reply=reply):
                    reply.tell(self._scheduler.hold(root, chunks))
                case LetGo(number=number):
                    self._scheduler.let_go(number)
                case Compiled():
                    self._compiled(each)
                case Resumed(ids=resumed):
                    for id in resumed:
                        self._scheduler.resume(id)
                case Borrow(count=count):
                    self._executor.tell(Lend(self._scheduler.lend(count)))
                case Return(pages=pages):
                    self._scheduler.returned(pages)
        for delta in deltas:
            if delta.finish is not None:
                self._known.discard(delta.id)
                self._grammars.pop(delta.id, None)
        self._act(deltas, stepped)
        self._planning += time.perf_counter() - begun
        if not self._in_flight and not self._known:
            self._scheduler.check_integrity()

    def _act(self, deltas: Sequence[Delta], stepped: bool) -> None:
        """Plan, and send what there is to report."""
        admitted = self._plan(stepped)
        if self._lends and (wanted := self._scheduler.recall()):
            self._executor.tell(RecallPages(wanted))
        if self._tier is not None:
            self._work_on(self._tier)
        if deltas or stepped or admitted or self._changed:
            self._changed = False
            ended, self._ended = tuple(self._ended), []
            self._streamer.tell(StepDone(tuple(deltas), self._stats(), tuple(admitted), ended))
        if self._kv_events is not None and (events := self._kv_events.take()):
            self._streamer.tell(KVEvents(events))

    def _work_on(self, tier: Tier) -> None:
        """Begin the fetches that the scheduler wants; store what is idle when the tier has room again, and
        report it when it is stored."""
        for fetch in self._scheduler.take_fetches():
            self.start_soon(self._fetch, tier, fetch)
            self.start_soon(self._lose_patience, fetch)
        if not self._in_flight and not self._storing and self._scheduler.has_unstored:
            self._storing = True
            self.start_soon(self._store_later)
        if not self._in_flight and not self._counting and tier.pending:
            self._counting = True
            self.start_soon(self._count_later)

    async def _fetch(self, tier: Tier, fetch: PageFetch) -> None:
        count = await self.in_thread(tier.fetch, fetch, limiter=self._fetchers)
        self._scheduler.fetched(fetch.ticket, count)
        self._act((), False)

    async def _lose_patience(self, fetch: PageFetch) -> None:
        """A request is computed if its pages come later than it would take to compute them."""
        await sleep(fetch.patience)
        self._scheduler.abandon_fetch(fetch.ticket)
        self._act((), False)

    async def _store_later(self) -> None:
        await sleep(STORE_SECONDS)
        self._storing = False
        self._act((), False)

    async def _count_later(self) -> None:
        await sleep(COUNT_SECONDS)
        self._counting, self._changed = False, True
        self._act((), False)

    def _submit(self, log: SequenceLog) -> None:
        self._known.add(log.id)
        if log.grammar is None:
            self._add(log, speculates=log.params.speculate)
            return
        key = log.tenant, log.grammar
        if key not in self._compiling:  # it may still be compiling although all sequences left
            self._compiling[key] = {}
            self._compiler.tell(Compile(log.grammar, log.tenant))
        self._compiling[key][log.id] = log

    def _add(self, log: SequenceLog, *, speculates: bool) -> None:
        self._scheduler.add(log, speculates=speculates)
        self._added = True

    def _compiled(self, compiled: Compiled) -> None:
        logs = self._compiling.pop((compiled.tenant, compiled.spec), {})
        if compiled.grammar is not None:
            for log in logs.values():
                self._bind(log, compiled.grammar)
        elif logs:
            assert compiled.error is not None
            self._known.difference_update(logs)
            error = compiled.error
            kind = type(error).__name__
            self._streamer.tell(Refused(tuple(logs), kind, error.message, error.param, error.code))

    def _bind(self, log: SequenceLog, grammar: Grammar) -> None:
        """Add a sequence to the scheduler if its answer can be complete within its budget."""
        budget = log.budget(self._scheduler.layout.max_model_len)
        if budget >= grammar.shortest:
            self._grammars[log.id] = grammar
            self._add(log, speculates=log.params.speculate and not grammar.remote)
            return
        self._known.discard(log.id)
        why = (
            f"The answer may have {budget} tokens; the shortest that is sure to be complete "
            f"has {grammar.shortest}."
        )
        self._streamer.tell(Refused((log.id,), "BudgetTooSmall", why))

    def _end(self, ids: tuple[str, ...], finish: str) -> list[Delta]:
        """End those of the sequences that are still here. Their computed pages stay in the prefix cache for a
        while."""
        here = [id for id in dict.fromkeys(ids) if id in self._known]
        for id in here:
            for logs in self._compiling.values():
                logs.pop(id, None)
            self._scheduler.cancel(id)
        return [Delta(id, finish=finish) for id in here]

    def _commit(self, sampled: StepFinished) -> tuple[Delta, ...]:
        self._in_flight -= 1
        self._schedule_next()
        counters = self._counters
        if counters.steps % GAP_STEPS == 0:  # not every step: it walks over all waiting sequences
            self._fairness_gap = self._scheduler.fairness_gap
        counters.steps += 1
        counters.step_seconds += sampled.seconds
        counters.gap_seconds += sampled.gap_seconds
        rows, tokens = self._sizes.popleft()
        counters.count_tokens(tokens)
        if rows:
            sample = StepSample(self._epoch, rows, tokens, sampled.seconds, sampled.gap_seconds)
            self._ended.append(sample)
        counters.timings = replace(sampled.timings, plan=self._planning)
        return self._scheduler.commit(sampled.result, sampled.seconds)

    def _schedule_next(self) -> None:
        """Compute when to plan the next step: the executor begins the last plan now."""
        seconds = self._scheduler.expected() if self._late else 0.0
        wait = seconds * (1 - AHEAD_SHARE) - AHEAD_SECONDS
        self._due = current_time() + wait if wait >= SHORTEST_WAIT else 0.0

    def _too_early(self) -> bool:
        """Whether the next step is better planned later. If so, a timer plans it."""
        if not self._late or not self._in_flight or current_time() >= self._due:
            return False
        if self._timer != self._due:
            self._timer = self._due
            self.start_soon(self._remind, self._due)
        return True

    async def _remind(self, due: float) -> None:
        await sleep_until(due)
        if self._due == due:
            self._due = 0.0  # plan now, even if a clock of whole milliseconds is a little behind
        begun = time.perf_counter()
        self._act((), False)
        self._planning += time.perf_counter() - begun

    def _plan(self, stepped: bool) -> list[str]:
        """Send plans to the executor. Returns the sequences that are admitted."""
        admitted = self._replan() if self._added and self._in_flight else []
        self._added = False
        while self._in_flight < self._lookahead and not self._too_early():
            plan = self._scheduler.plan()
            if plan is None:
                break
            self._last = PlannedStep(plan, self._grammars_of(plan) if plan.admissions else {})
            self._executor.tell(Execute(self._last, stepped or self._in_flight > 0))
            self._in_flight += 1
            if self._in_flight == 1:
                self._schedule_next()
            self._sizes.append((len(plan.rows), plan.tokens))
            if plan.admissions:
                admitted += [admission.log.id for admission in plan.admissions]
        return admitted

    def _replan(self) -> list[str]:
        """Plan the last step again for sequences that came after it, unless it has begun. Returns those that
        are admitted now."""
        assert self._last is not None
        before = len(self._last.plan.admissions)
        if (plan := self._last.replace(self._planned_again)) is None:
            return []
        self._sizes[-1] = (len(plan.rows), plan.tokens)
        return [admission.log.id for admission in plan.admissions[before:]]

    def _planned_again(self) -> tuple[StepPlan, Grammars] | None:
        plan = self._scheduler.replan()
        return None if plan is None else (plan, self._grammars_of(plan))

    def _grammars_of(self, plan: StepPlan) -> Grammars:
        return {
            (admission.log.tenant, admission.log.grammar): self._grammars[admission.log.id]
            for admission in plan.admissions
            if admission.log.grammar is not None
        }

    def _stats(self) -> SchedulerStats:
        stats = self._scheduler.stats()
        if self._tier is not None:
            stored, errors = self._tier.counts()
            self._counters.tier_stored += stored
            self._counters.tier_errors += errors
        return replace(
            stats,
            waiting=stats.waiting + sum(map(len, self._compiling.values())),
            tier_pages=0 if self._tier is None else self._tier.pages,
            fairness_gap=self._fairness_gap,
            in_flight=self._in_flight,
            counters=copy(self._counters),
        )
