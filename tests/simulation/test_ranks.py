"""The ranks of a model under a virtual clock: one dies, one is slow, some have popular experts."""

from dataclasses import replace

import pytest

from personae.actors.simulation import ranks
from personae.actors.simulation.faults import KINDS_OF_RANKS
from personae.actors.simulation.scenario import Scenario
from personae.actors.simulation.swarm import draw
from personae.actors.simulation.trouble import Costs
from personae.actors.simulation.workload import SimulatedWorkload
from personae.actors.simulation.world import simulate
from personae.engine.scheduling.step_time import StepTime
from personae.engine.sequence import LatencyTargets
from personae.engine.worker import expert_balancing

LOAD = SimulatedWorkload(requests=150, rate=20.0, adapters=4, prompt=(8, 40), leaves=0.0, slow=0.0)
CALM = Scenario(1, LOAD, Costs(rests=False), every=1, ranks=4)
STRAGGLING = replace(CALM, every=64, faults_every=3.0, kinds=("straggle",))


@pytest.mark.parametrize("seed", range(5))
def test_invariants_hold_in_random_scenarios(seed: int) -> None:
    drawn = replace(draw(seed, requests=50), kinds=KINDS_OF_RANKS, faults_every=1.0)
    sizes = {"stages": 1 + seed % 2, "ranks": (1, 2, 4)[seed % 3], "spare": 1}
    report = simulate(replace(drawn, skew=seed % 2 * 0.8, **sizes))
    assert sum(report.outcomes.values()) >= report.requests == 50


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("kind", ["rank", "straggle"])
def test_a_rank_that_dies_or_is_slow_loses_nothing(kind: str, stages: int) -> None:
    report = simulate(replace(CALM, seed=3, stages=stages, faults_every=2.0, kinds=(kind,)))
    assert report.faults[kind]
    assert report.outcomes.keys() <= {"stop", "length", "unlucky"}
    assert bool(report.restarts) == (kind == "rank")


def test_a_slow_rank_of_one_stage_delays_a_step_by_that_stage_alone() -> None:
    made = ranks.SimulatedRanks(2, 2)
    made.slow[3] = 8.0
    assert made.compute(1) == [1.0, 8.0]


def test_the_expected_time_of_steps_follows_a_slow_rank_and_comes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: list[tuple[float, bool]] = []
    observe = StepTime.observe

    def note(self: StepTime, rows: int, prompts: int, seconds: float) -> None:
        if rows and not prompts and (expected := self.of(rows, 0)):
            found.append((expected / seconds, seconds > 0.02))
        observe(self, rows, prompts, seconds)

    monkeypatch.setattr(StepTime, "observe", note)
    load = replace(LOAD, requests=80, rate=10.0, answer=(40, 60), schemas=0.0)
    simulate(replace(STRAGGLING, workload=load, costs=Costs(rests=False, runs_ahead=False)))
    for slow, least in ((True, 0.6), (False, 0.95)):
        near = [0.6 < ratio < 1.6 for ratio, step in found if step == slow]
        assert len(near) > 50
        assert sum(near) > least * len(near)


def test_deadlines_hold_though_a_rank_is_slow() -> None:
    load = replace(LOAD, requests=200, rate=40.0, targets=LatencyTargets(first=1.0))
    report = simulate(replace(STRAGGLING, workload=load))
    assert report.faults["straggle"]
    assert report.good == report.targeted > 200


def test_ranks_with_popular_experts_take_longer_until_experts_move(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_balancing, "BALANCE_STEPS", 20)
    staying, moving = (ranks.SimulatedRanks(4, skew=1.0, spare=spare) for spare in (None, 1))
    stay, move = ([made.compute(64)[0] for _ in range(200)][100:] for made in (staying, moving))
    assert sum(stay) > 120
    assert sum(move) < 110
