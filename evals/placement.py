"""Compares placement policies in the simulator, and searches for violations with many replicas.

    python -m personae.evals.placement                      # a table of the policies
    python -m personae.evals.placement --property --seconds 300
    python -m personae.evals.placement --large --replicas 32 --requests 100000 --seed 7

The table is for one day of traffic: adapters by Zipf's law, prompts with common beginnings, bursts. Each
policy serves the same requests. Times are virtual seconds. Goodput is the share of answers whose first token
comes within 500 ms and each further one within 50 ms; the policies do not know these targets. The fairness
gap is the widest difference in service between two (tenant, adapter) while both waited, in weighted tokens.
With --property, scenarios with faults are drawn from seeds for this many real seconds; with --large one large
scenario of that seed. Exit code 1 if an invariant was violated.
"""

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import count
from typing import Annotated

import typer

from personae.actors.simulation.capacity import quantile
from personae.actors.simulation.scenario import PLACEMENT_NAMES, PlacementName, Scenario, SimulationReport
from personae.actors.simulation.swarm import draw_several, many_engines
from personae.actors.simulation.trouble import Costs
from personae.actors.simulation.workload import SimulatedWorkload
from personae.actors.simulation.world import InvariantViolated, simulate
from personae.engine.sequence import LatencyTargets


def day(placement: PlacementName, replicas: int, requests: int, rate: float, seed: int) -> Scenario:
    """`rate` requests per second for each replica."""
    return Scenario(
        seed,
        SimulatedWorkload(
            requests=requests,
            rate=rate * replicas,
            burst=4.0,
            adapters=64,
            tenants=4,
            prompt=(4, 40),
            prefix=(128, 256),
            prefixed=0.8,
            answer=(1, 30),
            schemas=0.0,
            leaves=0.0,
            slow=0.0,
        ),
        Costs(step=0.005, token=0.0001, read=0.05, place=0.01, start=1.0),
        pages=1024,
        page_size=16,
        slots=32,
        batch=256,
        places=12,
        max_live=100_000,
        lull=1_000_000,
        every=1_000,
        longest_wait=600.0,
        replicas=replicas,
        placement=placement,
        goal=LatencyTargets(0.5, 0.05),
        compare_service=True,
    )


def row(placement: str, replicas: int, report: SimulationReport) -> str:
    """A line of the table."""
    hits = report.hits / report.queries if report.queries else 0.0
    cells = (
        replicas,
        placement,
        f"{report.tokens / report.busy:.0f}",
        f"{quantile(report.waits, 0.5) * 1000:.0f}",
        f"{quantile(report.waits, 0.99) * 1000:.0f}",
        f"{hits:.0%}",
        f"{report.good / max(report.targeted, 1):.0%}",
        report.loads,
        f"{report.fairness_gap:.0f}",
    )
    return f"| {' | '.join(map(str, cells))} |"


def check(scenarios: Iterable[Scenario]) -> bool:
    """Run scenarios and sum up what happened. True if nothing was wrong."""
    outcomes, faults = Counter[str](), Counter[str]()
    runs, requests, restarts, moved, wrong = 0, 0, 0, 0, 0
    for scenario in scenarios:
        runs += 1
        try:
            report = simulate(scenario)
        except InvariantViolated as error:
            wrong += 1
            print(f"seed {scenario.seed}: {error}", flush=True)
        else:
            requests += report.requests
            restarts += report.restarts
            moved += report.moved
            outcomes += Counter(report.outcomes)
            faults += Counter(report.faults)
    print(
        f"{runs} scenarios, {requests} requests, {restarts} deaths of engines, {moved} streams moved: "
        f"{wrong} violations\nfaults: {dict(faults)}\nends: {dict(outcomes)}"
    )
    return not wrong


def drawn(seconds: float, first: int) -> Iterator[Scenario]:
    """Scenarios of one seed after the other, until the time is over."""
    until = time.monotonic() + seconds
    for seed in count(first):
        if time.monotonic() >= until:
            return
        yield draw_several(seed)


def main(
    requests: Annotated[int, typer.Option(min=1, help="Of the table, for each policy.")] = 1500,
    replicas: Annotated[list[int] | None, typer.Option(help="Can be repeated.")] = None,
    rate: Annotated[float, typer.Option(help="Requests a second for each replica.")] = 40.0,
    seed: int = 1,
    seconds: Annotated[float, typer.Option(help="Of --property.")] = 300.0,
    property_: Annotated[bool, typer.Option("--property", help="Look for violations instead.")] = False,
    large: Annotated[bool, typer.Option("--large", help="The same, in one large scenario.")] = False,
) -> None:
    """Run and print."""
    if property_ or large:
        many = (many_engines(seed, requests, number) for number in replicas or [32])
        raise typer.Exit(0 if check(many if large else drawn(seconds, seed)) else 1)
    print(
        "| replicas | policy | tokens a busy second | first token p50, ms | p99, ms | prefix hits | goodput "
        "| loads | fairness gap |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for number in replicas or [4]:
        for placement in PLACEMENT_NAMES:
            print(row(placement, number, simulate(day(placement, number, requests, rate, seed))), flush=True)


if __name__ == "__main__":
    typer.run(main)
