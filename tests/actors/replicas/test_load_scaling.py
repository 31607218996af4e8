"""The number of replicas follows the load: decided alone, and played in the simulator."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from statistics import quantiles

import pytest
from fake_executor import make_log
from msgspec.structs import replace as replace_log

from personae.actors.frontend.inbox import Inbox
from personae.actors.frontend.live_stream import LiveStream
from personae.actors.process import CoreProcess
from personae.actors.replicas.goodput import ENOUGH, WINDOW, Goodput
from personae.actors.replicas.load_scaling import (
    CALM,
    LONGEST_WAIT,
    MISSED,
    PATIENCE,
    ReplicaLoad,
    ScalingPolicy,
)
from personae.actors.simulation.run import SimulatedEngine
from personae.actors.simulation.scenario import Scenario
from personae.actors.simulation.trouble import Costs
from personae.actors.simulation.workload import SimulatedWorkload
from personae.actors.simulation.world import World, simulate
from personae.engine.sequence import LatencyTargets


def decided(policy: ScalingPolicy, load: ReplicaLoad, seconds: float, begin: float = 0.0) -> list[int]:
    """What the policy wants each second while the load stays."""
    return [policy.wanted(begin + second, load) for second in range(int(seconds) + 1)]


def test_work_that_waits_long_starts_replicas_after_some_patience() -> None:
    load = ReplicaLoad(serving=2, starting=0, waiting=1.5 * LONGEST_WAIT, busy=2.0)
    assert decided(ScalingPolicy(1, 8), load, PATIENCE) == [2] * int(PATIENCE) + [3]


def test_a_burst_that_ends_by_itself_starts_nothing() -> None:
    policy, load = ScalingPolicy(1, 8), ReplicaLoad(2, 0, 10 * LONGEST_WAIT, 2.0)
    for second in range(30):
        waiting = load if second % 2 else load._replace(waiting=0.0)
        assert policy.wanted(second, waiting) == 2


@pytest.mark.parametrize(
    ("waiting", "starting", "most", "wanted"),
    [
        (100.0, 0, 8, 4),  # at most twice as many as serve
        (100.0, 0, 3, 3),
        (100.0, 2, 8, 4),  # those that start are enough
        (1.5 * LONGEST_WAIT, 2, 8, 4),
    ],
)
def test_as_many_start_as_the_work_needs_and_those_that_load_count(
    waiting: float, starting: int, most: int, wanted: int
) -> None:
    load = ReplicaLoad(2, starting, waiting, 2.0)
    assert decided(ScalingPolicy(1, most), load, PATIENCE)[-1] == wanted


def test_a_replica_ends_when_the_others_would_have_done_for_long_and_then_the_next_one() -> None:
    policy = ScalingPolicy(1, 8)
    assert decided(policy, ReplicaLoad(3, 0, 0.0, 0.5), CALM) == [3] * int(CALM) + [2]
    assert decided(policy, ReplicaLoad(2, 0, 0.0, 0.5), CALM - 1, CALM + 1)[-1] == 1


@pytest.mark.parametrize(
    "load",
    [
        ReplicaLoad(1, 0, 0.0, 0.0),  # the least
        ReplicaLoad(3, 0, 0.0, 1.5),  # the others would be too busy
        ReplicaLoad(2, 1, 0.0, 0.0),  # one starts
        ReplicaLoad(3, 0, LONGEST_WAIT, 0.5),  # work waits
    ],
)
def test_no_replica_ends_that_is_needed(load: ReplicaLoad) -> None:
    assert set(decided(ScalingPolicy(1, 8), load, 3 * CALM)) == {load.serving + load.starting}


def test_the_last_replica_ends_when_nobody_asks_and_the_first_request_starts_one_at_once() -> None:
    policy = ScalingPolicy(0, 2)
    idle, asked = ReplicaLoad(1, 0, 0.0, 0.0), ReplicaLoad(0, 0, 0.0, 0.0, live=1)
    assert decided(policy, idle, CALM) == [1] * int(CALM) + [0]
    assert policy.wanted(CALM + 1, ReplicaLoad(0, 0, 0.0, 0.0)) == 0
    assert policy.wanted(CALM + 2, asked) == 1
    assert policy.wanted(CALM + 3, asked._replace(starting=1)) == 1


def test_the_last_replica_stays_for_a_request_that_has_not_ended() -> None:
    waits = ReplicaLoad(1, 0, 0.0, 0.0, live=1)  # for its adapter, say
    assert set(decided(ScalingPolicy(0, 2), waits, 3 * CALM)) == {1}


@pytest.mark.parametrize(
    ("missed", "busy", "wanted"),
    [
        (2 * MISSED, 1.8, 3),
        (2 * MISSED, 0.5, 2),  # the targets are too short for any number of replicas
        (MISSED / 2, 1.8, 2),
    ],
)
def test_answers_that_miss_their_targets_at_busy_replicas_start_another(
    missed: float, busy: float, wanted: int
) -> None:
    load = ReplicaLoad(2, 0, 0.0, busy, live=9, missed=missed)
    assert decided(ScalingPolicy(2, 8), load, PATIENCE)[-1] == wanted


def test_no_replica_ends_while_answers_miss_their_targets() -> None:
    load = ReplicaLoad(3, 0, 0.0, 0.1, live=9, missed=2 * MISSED)
    assert set(decided(ScalingPolicy(1, 8), load, 3 * CALM)) == {3}


def test_answers_of_half_a_minute_say_whether_targets_are_met() -> None:
    goodput = Goodput()
    log = make_log("a", [1], max_tokens=9)
    for number in range(ENOUGH):
        stream = LiveStream(replace_log(log, targets=LatencyTargets(first=1.0, token=0.1)), Inbox(), 0.0)
        stream.first, stream.emitted = 0.5, [1] * 5
        goodput.note(stream, now=0.5 + 4 * (0.05 if number % 2 else 0.2))
        assert goodput.missed(2.0) == (0.5 if number == ENOUGH - 1 else 0.0)
    assert goodput.missed(2.0 + WINDOW) == 0.0


def arrivals() -> Iterator[float]:
    """A rush after some calm, and calm again."""
    at = 0.0
    while at < 40:
        yield at
        at += 0.05 if 5 <= at < 30 else 1.0


def test_a_rush_is_answered_sooner_with_more_replicas_and_nothing_is_lost() -> None:
    trace = tuple(arrivals())
    scenario = Scenario(
        seed=5,
        workload=SimulatedWorkload(requests=len(trace), trace=trace, adapters=4, leaves=0, slow=0, schemas=0),
        costs=Costs(step=0.05, token=0.0025, start=4.0, rests=False),
        lull=len(trace),
        replicas=2,
        slots=8,
        max_live=4096,
    )
    fixed, scaled = (simulate(replace(scenario, by_load=by_load)) for by_load in (False, True))
    assert scaled.requests == fixed.requests == len(trace)
    assert set(scaled.outcomes) <= {"stop", "length"}
    assert quantiles(scaled.waits, n=20)[-1] < 0.7 * quantiles(fixed.waits, n=20)[-1]


SELDOM = (0.0, 0.1, 3 * CALM, 3 * CALM + 0.1, 6 * CALM)
ASLEEP = Scenario(
    seed=6,
    workload=SimulatedWorkload(requests=len(SELDOM), trace=SELDOM, adapters=2, leaves=0, slow=0, schemas=0),
    costs=Costs(step=0.02, start=4.0, rests=False),
    lull=len(SELDOM),
    replicas=0,
    by_load=True,
)


def test_seldom_requests_each_wait_for_one_start_and_nothing_is_lost() -> None:
    report = simulate(ASLEEP)
    assert set(report.outcomes) <= {"stop", "length"}
    first, second, woke, soon, again = report.waits
    assert max(first, second) < 1  # the engine that showed that the model loads
    assert all(3.9 < wait < 4.2 for wait in (woke, soon, again))  # the second came 0.1 s after the first


def test_requests_are_refused_while_the_only_engine_cannot_start_and_served_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launch, launches = World._launch, itertools.count(1)

    async def second_fails(self: World, engine: SimulatedEngine) -> CoreProcess:
        self.faults.load_fails = next(launches) == 2
        return await launch(self, engine)

    monkeypatch.setattr(World, "_launch", second_fails)
    report = simulate(ASLEEP)
    assert report.outcomes.pop("refused") == 2  # the third, and the fourth while it waited for the same
    assert sum(report.outcomes.values()) == 3
