"""The simulated device carries out plans as the contract in `engine/plan.py` says."""

from personae.actors.simulation.loop import SimulationLoop, SimulationThreads
from personae.actors.simulation.machine import SimulatedDevice
from personae.actors.simulation.trouble import Costs, Trouble
from personae.engine.params import SamplingParams
from personae.engine.plan import Admission, MemoryLayout, Row, StepPlan
from personae.engine.sequence import SequenceLog

PROMPT = 4


class FailsAtSecondToken(Trouble):
    """No token can be sampled at one position."""

    def fails(self, log: SequenceLog, position: int) -> str | None:
        return "planted" if position == PROMPT + 1 else None


def test_rows_that_were_planned_behind_a_failure_with_drafts_between_are_discarded() -> None:
    loop = SimulationLoop(0)
    device = SimulatedDevice(
        MemoryLayout(4, 8, 1, 32, 32), 0, Costs(host=0.0), SimulationThreads(loop), FailsAtSecondToken()
    )
    log = SequenceLog(
        "one", (1, 2, 3, 4), PROMPT, SamplingParams(max_tokens=20, seed=1, speculate=True), eos=(0,)
    )
    # the plans count all drafts of earlier rows: those were made before anything was known
    plans = [
        StepPlan(0, (Row(0, 0, PROMPT, True, pages=(0,)),), admissions=(Admission(0, log),)),
        StepPlan(1, (Row(0, PROMPT, 1, True, drafts=2),)),
        StepPlan(2, (Row(0, PROMPT + 3, 1, True, pages=(1,), drafts=2),)),
        StepPlan(3, (Row(0, PROMPT + 6, 1, True),)),
    ]
    results = [device.forward(device.prepare(plan, {}), lambda: None).result for plan in plans]
    loop.close()
    assert [len(tokens) for result in results for tokens in result.tokens] == [1, 0, 0, 0]
    assert [result.failures for result in results] == [{}, {0: "planted"}, {}, {}]
