"""Pages that travel between engines, under the virtual clock: transfers that are slow or cut, and engines
that die, lose no request and change no token."""

from dataclasses import replace
from random import Random

import anyio
import pytest

from personae.actors.simulation.faults import Faults
from personae.actors.simulation.peers import SimulatedPeers
from personae.actors.simulation.scenario import Scenario
from personae.actors.simulation.swarm import draw_several
from personae.actors.simulation.trouble import Costs
from personae.actors.simulation.workload import SimulatedWorkload
from personae.actors.simulation.world import InvariantViolated, simulate
from personae.engine.scheduling.running import HeldPages, RunningTable

LOAD = SimulatedWorkload(
    requests=60,
    rate=50.0,
    adapters=3,
    prompt=(60, 200),
    answer=(5, 40),
    leaves=0.0,
    grammars=4,
    sessions=0.3,
)
CALM = Scenario(
    1,
    LOAD,
    Costs(token=0.0005),
    pages=600,
    page_size=8,
    batch=64,
    every=16,
    lull=50,
    replicas=3,
    transfer=True,
    prefill=1,
)


@pytest.mark.parametrize("seed", range(4))
def test_invariants_hold_with_transfers_that_fail_and_prefill_engines_that_die(seed: int) -> None:
    dice, scenario = Random(seed), draw_several(seed, requests=30)
    costs = replace(
        scenario.costs, transfer=dice.choice((0.00001, 0.0005, 0.02)), connect=dice.choice((0.0001, 0.1))
    )
    report = simulate(
        replace(
            scenario,
            workload=replace(scenario.workload, sessions=0.5, deletes=0.2),
            costs=costs,
            transfer=True,
            transfer_fails=dice.choice((0.0, 0.05, 0.4)),
            prefill=dice.randrange(scenario.replicas),
            tier_pages=dice.choice((0, 4, 4000)),
            tier_fails=dice.choice((0.0, 0.2)),
        )
    )
    assert sum(report.outcomes.values()) >= report.requests == 30
    assert report.lulls


def test_a_prefill_engine_computes_long_prompts_and_their_pages_follow() -> None:
    report = simulate(replace(CALM, workload=replace(LOAD, rate=5.0)))
    assert report.outcomes.keys() <= {"stop", "length"}
    assert report.prefilled >= 50
    assert 50 * 60 < report.tier_hits <= 8 * report.transferred


def test_short_prompts_stay_where_they_are_answered() -> None:
    report = simulate(replace(CALM, workload=replace(LOAD, prompt=(2, 6), prefixed=0.0)))
    assert report.prefilled < 10


@pytest.mark.parametrize("kind", ["kill", "silent", "scale"])
def test_every_kind_of_fault_strikes_prefill_engines_and_others(kind: str) -> None:
    load = replace(LOAD, requests=80, rate=20.0)
    report = simulate(
        replace(CALM, seed=3, workload=load, faults_every=1.0, kinds=(kind,), transfer_fails=0.05, prefill=2)
    )
    assert report.faults[kind]
    assert report.prefilled
    assert report.outcomes.keys() <= {"stop", "length", "unlucky"}
    assert report.outcomes.get("unlucky", 0) <= 3


def test_a_transfer_that_takes_too_long_is_given_up_and_the_prompt_computed() -> None:
    slow = replace(CALM, costs=replace(CALM.costs, transfer=3.0), longest_wait=60.0)
    report = simulate(slow)
    assert report.outcomes.keys() <= {"stop", "length"}
    assert max(report.pauses) < 10.0


def test_without_a_tier_of_its_own_an_engine_finds_a_sessions_pages_at_another() -> None:
    load = replace(LOAD, requests=100, prefixed=1.0, prefix=(100, 101), prompt=(8, 16))
    report = simulate(replace(CALM, workload=load, placement="random", prefill=0))
    assert report.transferred
    assert 0 < report.tier_hits <= 8 * report.transferred


def test_streams_that_leave_a_drained_engine_take_their_pages_along(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run(self: Faults) -> None:
        await anyio.sleep(3.0)
        self._scale(Leaving())

    class Leaving(Random):
        """Asks for one replica, at once."""

        def randint(self, a: int, b: int) -> int:
            return a

        def choice(self, seq):  # type: ignore[no-untyped-def]  # as Random's
            return seq[0]

    monkeypatch.setattr(Faults, "run", run)
    load = replace(LOAD, requests=60, rate=200.0, answer=(50, 60), prompt=(60, 100))
    costs = replace(CALM.costs, step=0.05)
    report = simulate(replace(CALM, workload=load, costs=costs, prefill=0))
    assert report.moved
    assert report.transferred > report.moved


def test_engines_that_answer_compute_prompts_too_when_too_many_wait_for_a_prefill_engine() -> None:
    load = replace(LOAD, requests=60, rate=100.0, prompt=(150, 200))
    slow = replace(CALM, workload=load, costs=replace(CALM.costs, token=0.01), longest_wait=300.0)
    report = simulate(slow)
    assert 0 < report.prefilled < 60


def test_pages_that_are_given_away_while_they_are_sent_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    hold = RunningTable.hold

    def no_hold(self: RunningTable, root: bytes, chunks: list[bytes]) -> HeldPages:
        held = hold(self, root, chunks)
        self.let_go(held.number)
        return held

    monkeypatch.setattr(RunningTable, "hold", no_hold)
    costs = replace(CALM.costs, transfer=0.05)
    tight = replace(CALM, seed=2, pages=60, costs=costs, workload=replace(LOAD, rate=10.0), prefill=2)
    with pytest.raises(InvariantViolated, match="changed while they were sent"):
        simulate(tight)


def test_a_page_of_another_content_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    fetch = SimulatedPeers._from_peer

    def wrong(self: SimulatedPeers, wanted, source):  # type: ignore[no-untyped-def]  # as the original
        return [[-1] * len(cells) for cells in fetch(self, wanted, source)]

    monkeypatch.setattr(SimulatedPeers, "_from_peer", wrong)
    with pytest.raises(InvariantViolated, match="another's KV"):
        simulate(CALM)
