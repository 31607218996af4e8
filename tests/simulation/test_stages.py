"""Several steps in the stages of a model, under a virtual clock: nothing is lost, and stages do not wait for
one another."""

from dataclasses import replace
from statistics import median

import pytest

from personae.actors.simulation.scenario import Scenario
from personae.actors.simulation.swarm import draw
from personae.actors.simulation.trouble import Costs
from personae.actors.simulation.workload import SimulatedWorkload
from personae.actors.simulation.world import InvariantViolated, simulate
from personae.engine.scheduling import scheduler
from personae.engine.scheduling.scheduler import Scheduler

LOAD = SimulatedWorkload(requests=60, rate=500.0, adapters=4, prompt=(8, 40), leaves=0.0, slow=0.0)
COSTLY_ROWS = Costs(step=0.001, row=0.001, token=0.0002, runs_ahead=False, rests=False)
CALM = Scenario(1, LOAD, COSTLY_ROWS, every=1)


@pytest.fixture(autouse=True)
def _several_steps_in_the_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "MICRO_BATCH", 2)


@pytest.mark.parametrize("seed", range(5))
def test_invariants_hold_in_random_scenarios(seed: int) -> None:
    report = simulate(replace(draw(seed, requests=50), stages=2 + seed % 3))
    assert sum(report.outcomes.values()) >= report.requests == 50


@pytest.mark.parametrize("kind", ["crash", "kill", "hang", "slow"])
def test_a_stage_that_dies_or_is_slow_loses_nothing(kind: str) -> None:
    load = replace(LOAD, requests=150, rate=20.0)
    report = simulate(replace(CALM, seed=3, workload=load, stages=3, faults_every=2.0, kinds=(kind,)))
    assert report.faults[kind]
    assert report.outcomes.keys() <= {"stop", "length", "unlucky"}


def test_tokens_come_almost_twice_as_fast_from_two_stages_where_rows_are_costly() -> None:
    one, two = (simulate(replace(CALM, stages=stages)) for stages in (1, 2))
    assert one.tokens == two.tokens
    assert median(two.paces) < 0.65 * median(one.paces)


def test_a_row_that_goes_on_too_early_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "_micro_batch", lambda self: None)
    with pytest.raises(InvariantViolated, match="goes on before the stages have computed its last token"):
        simulate(replace(CALM, stages=2))
