"""The whole server under a virtual clock: invariants hold in random scenarios, and planted violations are
noticed."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest
from patience import PATIENCE

from personae.actors.enginecore.executor import Executor
from personae.actors.frontend.inbox import Inbox
from personae.actors.messages import StepFinished
from personae.actors.simulation.adapters import SimulatedAdapterMemory
from personae.actors.simulation.machine import SimulatedDevice
from personae.actors.simulation.scenario import Scenario
from personae.actors.simulation.swarm import draw
from personae.actors.simulation.trouble import Costs
from personae.actors.simulation.workload import SimulatedWorkload
from personae.actors.simulation.world import InvariantViolated, simulate
from personae.engine.scheduling import live
from personae.engine.scheduling.fairness import VirtualTokenCounters
from personae.engine.scheduling.live import LiveSequence
from personae.engine.scheduling.page_names import root_key
from personae.engine.scheduling.prefix import PrefixCache
from personae.engine.scheduling.running import RunningTable
from personae.engine.scheduling.scheduler import Scheduler
from personae.engine.scheduling.sequence_table import SequenceTable

PACKAGES = str(Path(__file__).resolve().parents[2] / ".pkg")
CALM = Scenario(
    1, SimulatedWorkload(requests=60, rate=200.0, adapters=4, prompt=(8, 40), leaves=0.0), every=1
)


@pytest.mark.parametrize("seed", range(20))
def test_invariants_hold_in_random_scenarios(seed: int) -> None:
    report = simulate(draw(seed, requests=50))
    assert sum(report.outcomes.values()) >= report.requests == 50
    assert report.lulls


def test_an_engine_core_that_hangs_while_it_starts_is_noticed() -> None:
    report = simulate(draw(8, requests=120))  # stopped again and again, sometimes before it serves
    assert report.faults["stop"] > 0


def test_a_run_without_faults_serves_every_request() -> None:
    report = simulate(CALM)
    assert report.outcomes.keys() <= {"stop", "length"}
    assert (report.restarts, report.faults) == (0, {})


@pytest.mark.parametrize("kind", ["crash", "kill", "hang", "stop", "stall", "slow", "lost", "full", "load"])
def test_every_kind_of_fault_strikes_and_no_request_is_lost(kind: str) -> None:
    load = replace(CALM.workload, requests=150, rate=20.0)
    report = simulate(replace(CALM, seed=3, workload=load, faults_every=2.0, kinds=(kind,)))
    assert report.faults[kind]
    assert report.outcomes.keys() <= {"stop", "length", "unlucky"}
    assert report.outcomes.get("unlucky", 0) <= 3
    assert bool(report.restarts) == (kind not in {"stall", "slow"})


THINKING = replace(
    CALM,
    workload=replace(CALM.workload, requests=120, schemas=0.6, thinks=1.0, siblings=0.2, tenants=3),
    pages=60,
)


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("faults", [None, 3.0])
def test_answers_with_slow_masks_are_deferred_and_delay_no_others(
    monkeypatch: pytest.MonkeyPatch, ahead: bool, faults: float | None
) -> None:
    deferred, is_deferred = [0], SimulatedDevice._is_deferred

    def note(self: SimulatedDevice, slot, end):  # type: ignore[no-untyped-def]  # as the original
        out = is_deferred(self, slot, end)
        deferred[0] += out
        return out

    monkeypatch.setattr(SimulatedDevice, "_is_deferred", note)
    report = simulate(replace(THINKING, costs=Costs(runs_ahead=ahead), faults_every=faults))
    assert deferred[0] > 50
    assert report.outcomes["error"] > 0, "some of them take too long"
    if faults is None:
        assert report.outcomes.keys() <= {"stop", "length", "error"}


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("faults", [None, 3.0])
def test_drafts_change_no_answer_whatever_dies(
    monkeypatch: pytest.MonkeyPatch, ahead: bool, faults: float | None
) -> None:
    """The witness compares every token with the log's own."""
    right, verify = [0], SimulatedDevice._verify

    def note(self: SimulatedDevice, slot, row):  # type: ignore[no-untyped-def]  # as the original
        accepted = verify(self, slot, row)
        right[0] += accepted
        return accepted

    monkeypatch.setattr(SimulatedDevice, "_verify", note)
    load = replace(CALM.workload, requests=150)
    report = simulate(
        replace(CALM, workload=load, pages=60, costs=Costs(runs_ahead=ahead), faults_every=faults)
    )
    assert right[0] > 200
    assert bool(report.restarts) == (faults is not None)


def test_others_do_not_wait_for_the_masks_of_some() -> None:
    roomy = replace(THINKING, pages=4096, slots=256)
    slow = simulate(roomy)
    free = simulate(replace(roomy, workload=replace(roomy.workload, thinks=0.0)))
    assert slow.outcomes["error"] > 0
    assert median(slow.waits) < 1.5 * median(free.waits)


def test_a_ready_mask_that_is_not_reported_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "resume", lambda scheduler, id: None)
    with pytest.raises(InvariantViolated, match="never ended"):
        simulate(replace(THINKING, longest_wait=30.0))


LENDING = replace(
    CALM,
    workload=replace(CALM.workload, requests=150, rate=500.0, adapters=12, prompt=(16, 60)),
    pages=44,
    places=2,
    lendable=24,
)


def test_memory_is_lent_to_adapters_and_returns_to_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    lent, recalled = [0], [0]
    lending, recall = SimulatedAdapterMemory.lending, SimulatedAdapterMemory.recall

    def note_lending(self: SimulatedAdapterMemory, pages):  # type: ignore[no-untyped-def]  # as the original
        lent[0] += len(pages)
        return lending(self, pages)

    def note_recall(self: SimulatedAdapterMemory, count):  # type: ignore[no-untyped-def]  # as the original
        pages = recall(self, count)
        recalled[0] += len(pages)
        return pages

    monkeypatch.setattr(SimulatedAdapterMemory, "lending", note_lending)
    monkeypatch.setattr(SimulatedAdapterMemory, "recall", note_recall)
    report = simulate(LENDING)
    assert report.outcomes.keys() <= {"stop", "length"}
    assert lent[0] > 24
    assert recalled[0]


@pytest.mark.parametrize("runs_ahead", [True, False])
def test_a_device_that_runs_ahead_never_waits_for_the_host(runs_ahead: bool) -> None:
    """Its steps follow each other at once, although the host takes as long to prepare each. A device that
    blocks takes both times."""
    costs = Costs(step=0.004, host=0.003, runs_ahead=runs_ahead)
    load = SimulatedWorkload(
        requests=16, rate=1000.0, adapters=0, prompt=(4, 8), answer=(50, 60), leaves=0.0, speculates=False
    )
    pace = median(simulate(Scenario(1, load, costs)).paces)
    assert (0.004 < pace < 0.005) if runs_ahead else (0.007 < pace < 0.008)


def test_a_row_that_fails_ends_its_own_request_only() -> None:
    report = simulate(replace(CALM, seed=3, faults_every=0.05, kinds=("fail",)))
    assert 0 < report.outcomes["error"] <= report.faults["fail"]
    assert report.restarts == 0


def test_only_requests_that_kill_the_engine_are_ended() -> None:
    load = replace(CALM.workload, requests=150, poison=0.03, siblings=0.0)
    report = simulate(replace(CALM, seed=5, workload=load))
    assert report.outcomes.keys() == {"stop", "length", "quarantined"}
    assert report.outcomes["quarantined"] >= 2
    # Each ran in two crashes; several may have run in the first one.
    assert report.restarts <= 2 * report.outcomes["quarantined"]


def test_an_engine_that_is_given_up_ends_every_request() -> None:
    load = replace(CALM.workload, requests=80, poison=0.2)
    report = simulate(replace(CALM, workload=load, max_restarts=1))
    assert report.outcomes["engine lost"]
    assert report.outcomes.keys() <= {"engine lost", "stop", "length", "quarantined"}
    assert report.restarts == 1


def test_a_seed_replays_exactly_in_another_process_with_other_hashes() -> None:
    engine_spec = "from personae.actors.simulation.swarm import draw\n"
    engine_spec += "from personae.actors.simulation.world import simulate\n"
    engine_spec += "r = simulate(draw(11, 50)); print(r.trace, r.loop_steps, r.seconds, r.outcomes)"
    environment = {**os.environ, "PYTHONPATH": PACKAGES, "PYTHONHASHSEED": "4711"}
    other = subprocess.run(
        [sys.executable, "-c", engine_spec],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE,
    )
    report = simulate(draw(11, 50))
    assert other.stdout.split(maxsplit=3)[:3] == [
        str(report.trace), str(report.loop_steps), str(report.seconds)
    ]  # fmt: skip
    assert simulate(draw(11, 50)) == report


# Planted bugs


def leaked_page(monkeypatch: pytest.MonkeyPatch) -> None:
    release = PrefixCache.release

    def leak(self: PrefixCache, handle, pages, *, keep=True):  # type: ignore[no-untyped-def]  # as the original
        release(self, handle, pages[:-1], keep=keep)

    monkeypatch.setattr(PrefixCache, "release", leak)


def lost_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    post, posts = Executor.post, [0]

    def lose(self, to, message):  # type: ignore[no-untyped-def]  # as the original
        posts[0] += isinstance(message, StepFinished)
        if posts[0] != 7:
            post(self, to, message)

    monkeypatch.setattr(Executor, "post", lose)


def double_finish(monkeypatch: pytest.MonkeyPatch) -> None:
    put = Inbox.put

    def twice(self: Inbox, delta):  # type: ignore[no-untyped-def]  # as the original
        put(self, delta)
        if delta.finish is not None:
            put(self, delta)

    monkeypatch.setattr(Inbox, "put", twice)


def lost_token(monkeypatch: pytest.MonkeyPatch) -> None:
    put, puts = Inbox.put, [0]

    def skip(self: Inbox, delta):  # type: ignore[no-untyped-def]  # as the original
        puts[0] += 1
        if puts[0] != 20 or delta.finish is not None:
            put(self, delta)

    monkeypatch.setattr(Inbox, "put", skip)


def shared_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "root_key", lambda salt, adapter: root_key(b"shared", None))


def unfair(monkeypatch: pytest.MonkeyPatch) -> None:
    def richest(self: VirtualTokenCounters, *_: object):  # type: ignore[no-untyped-def]  # as the original
        return max(self._heads, key=lambda key: (self._counters[key], key[0], key[1] or ""))

    monkeypatch.setattr(VirtualTokenCounters, "choose", richest)


def forgotten_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    enter, entered = SequenceTable.enter, [0]

    def forget(self: SequenceTable, log):  # type: ignore[no-untyped-def]  # as the original
        entered[0] += 1
        return LiveSequence(log, 0, self._layout) if entered[0] == 9 else enter(self, log)

    monkeypatch.setattr(SequenceTable, "enter", forget)


def test_a_page_that_is_lent_and_used_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    lend = RunningTable.lend

    def keep(self: RunningTable, count):  # type: ignore[no-untyped-def]  # as the original
        pages = lend(self, count)
        for page in pages:
            self._only.pool.release(page)
        return pages

    monkeypatch.setattr(RunningTable, "lend", keep)
    with pytest.raises(InvariantViolated, match=r"pages? .*\d+"):
        simulate(LENDING)


@pytest.mark.parametrize(
    ("plant", "found"),
    [
        (leaked_page, "page|allocate"),
        (lost_reply, "out of order|has not returned a step"),
        (double_finish, "has ended, and more of it has come|ends twice"),
        (lost_token, "alone it would be"),
        (shared_cache, "another's KV"),
        (unfair, "service differs"),
        (forgotten_sequence, "never ended"),
    ],
)
def test_a_planted_bug_is_caught(
    plant: Callable[[pytest.MonkeyPatch], None], found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    load = replace(CALM.workload, requests=200, rate=2000.0, tenants=3, adapters=2, prompt=(16, 40))
    scenario = replace(CALM, workload=load, pages=20, slots=4, longest_wait=30.0, lull=200)
    with pytest.raises(InvariantViolated, match=found):
        simulate(scenario)


def test_a_blocked_frontend_reads_more_steps_at_once_than_a_mailbox_holds() -> None:
    load = replace(CALM.workload, requests=60, rate=20.0, answer=(200, 400))
    costs = Costs(step=0.002)
    report = simulate(
        replace(CALM, workload=load, costs=costs, faults_every=1.0, kinds=("stall",), max_live=4)
    )
    assert report.faults["stall"]
    assert report.restarts == 0
    assert report.outcomes.keys() <= {"stop", "length", "refused"}


def test_a_grammar_that_takes_too_long_on_a_busy_machine_is_refused_for_now() -> None:
    load = replace(CALM.workload, schemas=0.5, grammars=5)
    report = simulate(replace(CALM, workload=load, costs=Costs(compile=120.0)))
    assert report.outcomes["refused"]
    assert report.outcomes.keys() <= {"stop", "length", "refused"}
