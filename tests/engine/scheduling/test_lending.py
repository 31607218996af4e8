"""What of the KV cache's memory adapters may have, and how sequences get it back."""

import pytest
from fake_executor import Bench, FakeExecutor, make_log

from personae.engine.plan import MemoryLayout
from personae.engine.scheduling.scheduler import Scheduler
from personae.evals.tenants.fcfs import FirstComeFirstServed


def bench(pages: int = 20, lendable: int = 10, max_model_len: int = 40) -> Bench:
    layout = MemoryLayout(pages, 4, 4, max_model_len, 64, lendable)
    return Bench(Scheduler(layout, FirstComeFirstServed()), FakeExecutor(layout), 1)


def test_what_is_idle_is_lent_and_no_more_than_may_be() -> None:
    it = bench()
    assert len(it.scheduler.lend(7)) == 7
    assert len(it.scheduler.lend(7)) == 3
    assert it.scheduler.lend(1) == ()
    assert it.scheduler.pages_used == 0
    it.scheduler.check_integrity()


def test_the_first_run_of_pages_is_not_lent_however_much_may_be() -> None:
    """All layers begin there, and a kernel takes no address that has no memory."""
    layout = MemoryLayout(20, 4, 4, 4, 64, lendable=16, run=4)
    scheduler = Scheduler(layout, FirstComeFirstServed())
    assert sorted(scheduler.lend(20)) == list(range(4, 20))
    tight = MemoryLayout(20, 4, 4, 4, 64, lendable=19)
    assert sorted(Scheduler(tight, FirstComeFirstServed()).lend(20)) == list(range(1, 20))


def test_what_sequences_hold_is_not_lent_nor_the_page_that_each_grows_into() -> None:
    it = bench(lendable=19, pages=29)
    it.add(*(make_log(str(i), range(i, i + 24), max_tokens=8) for i in range(2)))
    it.step()
    used = it.scheduler.pages_used
    assert used == 12
    assert len(it.scheduler.lend(19)) == 29 - used - 2
    it.run()


def test_cached_prefixes_make_room_for_adapters() -> None:
    it = bench()
    it.add(make_log("first", range(30), max_tokens=4))
    it.run()
    pages = it.scheduler.lend(10)
    it.executor.lend(pages)
    it.add(make_log("again", range(30), max_tokens=4))
    it.add(make_log("other", range(50, 80), max_tokens=4))
    brought = it.run()
    assert brought["again"].tokens == brought["first"].tokens


def test_sequences_that_find_no_room_recall_what_they_miss_and_nothing_is_lent_meanwhile() -> None:
    it = bench()
    lent = it.scheduler.lend(10)
    it.add(make_log("a", range(30), max_tokens=8), make_log("b", range(40, 70), max_tokens=8))
    it.plan()
    assert it.scheduler.running == 1
    missing = it.scheduler.recall()
    assert 0 < missing <= 10
    assert it.scheduler.recall() == 0, "it was asked for"
    assert it.scheduler.lend(1) == ()
    it.scheduler.returned(lent[:missing])
    it.commit()
    it.plan()
    assert it.scheduler.running == 2
    it.run()
    assert it.scheduler.pages_lent == 10 - missing


def test_one_sequence_always_goes_on_however_much_is_lent() -> None:
    it = bench()
    it.executor.lend(it.scheduler.lend(10))
    it.add(make_log("long", range(20), max_tokens=30, ignore_eos=True))
    assert it.run()["long"].finish == "length"


def test_a_layout_whose_rest_could_not_hold_one_sequence_is_refused() -> None:
    with pytest.raises(ValueError, match="must hold one sequence of 44 tokens"):
        bench(max_model_len=44)
