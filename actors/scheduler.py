"""The scheduler's shell: hears everybody out, then plans until the executor has work for two steps."""

import time

from msgspec.structs import replace

from personae.actors.kit.actor import Actor
from personae.actors.kit.mailbox import Ref
from personae.actors.messages import (
    BackStarted,
    Borrow,
    Cancel,
    Compile,
    Compiled,
    Execute,
    Lend,
    Load,
    Message,
    Recall,
    Refused,
    Repaid,
    Repay,
    Sampled,
    Spent,
    StepDone,
    Submit,
)
from personae.engine.scheduler import Scheduler
from personae.engine.sequence import Delta, SequenceLog
from personae.grammar.backend import BoundGrammar
from personae.grammar.spec import GrammarSpec

GAP_STEPS = 16  # between two looks at the fairness gap
LOOKAHEAD = 2  # steps in the executor's hands: the one that runs and the one that waits


class SchedulerActor(Actor[Message]):
    """Owns an `engine.Scheduler`; everything that decides is in there.

    Sequences whose grammar is not compiled yet wait here, outside of the scheduler, and hold up nobody.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        life: int,
        compiler: Ref[Message],
        executor: Ref[Message],
        streamer: Ref[Message],
        ingress: Ref[Message],
    ) -> None:
        self._scheduler = scheduler
        self._life = life
        self._compiler = compiler
        self._executor = executor
        self._streamer = streamer
        self._ingress = ingress
        self._known: set[str] = set()
        self._compiling: dict[GrammarSpec, dict[str, SequenceLog]] = {}
        self._grammars: dict[str, BoundGrammar] = {}
        self._in_flight = 0
        self._seconds = 0.0
        self._gap = 0.0
        self._steps = 0
        self._tokens = 0
        self._gap_served = 0.0
        self._spent = Spent()
        self._planning = 0.0

    async def started(self) -> None:
        """Forget what was meant for an earlier life, and say that this one knows nothing."""
        self.drain()
        self._ingress.tell(BackStarted(self._life))

    async def receive(self, message: Message) -> None:
        """Take in all that waits, then act once."""
        begun = time.perf_counter()
        deltas: list[Delta] = []
        stepped = False
        for each in (message, *self.drain()):
            match each:
                case Sampled():
                    deltas += self._commit(each)
                    stepped = True
                case Submit(logs=logs, life=self._life):
                    for log in logs:
                        self._submit(log)
                case Cancel(ids=ids, life=self._life):
                    deltas += self._let_go(ids, "cancelled")
                case Recall(ids=ids, life=self._life):
                    deltas += self._let_go(ids, "recalled")
                case Compiled():
                    self._compiled(each)
                case Borrow(count=count):
                    self._executor.tell(Lend(self._scheduler.lend(count)))
                case Repaid(pages=pages):
                    self._scheduler.take_back(pages)
        for delta in deltas:
            if delta.finish is not None:
                self._known.discard(delta.id)
                self._grammars.pop(delta.id, None)
        admitted = self._plan(stepped)
        if wanted := self._scheduler.call_in():
            self._executor.tell(Repay(wanted))
        self._planning += time.perf_counter() - begun
        if deltas or stepped or admitted:
            self._streamer.tell(StepDone(tuple(deltas), self._load(), tuple(admitted)))
        if not self._in_flight and not self._known:
            self._scheduler.check_integrity()

    def _submit(self, log: SequenceLog) -> None:
        self._known.add(log.id)
        if log.grammar is None:
            self._scheduler.add(log)
            return
        if log.grammar not in self._compiling:  # still there while it compiles, although all have left
            self._compiling[log.grammar] = {}
            self._compiler.tell(Compile(log.grammar, log.tenant))
        self._compiling[log.grammar][log.id] = log

    def _compiled(self, compiled: Compiled) -> None:
        logs = self._compiling.pop(compiled.spec, {})
        if compiled.grammar is not None:
            for log in logs.values():
                self._bind(log, compiled.grammar)
        elif logs:
            assert compiled.error is not None
            self._known.difference_update(logs)
            error = compiled.error
            kind = type(error).__name__
            self._streamer.tell(Refused(tuple(logs), kind, error.message, error.param, error.code))

    def _bind(self, log: SequenceLog, grammar: BoundGrammar) -> None:
        """Let it in, if its answer can be complete within its budget."""
        budget = log.budget(self._scheduler.layout.max_model_len)
        if budget >= grammar.shortest:
            self._grammars[log.id] = grammar
            self._scheduler.add(log)
            return
        self._known.discard(log.id)
        why = (
            f"The answer may have {budget} tokens, and the shortest that is sure to be complete "
            f"has {grammar.shortest}."
        )
        self._streamer.tell(Refused((log.id,), "BudgetTooSmall", why))

    def _let_go(self, ids: tuple[str, ...], finish: str) -> list[Delta]:
        """End those that are still here. What is computed of them stays in the prefix cache for a while."""
        here = [id for id in dict.fromkeys(ids) if id in self._known]
        for id in here:
            for logs in self._compiling.values():
                logs.pop(id, None)
            self._scheduler.cancel(id)
        return [Delta(id, finish=finish) for id in here]

    def _commit(self, sampled: Sampled) -> tuple[Delta, ...]:
        self._in_flight -= 1
        self._steps += 1
        self._seconds += sampled.seconds
        self._gap += sampled.gap_seconds
        self._spent = sampled.spent
        return self._scheduler.commit(sampled.result, sampled.seconds)

    def _plan(self, stepped: bool) -> list[str]:
        """Give the executor work; the sequences that are aboard from now on."""
        admitted: list[str] = []
        while self._in_flight < LOOKAHEAD and (plan := self._scheduler.plan()) is not None:
            grammars = {
                admission.log.grammar: self._grammars[admission.log.id]
                for admission in plan.admissions
                if admission.log.grammar is not None
            }
            self._executor.tell(Execute(plan, grammars, stepped or self._in_flight > 0))
            self._in_flight += 1
            self._tokens += sum(row.count for row in plan.rows)
            admitted += (admission.log.id for admission in plan.admissions)
        return admitted

    def _fairness_gap(self) -> float:
        """Looked at now and then: it costs a walk over all that wait."""
        if self._steps % GAP_STEPS == 0:
            self._gap_served = self._scheduler.fairness_gap
        return self._gap_served

    def _load(self) -> Load:
        scheduler = self._scheduler
        return Load(
            running=scheduler.running,
            waiting=scheduler.waiting + sum(map(len, self._compiling.values())),
            pages_total=scheduler.layout.num_pages,
            pages_used=scheduler.pages_used,
            pages_lent=scheduler.pages_lent,
            page_size=scheduler.layout.page_size,
            fairness_gap=self._fairness_gap(),
            prefix_queries=scheduler.prefix_queries,
            prefix_hits=scheduler.prefix_hits,
            preemptions=scheduler.preemptions,
            steps=self._steps,
            in_flight=self._in_flight,
            tokens=self._tokens,
            step_seconds=self._seconds,
            gap_seconds=self._gap,
            spent=replace(self._spent, plan=self._planning),
        )
