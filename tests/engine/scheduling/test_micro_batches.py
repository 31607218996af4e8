"""Plans for stages that compute several steps at the same time: each has other sequences' rows."""

import pytest
from fake_executor import Bench, FakeExecutor, make_log, solo

from personae.engine.plan import MemoryLayout, StepPlan
from personae.engine.scheduling import scheduler as scheduler_module
from personae.engine.scheduling.fairness import VirtualTokenCounters
from personae.engine.scheduling.scheduler import Scheduler


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_module, "MICRO_BATCH", 2)


def bench(stages: int, num_pages: int = 200, **sizes: int) -> Bench:
    layout = MemoryLayout(
        num_pages, **{"page_size": 4, "max_seqs": 12, "max_model_len": 64, "max_batch_tokens": 32, **sizes}
    )
    scheduler = Scheduler(layout, VirtualTokenCounters(), micro_batches=stages)
    return Bench(scheduler, FakeExecutor(layout), stages)


def logs(count: int) -> dict[str, list[int]]:
    return {f"s{number}": [number, number + 1, number + 2] for number in range(count)}


def begun(stages: int, count: int) -> tuple[Bench, list[StepPlan]]:
    """All prompts are computed. The plans for all stages, from then on."""
    it = bench(stages)
    it.add(*(make_log(id, prompt, max_tokens=30, ignore_eos=True) for id, prompt in logs(count).items()))
    while it.scheduler.running < count or any(not brought.tokens for brought in it.brought.values()):
        it.step()
    while len(it.executor):
        it.commit()
    plans = [plan for _ in range(stages + 1) if (plan := it.plan()) is not None]
    return it, plans


@pytest.mark.parametrize(
    ("stages", "count", "rows"),
    [(2, 8, [4, 4]), (2, 7, [4, 3]), (3, 12, [4, 4, 4]), (2, 3, [2, 1]), (2, 1, [1])],
)
def test_the_stages_have_equally_many_rows_of_different_sequences(
    stages: int, count: int, rows: list[int]
) -> None:
    _, plans = begun(stages, count)
    assert [len(plan.rows) for plan in plans] == rows
    assert len({row.slot for plan in plans for row in plan.rows}) == count


def test_few_rows_are_not_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_module, "MICRO_BATCH", 8)
    _, plans = begun(2, 8)
    assert [len(plan.rows) for plan in plans] == [8]


@pytest.mark.parametrize("stages", [2, 3])
def test_no_sequence_waits_longer_than_others_and_all_have_their_own_tokens(stages: int) -> None:
    it, _ = begun(stages, 9)
    while it.ended == []:
        it.step()
        counts = [len(brought.tokens) for brought in it.brought.values()]
        assert max(counts) - min(counts) <= 2
    brought = it.run()
    for id, prompt in logs(9).items():
        assert brought[id].tokens == solo(make_log(id, prompt, max_tokens=30, ignore_eos=True), 64).tokens


def test_a_long_prompt_has_chunks_in_steps_behind_one_another() -> None:
    it = bench(2, max_model_len=200)
    it.add(make_log("long", list(range(100)), max_tokens=2, ignore_eos=True))
    first, second = it.plan(), it.plan()
    assert first is not None
    assert second is not None
    assert [first.rows[0].start, second.rows[0].start] == [0, 32]
    it.run()


def test_with_little_memory_sequences_are_preempted_and_keep_their_tokens() -> None:
    it = bench(2, num_pages=20, max_seqs=8)
    it.add(*(make_log(id, prompt, max_tokens=30, ignore_eos=True) for id, prompt in logs(8).items()))
    brought = it.run()
    assert it.scheduler.counters.preemptions
    for id, prompt in logs(8).items():
        assert brought[id].tokens == solo(make_log(id, prompt, max_tokens=30, ignore_eos=True), 64).tokens
