"""The number of replicas follows the load: decided alone, and played in the simulator."""

from collections.abc import Iterator
from dataclasses import replace
from statistics import quantiles

import pytest

from personae.actors.replicas.load_scaling import (
    CALM,
    LONGEST_WAIT,
    PATIENCE,
    ReplicaLoad,
    ScalingPolicy,
)
from personae.actors.simulation.scenario import Scenario
from personae.actors.simulation.trouble import Costs
from personae.actors.simulation.workload import SimulatedWorkload
from personae.actors.simulation.world import simulate


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
