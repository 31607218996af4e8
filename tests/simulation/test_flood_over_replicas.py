"""One tenant floods four engines. Another waits for its first tokens about as long as with one engine."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import anyio
import pytest
from marks import long

from personae.actors.simulation import clients
from personae.actors.simulation.capacity import quantile
from personae.actors.simulation.faults import Faults
from personae.actors.simulation.scenario import PlacementName, Scenario
from personae.actors.simulation.trouble import Costs
from personae.actors.simulation.witness import ObservedSequence, Witness
from personae.actors.simulation.workload import SimulatedRequest, SimulatedWorkload
from personae.actors.simulation.world import simulate
from personae.engine.params import SamplingParams
from personae.engine.sequence import Delta, SequenceLog

QUIET = 16  # requests of the other tenant, eight a second
SEEDS = range(1, 9)  # a single flood has too few of its requests for a p95; these have too few for a p99
SIZES = {"slots": 16, "batch": 64, "pages": 512, "max_live": 10_000, "lull": 100_000, "every": 64}


def request(number: int, tenant: str, at: float, adapters: int, prompt: int) -> SimulatedRequest:
    log = SequenceLog(
        f"{tenant}-{number}",
        tuple(1 + (number * 31 + at_) % 60 for at_ in range(prompt)),
        prompt,
        SamplingParams(max_tokens=30, seed=number),
        adapter=f"{tenant}-adapter-{number % adapters}",
        tenant=tenant,
        salt=tenant.encode(),
    )
    return SimulatedRequest(at, (log,), None, 0.0)


def traffic(engines: int, adapters: int) -> list[SimulatedRequest]:
    """The flood sends far more than the engines can compute; the other tenant sends eight requests a
    second."""
    flood = [request(number, "flood", 0.0, adapters, 40) for number in range(150 * engines)]
    quiet = [request(number, "quiet", 0.5 + number / 8, 1, 20) for number in range(QUIET)]
    return sorted([*flood, *quiet], key=lambda each: each.at)


@cache
def first_tokens(
    engines: int,
    adapters: int,
    placement: PlacementName = "estimated",
    *,
    one_dies: bool = False,
) -> dict[str, list[float]]:
    """Seconds to the first token, by tenant. `one_dies`: an engine is killed while both tenants have
    requests."""
    waits: dict[str, list[float]] = defaultdict(list)
    seen = Witness.delta

    def note(self: Witness, sequence: ObservedSequence, delta: Delta) -> None:
        fresh = sequence.first is None
        seen(self, sequence, delta)
        if fresh and sequence.first is not None:
            waits[sequence.log.tenant].append(sequence.first - sequence.came)

    async def kill(self: Faults) -> None:
        await anyio.sleep(1.0)
        if one_dies and (process := self._processes()[0]) is not None:
            process.kill()

    def drawn(workload: SimulatedWorkload, seed: int) -> Iterator[SimulatedRequest]:
        yield from traffic(engines, adapters)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Witness, "delta", note)
        patch.setattr(clients, "requests", drawn)
        patch.setattr(Faults, "run", kill)
        for seed in SEEDS:
            scenario = Scenario(seed, costs=Costs(step=0.01, rests=False), **SIZES)
            simulate(replace(scenario, replicas=engines, placement=placement))
    return waits


@pytest.mark.parametrize(
    ("adapters", "placement", "one_dies"),
    [
        (3, "estimated", True),
        long(1, "estimated", False),
        long(3, "estimated", False),
        long(3, "d2lpm", False),
    ],
)
def test_a_flood_over_four_engines_delays_another_tenant_about_as_much_as_over_one(
    adapters: int, placement: PlacementName, one_dies: bool
) -> None:
    alone = first_tokens(1, adapters)
    four = first_tokens(4, adapters, placement, one_dies=one_dies)
    bound = quantile(alone["quiet"], 0.95)
    for waits in (alone, four):
        assert quantile(waits["flood"], 0.5) > 4 * bound, "it is a flood"
    assert len(four["quiet"]) == QUIET * len(SEEDS)
    assert quantile(four["quiet"], 0.95) <= 1.25 * bound
