"""Pages in a tier, under the virtual clock: disks that are slow, full or failing lose no request and change
no token."""

from dataclasses import replace
from random import Random

import pytest

from personae.actors.simulation.scenario import Scenario
from personae.actors.simulation.swarm import draw, draw_several
from personae.actors.simulation.tier import SimulatedTier
from personae.actors.simulation.trouble import Costs
from personae.actors.simulation.workload import SimulatedWorkload
from personae.actors.simulation.world import InvariantViolated, simulate
from personae.engine.scheduling.sequence_table import SequenceTable

LOAD = SimulatedWorkload(
    requests=100,
    rate=10.0,
    adapters=2,
    tenants=3,
    prefixed=1.0,
    prefix=(60, 90),
    prompt=(2, 20),
    answer=(1, 20),
    leaves=0.0,
)
SMALL = Scenario(
    2, LOAD, Costs(token=0.001, fetch=0.0001), pages=60, page_size=4, every=1, lull=25, tier_pages=2000
)


@pytest.mark.parametrize("seed", range(6))
def test_invariants_hold_with_disks_that_are_slow_full_or_failing(seed: int) -> None:
    dice, scenario = Random(seed), draw(seed, requests=50)
    costs = replace(scenario.costs, fetch=dice.choice((0.00002, 0.0005, 0.02)))
    workload = replace(scenario.workload, sessions=0.5, deletes=0.2)
    report = simulate(
        replace(
            scenario,
            workload=workload,
            costs=costs,
            tier_pages=dice.choice((4, 4000)),
            tier_fails=dice.choice((0.0, 0.05, 0.4)),
        )
    )
    assert sum(report.outcomes.values()) >= report.requests == 50
    assert report.lulls


def test_pages_for_which_there_is_no_room_are_found_again() -> None:
    with_tier, without = simulate(SMALL), simulate(replace(SMALL, tier_pages=0))
    assert with_tier.tier_hits > 100
    assert with_tier.hits > without.hits
    assert without.tier_hits == 0


def test_an_engine_that_died_finds_the_pages_of_the_one_before() -> None:
    dying = replace(SMALL, pages=400, faults_every=1.0, kinds=("kill",))
    report = simulate(dying)
    assert report.restarts
    assert report.tier_hits > 100


def test_a_request_whose_pages_come_too_late_is_computed() -> None:
    slow = replace(SMALL, costs=replace(SMALL.costs, fetch=30.0), longest_wait=20.0)
    report = simulate(slow)
    assert report.outcomes.keys() <= {"stop", "length"}
    assert max(report.waits) < 15.0


def test_a_page_that_is_stored_after_it_was_overwritten_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    store = SimulatedTier.store

    def late(self: SimulatedTier, keys, owners, ready):  # type: ignore[no-untyped-def]  # as the original
        store(self, keys, owners, lambda: [[-1] * len(cells) for cells in ready()])

    monkeypatch.setattr(SimulatedTier, "store", late)
    with pytest.raises(InvariantViolated, match="another's KV"):
        simulate(SMALL)


def test_a_fetch_that_is_forgotten_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SequenceTable, "fetched", lambda table, ticket, count: None)
    monkeypatch.setattr(SequenceTable, "abandon_fetch", lambda table, ticket: None)
    with pytest.raises(InvariantViolated, match="never ended"):
        simulate(replace(SMALL, longest_wait=30.0))


@pytest.mark.parametrize("seed", range(4))
def test_invariants_hold_with_a_remote_tier_that_engines_share(seed: int) -> None:
    dice, scenario = Random(seed), draw_several(seed, requests=50)
    report = simulate(
        replace(
            scenario,
            workload=replace(scenario.workload, sessions=0.5, deletes=0.2),
            costs=replace(scenario.costs, fetch=dice.choice((0.0001, 0.005, 0.05))),
            tier_pages=dice.choice((40, 4000)),
            tier_fails=dice.choice((0.0, 0.05, 0.4)),
            tier_shared=True,
        )
    )
    assert sum(report.outcomes.values()) >= report.requests == 50


def test_an_engine_finds_what_another_has_stored_in_a_remote_tier() -> None:
    few = replace(LOAD, requests=40)
    several = replace(SMALL, workload=few, replicas=3, placement="random")
    own, shared = simulate(several), simulate(replace(several, tier_shared=True))
    assert shared.tier_hits > own.tier_hits
