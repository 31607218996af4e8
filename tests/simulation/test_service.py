"""How the simulation compares the service that (tenant, adapter) get."""

from personae.actors.simulation.service import ServiceGaps
from personae.engine.params import SamplingParams
from personae.engine.scheduling.fairness import FairnessKey
from personae.engine.sequence import SequenceLog


def log(id: str, tenant: str) -> SequenceLog:
    return SequenceLog(id, (1,), 1, SamplingParams(max_tokens=1, seed=0), tenant=tenant)


def test_the_gap_counts_only_service_while_both_wait() -> None:
    gaps = ServiceGaps()
    a, b = FairnessKey("a", None), FairnessKey("b", None)
    gaps.arrive(log("a1", "a"))
    gaps.charge(a, 100, 0)  # alone
    assert gaps.widest == 0
    gaps.arrive(log("b1", "b"))
    gaps.charge(a, 10, 20)
    assert gaps.widest == 10 + 2 * 20
    gaps.charge(b, 60, 0)
    assert gaps.widest == 50, "b has caught up"
    gaps.begin("b1")
    gaps.charge(a, 1000, 0)
    assert gaps.widest == 50, "b does not wait any more"


def test_a_key_waits_until_its_last_sequence_has_begun() -> None:
    gaps = ServiceGaps()
    for id in ("b1", "b2"):
        gaps.arrive(log(id, "b"))
    gaps.arrive(log("a1", "a"))
    gaps.begin("b1")
    gaps.charge(FairnessKey("a", None), 30, 0)
    assert gaps.widest == 30
    gaps.begin("b2")
    gaps.begin("b2")  # its end, after its admission
    gaps.arrive(log("b3", "b"))
    gaps.charge(FairnessKey("a", None), 30, 0)
    assert gaps.widest == 30, "it is compared anew"
