"""Latency targets over several engines, under a virtual clock."""

from dataclasses import replace

import pytest

from personae.actors.replicas import waiting
from personae.actors.simulation.scenario import Scenario
from personae.actors.simulation.trouble import Costs
from personae.actors.simulation.workload import SimulatedWorkload
from personae.actors.simulation.world import simulate
from personae.engine.sequence import LatencyTargets

BUSY = Scenario(
    1,
    SimulatedWorkload(
        requests=600,
        rate=260.0,
        burst=8.0,
        adapters=0,
        tenants=4,
        zipf=0.0,
        prompt=(40, 100),
        answer=(1, 10),
        prefixed=0.0,
        schemas=0.0,
        siblings=0.0,
        leaves=0.0,
        slow=0.0,
        targets=LatencyTargets(first=0.4),
        targeted=0.3,
    ),
    Costs(step=0.01, token=0.0002),
    replicas=4,
    slots=16,
    batch=128,
    pages=512,
    max_live=5000,
    lull=5000,
)


def test_more_targets_are_met_when_those_with_the_least_time_left_go_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted = replace(BUSY.workload, rate=400.0, targets=LatencyTargets(first=0.8))
    overloaded = replace(BUSY, workload=wanted)
    with_lead = simulate(overloaded)
    monkeypatch.setattr(waiting, "LEAD", -1.0)
    without = simulate(overloaded)
    assert with_lead.targeted == without.targeted > 100
    assert with_lead.good > 1.5 * without.good


def test_requests_that_ask_for_early_refusal_get_it_and_the_others_are_mostly_in_time() -> None:
    refusing = replace(BUSY.workload, rate=600.0, targets=LatencyTargets(first=0.4, refuse=True))
    report = simulate(replace(BUSY, workload=refusing))
    staying = simulate(replace(BUSY, workload=replace(BUSY.workload, rate=600.0)))
    refused = report.outcomes["refused"]
    assert 0 < refused < report.targeted
    assert report.good / (report.targeted - refused) > staying.good / staying.targeted
    assert "refused" not in staying.outcomes


def test_no_request_is_refused_under_light_load() -> None:
    calm = replace(BUSY.workload, rate=5.0, targets=LatencyTargets(first=0.4, token=0.1, refuse=True))
    report = simulate(replace(BUSY, workload=calm))
    assert report.good == report.targeted > 100
