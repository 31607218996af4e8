"""What pages hold, written down for the next engine. `test_scheduler_machine.py` kills engines at random."""

import pytest
from fake_executor import Bench, FakeExecutor, make_log

from personae.engine.plan import MemoryLayout, StepResult
from personae.engine.scheduling.kv_events import BlockStored, KVEventRecorder
from personae.engine.scheduling.page_ledger import ROOT_BYTES, SETTLED_STEPS, PageLedger, ledger_bytes
from personae.engine.scheduling.scheduler import Scheduler
from personae.engine.tiers.tier import TierCounts
from personae.evals.tenants.fcfs import FirstComeFirstServed

LAYOUT = MemoryLayout(24, 4, 4, 64, 32)
PROMPT = tuple(range(10, 24))  # three pages and a half


class World:
    """Engines with the same memory, one after the other."""

    def __init__(self, layout: MemoryLayout = LAYOUT, *, partial: bool = True) -> None:
        self.layout, self.partial = layout, partial
        self.memory = bytearray(ledger_bytes(layout.num_pages, layout.page_size))
        self.cells: FakeExecutor | None = None

    def engine(self) -> tuple[Bench, int]:
        """Another engine, and how many pages it finds."""
        ledger = PageLedger(
            memoryview(self.memory), self.layout.num_pages, self.layout.page_size, partial=self.partial
        )
        scheduler, executor = (
            Scheduler(self.layout, FirstComeFirstServed(), ledger=ledger),
            FakeExecutor(self.layout),
        )
        if self.cells is not None:
            executor.inherit(self.cells)
        self.cells = executor
        found = scheduler.adopt()
        scheduler.check_integrity()
        return Bench(scheduler, executor), found

    def settled(self, log=None) -> Bench:
        """An engine that has run longer than it takes to settle."""
        bench, _ = self.engine()
        bench.add(log or make_log("settles", PROMPT, max_tokens=SETTLED_STEPS, eos=()))
        bench.run()
        return bench


def test_the_next_engine_finds_the_pages_and_computes_only_what_is_missing():
    world = World()
    first, found = world.engine()
    assert found == 0
    first.add(make_log("a", PROMPT, max_tokens=9, eos=()))
    for _ in range(5):
        first.step()
    emitted = tuple(first.brought["a"].tokens)
    assert 1 < len(emitted) < 9
    second, found = world.engine()
    assert found == (len(PROMPT) + len(emitted) - 1) // 4 + 1
    second.add(make_log("a", PROMPT, emitted=emitted, max_tokens=9, eos=()))
    second.step()
    assert second.executor.computed == 1
    second.run()
    alone, _ = World().engine()
    alone.add(make_log("a", PROMPT, max_tokens=9, eos=()))
    assert list(emitted) + second.brought["a"].tokens == alone.run()["a"].tokens


def test_many_streams_that_part_inside_the_same_page_all_find_theirs():
    world = World(MemoryLayout(200, 4, 40, 64, 200))
    first, _ = world.engine()
    prompts = {str(i): (1, 2, 3, 4, 100 + i, 5) for i in range(40)}
    first.add(*(make_log(id, prompt, eos=()) for id, prompt in prompts.items()))
    first.step()
    first.step()
    second, _ = world.engine()
    emitted = {id: tuple(first.brought[id].tokens) for id in prompts}
    assert all(emitted.values())
    second.add(*(make_log(id, prompts[id], emitted=emitted[id], eos=()) for id in prompts))
    second.step()
    assert second.executor.computed == 40


def test_without_partial_pages_only_full_ones_are_found():
    world = World(partial=False)
    bench, _ = world.engine()
    bench.add(make_log("a", PROMPT, max_tokens=9, eos=()))
    bench.step()
    bench.step()
    assert world.engine()[1] == 3


@pytest.mark.parametrize("other", [{"tenant": "other"}, {"adapter": "digest"}], ids=["tenant", "adapter"])
def test_pages_of_another_tenant_or_adapter_are_not_found(other):
    world = World()
    world.settled()
    bench, found = world.engine()
    assert found > 0
    bench.add(make_log("b", PROMPT, **other))
    assert bench.run()["b"].cached == 0


@pytest.mark.parametrize("same", [{"tenant": "ann"}, {"adapter": "digest"}], ids=["tenant", "adapter"])
def test_pages_of_the_same_tenant_and_adapter_are_found(same):
    world = World()
    world.settled(make_log("a", PROMPT, max_tokens=SETTLED_STEPS, eos=(), **same))
    bench, _ = world.engine()
    bench.add(make_log("b", PROMPT, **same))
    assert bench.run()["b"].cached == len(PROMPT) - 1


def test_pages_behind_the_token_where_an_adapter_becomes_active_are_computed_again():
    world = World()
    log = {"adapter": "digest", "adapter_start": 6}
    world.settled(make_log("a", PROMPT, max_tokens=SETTLED_STEPS, eos=(), **log))
    bench, found = world.engine()
    assert found == 1
    bench.add(make_log("b", PROMPT, **log), make_log("base", PROMPT))
    brought = bench.run()
    assert (brought["b"].cached, brought["base"].cached) == (4, 4)


def test_a_page_in_which_an_adapter_becomes_active_is_not_written_down_while_it_fills():
    world = World()
    bench, _ = world.engine()
    bench.add(make_log("a", PROMPT, eos=(), adapter="digest", adapter_start=12))
    bench.step()
    bench, found = world.engine()
    assert found == 3
    bench.add(make_log("base", (*PROMPT, 99)))
    assert bench.run()["base"].cached == 12


def test_pages_that_are_evicted_are_given_up_in_the_ledger_first():
    world = World()
    bench = world.settled()
    bench.add(*(make_log(str(first), range(first, first + 40), eos=()) for first in range(100, 600, 100)))
    bench.run()
    bench, found = world.engine()
    bench.add(make_log("again", PROMPT), make_log("500", range(500, 541)))
    brought = bench.run()
    assert found > 20
    assert brought["again"].cached == 0
    assert brought["500"].cached >= 36


def test_a_tenant_whose_name_is_too_long_to_be_written_down_is_served_and_found_nothing_of():
    world = World()
    world.settled(make_log("a", PROMPT, max_tokens=SETTLED_STEPS, eos=(), tenant="x" * ROOT_BYTES))
    assert world.engine()[1] == 0


def test_an_engine_that_ends_soon_after_it_found_pages_leaves_none():
    world = World()
    world.settled()
    bench, found = world.engine()
    assert found > 0
    bench.add(make_log("a", PROMPT, max_tokens=4, eos=()))
    bench.run()
    assert world.engine()[1] == 0
    bench = world.settled()
    assert world.engine()[1] > 0, "one that found none may end at any time"


def test_a_second_scheduler_with_the_same_ledger_finds_nothing():
    world = World()
    world.settled()
    ledger = PageLedger(memoryview(world.memory), LAYOUT.num_pages, LAYOUT.page_size)
    assert Scheduler(LAYOUT, FirstComeFirstServed(), ledger=ledger).adopt() > 0
    again = Scheduler(LAYOUT, FirstComeFirstServed(), ledger=ledger)
    assert again.adopt() == 0
    assert not ledger.held()
    again.check_integrity()


def test_pages_whose_parent_is_gone_are_free():
    world = World()
    world.settled()
    ledger = PageLedger(memoryview(world.memory), LAYOUT.num_pages, LAYOUT.page_size)
    [root] = [page for page in ledger.held() if ledger.chunk(page) == PROMPT[:4]]
    ledger.clear(root)
    bench, found = world.engine()
    assert found == 0
    assert bench.scheduler.adopt() == 0
    bench.add(make_log("a", PROMPT))
    assert bench.run()["a"].cached == 0


def test_an_entry_with_other_tokens_than_those_asked_for_is_not_used():
    world = World()
    world.settled()
    bench, _ = world.engine()
    bench.add(make_log("a", (*PROMPT[:5], 99, *PROMPT[6:])))
    assert bench.run()["a"].cached == 5


def test_full_pages_that_are_found_are_announced_and_those_that_are_not_full_are_not():
    world = World()
    bench, _ = world.engine()
    bench.add(make_log("a", PROMPT, eos=()))
    bench.step()
    recorder = KVEventRecorder()
    ledger = PageLedger(memoryview(world.memory), LAYOUT.num_pages, LAYOUT.page_size)
    scheduler = Scheduler(LAYOUT, FirstComeFirstServed(), ledger=ledger)
    scheduler.observe_cache(recorder)
    partial = [page for page in ledger.held() if len(ledger.chunk(page)) < 4]
    assert partial
    found = scheduler.adopt()
    stored = [
        name for event in recorder.take() if isinstance(event, BlockStored) for name in event.block_hashes
    ]
    assert len(stored) == found - len(partial)


class StagingTier:
    """A `TierIndex` that has all pages, and stores none."""

    pages, room, stores = 0, 0, False

    def has(self, name: bytes, source: str | None = None) -> bool:
        return True

    def wants(self, name: bytes) -> bool:
        return False

    def seconds(self, pages: int) -> float | None:
        return 0.0

    def reserve(self, pages: int) -> int:
        return 1

    def discard(self, ticket: int) -> None:
        pass

    def counts(self) -> TierCounts:
        return TierCounts()


@pytest.mark.parametrize("gone", [False, True], ids=["it stays", "it has left the cache"])
def test_a_page_from_a_tier_is_written_down_when_it_is_there(gone: bool):
    memory = memoryview(bytearray(ledger_bytes(LAYOUT.num_pages, LAYOUT.page_size)))
    ledger = PageLedger(memory, LAYOUT.num_pages, LAYOUT.page_size)
    scheduler = Scheduler(LAYOUT, FirstComeFirstServed(), tier=StagingTier(), ledger=ledger)
    scheduler.add(make_log("a", PROMPT, eos=(), session="s", session_seconds=0.0))
    [fetch] = scheduler.take_fetches()
    scheduler.fetched(fetch.ticket, len(fetch.keys))
    plan = scheduler.plan()
    assert plan is not None
    assert len(plan.moves) == 3
    assert not ledger.held(), "its content comes with the step"
    if gone:
        scheduler.cancel("a")
        for node in [*scheduler._running._only.cache.nodes()][::-1]:
            scheduler._running._only.cache.drop_unused([node])
    scheduler.commit(StepResult(plan.step, ((5,),)))
    scheduler.check_integrity()
    assert [ledger.chunk(page) for page in ledger.held()] == (
        [] if gone else [PROMPT[:4], PROMPT[4:8], PROMPT[8:12], PROMPT[12:]]
    )
