"""Plans for ranks that have sequences of their own: all pages of a sequence lie in one rank's region."""

import pytest
from fake_executor import Bench, FakeExecutor, make_log, solo

from personae.engine.plan import MemoryLayout, StepPlan
from personae.engine.scheduling.fairness import VirtualTokenCounters
from personae.engine.scheduling.kv_events import BlockRemoved, BlockStored, KVEventRecorder
from personae.engine.scheduling.scheduler import Scheduler


def bench(num_pages: int = 64, regions: int = 2, max_seqs: int = 8) -> Bench:
    layout = MemoryLayout(num_pages, 4, max_seqs, 64, 64, regions=regions)
    return Bench(Scheduler(layout, VirtualTokenCounters()), FakeExecutor(layout), 2)


def regions_of(it: Bench, plan: StepPlan | None) -> list[int]:
    """The region of each row with pages."""
    assert plan is not None
    return [row.pages[0] // it.scheduler.layout.region_pages for row in plan.rows if row.pages]


def test_sequences_go_to_the_region_that_has_the_fewest() -> None:
    it = bench()
    it.add(*(make_log(f"{n}", [n] * 4, max_tokens=2) for n in range(6)))
    assert sorted(regions_of(it, it.plan())) == [0, 0, 0, 1, 1, 1]


def test_a_long_prefix_is_followed_and_a_short_one_gives_way_to_evenness() -> None:
    it = bench(num_pages=400)
    prefix = [*range(40)]
    it.add(make_log("first", prefix, max_tokens=2))
    it.run()
    it.add(*(make_log(f"{n}", [*prefix, n], max_tokens=2) for n in range(4)))
    plan = it.plan()
    assert plan is not None
    placed = regions_of(it, plan)
    assert placed[0] == 0, "nobody else is there"
    assert sorted(placed) == [0, 0, 1, 1], "40 tokens are worth less than a region with one sequence more"
    assert [row.start for row in plan.rows] == [40 if region == 0 else 0 for region in placed]


def test_who_runs_out_of_memory_takes_it_from_its_own_region() -> None:
    it = bench(num_pages=20, max_seqs=4)
    logs = {f"{n}": make_log(f"{n}", [n] * 8, max_tokens=20, ignore_eos=True) for n in range(4)}
    it.add(*logs.values())
    for id, brought in it.run().items():
        assert brought.tokens == solo(logs[id], 64).tokens


def test_a_block_in_two_regions_is_stored_once_and_removed_with_the_last() -> None:
    it = bench(num_pages=12, max_seqs=2)
    events = KVEventRecorder()
    it.scheduler.observe_cache(events)
    it.add(*(make_log(f"{n}", [*range(8), n], max_tokens=2) for n in range(2)))
    it.run()
    stored = [
        name for event in events.take() if isinstance(event, BlockStored) for name in event.block_hashes
    ]
    assert len(stored) == len(set(stored)) == 2
    it.add(make_log("other", [*range(50, 72)], max_tokens=2))
    it.run()
    assert not any(isinstance(event, BlockRemoved) for event in events.take()), "the other region has it"
    assert events.names.keys() >= set(stored)


def test_regions_of_different_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="regions have as many pages each"):
        bench(num_pages=63)
