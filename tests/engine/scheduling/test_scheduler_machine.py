"""Anything in any order: requests come and are cancelled, steps are planned up to four ahead, committed. Now
and then the engine dies, and the next one finds its pages."""

import msgspec
import pytest
from fake_executor import Bench, Brought, FakeExecutor, make_log, solo
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from personae.engine.plan import MemoryLayout
from personae.engine.scheduling.background import TieredPolicy
from personae.engine.scheduling.fairness import VirtualTokenCounters
from personae.engine.scheduling.page_ledger import PageLedger, ledger_bytes
from personae.engine.scheduling.pages import PagePool
from personae.engine.scheduling.prefix import PrefixCache
from personae.engine.scheduling.scheduler import Scheduler
from personae.engine.sequence import SequenceLog
from personae.evals.tenants.fcfs import FirstComeFirstServed

FAR = 4


def tiers():
    return TieredPolicy(VirtualTokenCounters(), VirtualTokenCounters(), patience=20)


HEADS = (tuple(range(30)), tuple(range(12)) + tuple(range(60, 78)))


class SchedulerMachine(RuleBasedStateMachine):
    """Every sequence ends once, with the tokens that it would have alone; nothing is left behind."""

    ids: Bundle[str] = Bundle("ids")

    @initialize(
        pages=st.integers(2, 24),
        page_size=st.integers(1, 5),
        max_seqs=st.integers(1, 5),
        spare=st.integers(0, 12),
        max_model_len=st.integers(8, 48),
        policy=st.sampled_from([FirstComeFirstServed, VirtualTokenCounters, tiers]),
        overlap=st.integers(1, 4),
        sharing=st.booleans(),
        lendable=st.sampled_from([0, 4, 24]),
        run=st.sampled_from([1, 1, 2, 4]),
        drafts=st.sampled_from([0, 1, 3, 7]),
        regions=st.sampled_from([1, 1, 2, 3]),
    )
    def open(
        self,
        pages,
        page_size,
        max_seqs,
        spare,
        max_model_len,
        policy,
        overlap,
        sharing,
        lendable,
        run,
        drafts,
        regions,
    ):
        if regions > 1:
            pages, lendable, run = pages * regions, 0, 1
        if lendable:
            pages = -(-(max(pages, -(-max_model_len // page_size)) + lendable) // run) * run
        self.layout = MemoryLayout(
            pages,
            page_size,
            max_seqs,
            max_model_len,
            max_seqs + spare,
            lendable,
            run,
            regions=regions,
        )
        self.lent: list[int] = []
        self.now = 0
        self.owed = 0
        self.logs: dict[str, SequenceLog] = {}
        self.memory = bytearray(ledger_bytes(pages, page_size))
        self.before: dict[str, Brought] = {}

        def scheduler() -> Scheduler:
            ledger = None if regions > 1 else PageLedger(memoryview(self.memory), pages, page_size)
            return Scheduler(self.layout, policy(), overlap, sharing=sharing, drafts=drafts, ledger=ledger)

        self.scheduler = scheduler
        self.it = Bench(scheduler(), self.executor(), FAR)
        self.it.scheduler.adopt()

    def executor(self) -> FakeExecutor:
        return FakeExecutor(self.layout, self.fails, self.defers, speculates=True)

    @staticmethod
    def fails(log: SequenceLog, position: int) -> str | None:
        return "planned to fail" if log.tenant == "unlucky" and position >= log.prompt_length + 2 else None

    @staticmethod
    def defers(log: SequenceLog, position: int) -> int:
        return hash((log.params.seed, position)) % 3 if log.tenant == "slow" else 0

    @rule(
        target=ids,
        head=st.sampled_from(HEADS),
        length=st.integers(1, 30),
        tail=st.lists(st.integers(90, 93), max_size=3),
        tenant=st.sampled_from(["a", "a", "b", "unlucky", "slow"]),
        adapter=st.sampled_from([None, None, "x"]),
        max_tokens=st.integers(1, 12),
        logprobs=st.sampled_from([None, None, 1]),
        prompt_logprobs=st.sampled_from([None, None, None, 1]),
        jump_forward=st.booleans(),
        siblings=st.integers(0, 2),
        background=st.sampled_from([False, False, True]),
        start=st.sampled_from([0, 0, 1, 3, 5, 14, 29]),
        priority=st.sampled_from([0, 0, -2, 3]),
        weight=st.sampled_from([1.0, 1.0, 3.0]),
        session=st.sampled_from([None, "one", "two"]),
        session_seconds=st.sampled_from([0.0, 5.0, 50.0]),
    )
    def add(
        self,
        head,
        length,
        tail,
        tenant,
        adapter,
        max_tokens,
        logprobs,
        prompt_logprobs,
        jump_forward,
        siblings,
        background,
        start,
        priority,
        weight,
        session,
        session_seconds,
    ):
        first = f"s{len(self.logs)}"
        added = []
        for i in range(siblings + 1):
            log = make_log(
                f"s{len(self.logs)}",
                (*head[:length], *tail),
                max_tokens=max_tokens,
                tenant=tenant,
                adapter=adapter,
                seed=i,
                after=first if i else None,
                eos=tuple(range(8)),
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
                jump_forward=jump_forward,
                background=background,
                adapter_start=min(start, len((*head[:length], *tail)) - 1) if adapter else 0,
                priority=priority,
                weight=weight,
                session=session,
                session_seconds=session_seconds,
                speculate=tenant != "slow",
            )
            self.logs[log.id] = log
            self.it.add(log)
            added.append(log.id)
        return multiple(*added)

    @rule(seconds=st.integers(0, 20))
    def time_passes(self, seconds):
        self.now += seconds
        self.it.scheduler.tick(self.now)

    @rule(
        tenant=st.sampled_from("ab"), session=st.sampled_from(["one", "two"]), seconds=st.sampled_from([0, 9])
    )
    def keep_session(self, tenant, session, seconds):
        self.it.scheduler.keep_session(tenant, session, seconds)

    @rule(count=st.integers(0, 30))
    def lend(self, count):
        pages = self.it.scheduler.lend(count)
        run = self.layout.run
        assert len(pages) < count + run
        assert list(pages) == [page + i for page in pages[::run] for i in range(run)], "whole runs"
        assert all(page % run == 0 for page in pages[::run])
        assert not set(pages) & set(self.lent), "lent twice"
        self.it.executor.lend(pages)
        self.lent += pages
        assert self.it.scheduler.pages_lent == len(self.lent) <= self.layout.lendable

    @rule(most=st.integers(0, 30))
    def recall(self, most):
        self.owed += self.it.scheduler.recall()
        assert self.owed <= len(self.lent)
        count = min(most, self.owed)
        self.it.scheduler.returned(tuple(self.lent[:count]))
        self.owed -= count
        del self.lent[:count]

    @rule(most=st.integers(1, 3))
    def masks_come(self, most):
        self.it.resume(most)

    @rule(id=ids)
    def cancel(self, id):
        if id in self.it.brought:
            self.it.cancel(id)

    @rule(executed=st.integers(0, FAR))
    def die(self, executed):
        """The engine is killed with some steps executed of which nobody has heard. The next one has the same
        memory, and gets all logs again."""
        for _ in range(min(executed, len(self.it.executor))):
            self.it.executor.execute()
        died, self.it = self.it, Bench(self.scheduler(), self.executor(), self.it.depth)
        self.it.executor.inherit(died.executor)
        self.it.scheduler.adopt()
        self.it.scheduler.tick(self.now)
        self.lent, self.owed = [], 0
        for id, brought in died.brought.items():
            before = self.before.setdefault(id, Brought())
            before.tokens += brought.tokens
            before.logprobs += brought.logprobs
            before.prompt_logprobs += brought.prompt_logprobs
            before.finish, before.stop_token = brought.finish, brought.stop_token
            # These would be delivered again.
            before.cancelled = brought.cancelled or self.logs[id].params.prompt_logprobs is not None
            if not before.ended:
                tokens = (*self.logs[id].tokens, *before.tokens)
                self.it.add(msgspec.structs.replace(self.logs[id], tokens=tokens))

    @precondition(lambda self: len(self.it.executor) < FAR)
    @rule()
    def plan(self):
        self.it.plan()

    @precondition(lambda self: len(self.it.executor) and not self.it.executor.lent_last)
    @rule()
    def replan(self):
        self.it.replan()

    @precondition(lambda self: len(self.it.executor))
    @rule()
    def commit(self):
        self.it.commit()

    @rule(steps=st.integers(1, 12), depth=st.integers(1, FAR))
    def run_for_a_while(self, steps, depth):
        self.it.depth = depth
        for _ in range(steps):
            self.it.step()

    @invariant()
    def the_invariants_hold(self):
        if hasattr(self, "it"):
            self.it.scheduler.check_integrity()

    def teardown(self):
        if not hasattr(self, "it"):
            return
        self.it.run()
        self.it.scheduler.tick(self.now + 100)
        assert not self.it.scheduler.sessions + self.it.scheduler.pages_kept
        for id, log in self.logs.items():
            before, after = self.before.get(id, Brought()), self.it.brought.get(id, Brought())
            last = before if before.ended else after
            brought = Brought(
                before.tokens + after.tokens,
                before.logprobs + after.logprobs,
                before.prompt_logprobs + after.prompt_logprobs,
                last.finish,
                last.stop_token,
                cancelled=last.cancelled,
            )
            if log.prompt_length >= self.layout.max_model_len:
                assert brought.cancelled or brought.finish == "error"
                continue
            alone = solo(log, self.layout.max_model_len)
            if brought.cancelled or brought.finish == "error":
                assert brought.tokens == alone.tokens[: len(brought.tokens)]
                continue
            assert brought.tokens == alone.tokens
            assert (brought.finish, brought.stop_token) == (alone.finish, alone.stop_token)
            assert brought.logprobs == alone.logprobs
            assert brought.prompt_logprobs == alone.prompt_logprobs


SchedulerMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=40)
TestSchedulerMachine = SchedulerMachine.TestCase


def small_world() -> Bench:
    layout = MemoryLayout(12, 4, 3, 48, 16)
    it = Bench(Scheduler(layout, FirstComeFirstServed()), FakeExecutor(layout), 2)
    it.add(*(make_log(str(i), range(i, i + 9), max_tokens=9) for i in range(6)))
    return it


def test_integrity_catches_a_leaked_page(monkeypatch):
    it = small_world()
    release = PagePool.release
    monkeypatch.setattr(PagePool, "release", lambda pool, page: page != 3 and release(pool, page))
    with pytest.raises(AssertionError, match="page 3"):
        it.run()


def test_integrity_catches_a_cache_handle_that_is_kept(monkeypatch):
    it = small_world()
    monkeypatch.setattr(PrefixCache, "unpin", lambda cache, node: None)
    it.run()
    it.add(make_log("copies", [*range(5, 11), 99]))
    with pytest.raises(AssertionError, match="handles"):
        it.run()


def test_integrity_catches_a_slot_with_two_owners():
    it = small_world()
    it.step()
    table = it.scheduler._running
    next(iter(table)).slot = table.decoding[-1].slot
    with pytest.raises(AssertionError, match=r"slot \d is owned 2 times"):
        it.scheduler.check_integrity()


def test_integrity_catches_a_sequence_that_outlives_its_end():
    it = small_world()
    it.step()
    del it.scheduler._sequences.sequences["0"]
    with pytest.raises(AssertionError, match="sequences"):
        it.scheduler.check_integrity()
