"""Random scenarios: every seed gives other sizes, other traffic and other faults."""

import random
from dataclasses import replace

from personae.actors.options import PrefillReplicas
from personae.actors.simulation.faults import KINDS, KINDS_OF_SEVERAL
from personae.actors.simulation.scenario import PLACEMENT_NAMES, Scenario
from personae.actors.simulation.trouble import Costs
from personae.actors.simulation.workload import SimulatedWorkload


def draw(seed: int, requests: int = 120) -> Scenario:
    """Draw the scenario of a seed. Sizes are small, so that everything is often full. Each scenario leaves
    out some kinds of faults, so that they do not always hide one another."""
    dice = random.Random(seed)
    choice, maybe = dice.choice, dice.random
    page_size = choice((4, 8, 16))
    slots = choice((2, 8, 32))
    longest = choice((8, 30, 60))
    prompt = choice((10, 40, 80))
    pages = max(choice((1.2, 4.0, 30.0)) * (prompt + 40 + longest + 1) / page_size, 8)
    workload = SimulatedWorkload(
        requests=requests,
        rate=choice((5.0, 50.0, 500.0)),
        burst=choice((1.0, 1.0, 20.0)),
        adapters=choice((0, 1, 6, 40)),
        zipf=choice((0.0, 1.0, 2.0)),
        tenants=choice((1, 3, 20)),
        prompt=(1, prompt),
        answer=(1, longest),
        schemas=choice((0.0, 0.3, 0.8)),
        grammars=choice((2, 20)),
        siblings=choice((0.0, 0.3)),
        leaves=choice((0.0, 0.1, 0.5)),
        slow=choice((0.0, 0.2)),
        broken=choice((0.0, 0.2)),
        bad=choice((0.0, 0.3)),
        thinks=(0.0, 0.5)[seed % 2],
        poison=choice((0.0, 0.0, 0.02)),
    )
    costs = Costs(
        runs_ahead=maybe() < 0.5,
        step=choice((0.001, 0.02)),
        read=choice((0.001, 0.5)),
        place=choice((0.001, 0.1)),
        compile=choice((0.001, 1.0)),
        start=choice((0.1, 3.0)),
    )
    kinds = tuple(kind for kind in KINDS if maybe() < 0.5) or KINDS
    scenario = Scenario(
        seed,
        workload,
        costs,
        faults_every=choice((None, 2.0, 10.0)),
        kinds=kinds,
        pages=int(pages) + 1,
        page_size=page_size,
        slots=slots,
        batch=max(slots, choice((16, 64, 512))),
        places=choice((1, 3, 16)),
        window=choice((1, 4, 64)),
        max_live=choice((20, 1000)),
        lull=choice((20, 60)),
        every=1,
        longest_wait=600.0,
    )
    lendable = choice((0, 4, 24))
    return replace(scenario, pages=scenario.pages + lendable, lendable=lendable)


def draw_several(seed: int, requests: int = 120) -> Scenario:
    """Draw a scenario with several engines, and with faults that need several."""
    dice = random.Random(seed)
    return replace(
        draw(seed, requests),
        replicas=dice.choice((2, 3, 5)),
        placement=dice.choice(PLACEMENT_NAMES),
        kinds=tuple(kind for kind in KINDS_OF_SEVERAL if dice.random() < 0.5) or KINDS_OF_SEVERAL,
    )


def busy(
    seed: int,
    requests: int,
    adapters: int,
    rate: float,
    faults_every: float | None,
    tier_pages: int = 0,
    tier_fails: float = 0.0,
    replicas: int = 1,
    prefill: PrefillReplicas = 0,
    transfer_fails: float = 0.0,
) -> Scenario:
    """One large engine that is always full: short prompts, many adapters, faults. With `tier_pages`
    memory is short, and a third of the requests belongs to sessions. With `replicas`, engines fetch pages
    from one another, and prompts are longer."""
    prompts = _short_prompts(requests, rate, adapters, poison=0.00001)
    costs = Costs(step=0.004, adapter=0.00001, start=1.0, read=0.004, place=0.0004)
    if replicas > 1:
        prompts = replace(prompts, prompt=(4, 120), sessions=0.3)
        costs = replace(costs, token=0.0001)
    return Scenario(
        seed,
        replace(prompts, sessions=0.3) if tier_pages else prompts,
        costs,
        faults_every=faults_every,
        pages=2048 if tier_pages else 4096,
        slots=256,
        batch=4096,
        places=128,
        window=32,
        max_live=4096,
        lull=20_000,
        longest_wait=300.0,
        tier_pages=tier_pages,
        tier_fails=tier_fails,
        replicas=replicas,
        kinds=KINDS_OF_SEVERAL if replicas > 1 else KINDS,
        transfer=replicas > 1,
        transfer_fails=transfer_fails,
        prefill=prefill,
    )


def many_engines(seed: int, requests: int, replicas: int = 32) -> Scenario:
    """Many busy engines, a thousand adapters, and three faults per second."""
    return Scenario(
        seed,
        _short_prompts(requests, 190.0 * replicas, 1000, poison=0.0001),
        Costs(step=0.04, adapter=0.00001, start=1.0, read=0.004, place=0.0004),
        faults_every=0.3,
        kinds=KINDS_OF_SEVERAL,
        pages=2048,
        slots=128,
        batch=2048,
        places=64,
        window=32,
        max_live=1024 * replicas,
        lull=50_000,
        every=4096,
        longest_wait=300.0,
        replicas=replicas,
        calm_lulls=True,
    )


def _short_prompts(requests: int, rate: float, adapters: int, *, poison: float) -> SimulatedWorkload:
    return SimulatedWorkload(
        requests=requests,
        rate=rate,
        burst=8.0,
        adapters=adapters,
        tenants=50,
        prompt=(4, 24),
        answer=(1, 12),
        schemas=0.1,
        siblings=0.02,
        broken=0.005,
        bad=0.02,
        poison=poison,
    )
