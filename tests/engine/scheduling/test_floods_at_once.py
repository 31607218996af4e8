"""Several tenants flood at once: each has its share of the engine's time, and every prompt ends.

A model of a server with step times as on two cores with a model of 135M parameters. `COSTS` has a quiet
machine and busy ones, on which rows cost more.
"""

import random
from collections import Counter
from dataclasses import replace
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

import pytest

from personae.engine.params import SamplingParams
from personae.engine.plan import MemoryLayout, StepPlan, StepResult
from personae.engine.scheduling.fairness import VirtualTokenCounters
from personae.engine.scheduling.scheduler import Scheduler
from personae.engine.sequence import SequenceLog

PAGES = 5825  # enough for all
LAYOUT = MemoryLayout(num_pages=PAGES, page_size=16, max_seqs=64, max_model_len=8192, max_batch_tokens=512)
LONG = 5500  # tokens
HTTP = 0.005


class Costs(NamedTuple):
    """Seconds of a step, of each row, of each prompt token, and of each position before that."""

    fixed: float
    row: float
    token: float
    context: float = 0.0


COSTS = {
    "quiet": Costs(0.0052, 0.0006, 0.0008),
    "busy": Costs(0.005, 0.003, 0.0015),
    "long contexts": Costs(0.006, 0.0012, 0.0008, 0.0000002),
}


class Load(NamedTuple):
    """Clients that send their next request `pause` seconds after an answer; without a pause only one. They
    begin when it is known how long steps take."""

    clients: int
    prompt: int
    answer: int
    pause: float | None = HTTP
    adapter: str | None = None
    begin: float = 3.0
    priority: int = 0
    tenant: str | None = None


LONGS = Load(8, LONG, 2, pause=None)
FLOODS = {
    "short requests": Load(500, 20, 8),
    "long answers": Load(30, 1, 400),
    "longer answers": Load(8, 31, 90),
}
CALM = Load(1, 33, 4, pause=1.0, begin=0.0)


class Server:
    """Plays loads by name, which is that of the tenant unless it has one."""

    def __init__(self, costs: Costs, pages: int = PAGES, **loads: Load) -> None:
        layout = replace(LAYOUT, num_pages=pages)
        self.scheduler = Scheduler(layout, VirtualTokenCounters(), sharing=True)
        self.costs, self.loads = costs, loads
        self.now = 0.0
        self.asked: dict[str, float] = {}
        self.first: dict[str, float] = {}
        self.ended: dict[str, float] = {}
        self.seconds: Counter[str] = Counter()  # that each tenant's rows and prompts took
        self._numbers: Counter[str] = Counter()
        self._order = count()
        self._next: list[tuple[float, int, str]] = []
        self._slots: dict[int, SequenceLog] = {}
        self._planned: StepPlan | None = None
        for name, load in loads.items():
            for _ in range(load.clients):
                self._send_at(load.begin, name)

    def _send_at(self, at: float, name: str) -> None:
        heappush(self._next, (at, next(self._order), name))

    def _arrive(self, by: float) -> bool:
        came = False
        while self._next and self._next[0][0] <= by:
            at, _, name = heappop(self._next)
            load, id = self.loads[name], f"{name} {self._numbers[name]}"
            self._numbers[name] += 1
            self.asked[id], came = at, True
            tenant = load.tenant or name
            text = tuple(random.Random(id).choices(range(1000), k=load.prompt))
            params = SamplingParams(max_tokens=load.answer, temperature=0.0, seed=0, ignore_eos=True)
            salt = tenant.encode()
            self.scheduler.add(
                SequenceLog(
                    id,
                    text,
                    load.prompt,
                    params,
                    adapter=load.adapter,
                    tenant=tenant,
                    salt=salt,
                    priority=load.priority,
                )
            )
        return came

    def play(self, until: float) -> None:
        while self.now < until:
            self._arrive(self.now)
            plan = self._planned or self.scheduler.plan()
            if plan is None:
                self.now = max(self.now, self._next[0][0]) if self._next else until
                continue
            took = self._take(plan)
            self._arrive(self.now + max(0.9 * took - 0.003, 0.0))
            self._planned = self.scheduler.plan()
            if self._arrive(self.now + took) and self._planned is not None:
                self._planned = self.scheduler.replan() or self._planned
            self.now += took
            tokens = tuple((7,) if row.samples else () for row in plan.rows)
            for delta in self.scheduler.commit(StepResult(plan.step, tokens), took):
                if delta.tokens:
                    self.first.setdefault(delta.id, self.now)
                if delta.finish:
                    assert delta.finish != "error", delta.error
                    self.ended[delta.id] = self.now
                    name = delta.id.rsplit(" ", 1)[0]
                    if (pause := self.loads[name].pause) is not None:
                        self._send_at(self.now + pause, name)
            self.scheduler.tick(self.now)

    def _take(self, plan: StepPlan) -> float:
        """How long the step takes; counts what each tenant has of it."""
        self._slots |= {admission.slot: admission.log for admission in plan.admissions}
        total = self.costs.fixed if plan.rows else 0.0
        for row in plan.rows:
            log = self._slots[row.slot]
            each = self.costs.row if row.start >= len(log.tokens) else self.costs.token * row.count
            each += self.costs.context * row.count * row.start
            self.seconds[log.tenant] += each
            total += each
        return total

    def ends(self, name: str) -> list[float]:
        """When the requests of a load ended, in the order in which they were sent."""
        ids = [f"{name} {number}" for number in range(self._numbers[name])]
        return [self.ended[id] for id in ids if id in self.ended]

    def waits(self, name: str) -> list[float]:
        """How long the requests of a load waited for the first token, sorted."""
        return sorted(at - self.asked[id] for id, at in self.first.items() if id.rsplit(" ", 1)[0] == name)


def alone(costs: Costs) -> float:
    """Seconds of a long prompt that nobody delays."""
    return LONG * costs.token + sum(costs.context * start for start in range(LONG))


@pytest.mark.parametrize("costs", COSTS.values(), ids=COSTS)
@pytest.mark.parametrize("others", [*([name] for name in FLOODS), [*FLOODS]], ids=" and ".join)
def test_long_prompts_have_their_share_of_the_time_and_end_one_after_the_other(
    costs: Costs, others: list[str]
) -> None:
    server = Server(costs, long=LONGS, calm=CALM, **{name: FLOODS[name] for name in others})
    tenants = 1 + len(others)
    server.play(3.0)
    server.seconds.clear()
    server.play(3.0 + 2.5 * tenants * alone(costs))
    assert server.seconds["long"] > 0.7 * server.seconds.total() / (tenants + 1)
    for name in others:
        assert server.seconds[name] < 1.5 * server.seconds["long"], name
    ends = server.ends("long")
    assert ends, "the first one has ended"
    assert ends == sorted(ends)


def test_a_prompt_that_does_not_fit_beside_floods_takes_at_most_twice_its_share() -> None:
    for costs in COSTS.values():
        server = Server(costs, long=LONGS._replace(clients=1), **FLOODS)
        server.play(3.0 + 2 * (1 + len(FLOODS)) * alone(costs))
        assert server.ends("long"), costs


def test_a_tenant_that_asked_for_little_has_no_credit_for_it() -> None:
    costs = COSTS["quiet"]
    later = Load(8, LONG, 2, pause=None, begin=60.0, tenant="calm")
    server = Server(costs, long=Load(20, LONG, 2), calm=CALM._replace(pause=0.2), later=later)
    server.play(60.0)
    begun = server.seconds.copy()
    server.play(75.0)
    had = server.seconds["long"] - begun["long"]
    assert had > 0.35 * (server.seconds.total() - begun.total())


@pytest.mark.parametrize(
    "others",
    [{"big": Load(32, 1000, 900)}, {"big": Load(32, 1000, 900), "short": FLOODS["short requests"]}, FLOODS],
    ids=" and ".join,
)
def test_a_prompt_that_needs_most_of_the_memory_has_it_in_time_and_delays_no_small_request(
    others: dict[str, Load],
) -> None:
    costs = COSTS["quiet"]
    server = Server(costs, pages=600, long=LONGS, calm=CALM, **others)
    server.play(3.0 + 4 * (1 + len(others)) * alone(costs))
    assert server.ends("long")
    assert server.waits("calm")[-1] < 0.2
    for name in others:
        assert server.ends(name), name
    server.scheduler.check_integrity()


@pytest.mark.parametrize("own", [{"adapter": "other"}, {"priority": -1}], ids=["other adapter", "urgent"])
def test_a_tenants_own_short_requests_wait_for_at_most_two_of_its_long_prompts_and_not_for_all(
    own: dict[str, object],
) -> None:
    costs = COSTS["quiet"]
    short = Load(1, 20, 8, pause=0.5, tenant="long")._replace(**own)
    server = Server(costs, long=LONGS, short=short, calm=CALM, answers=FLOODS["long answers"])
    server.play(60.0)
    longest = max(b - a for a, b in zip([3.0, *server.ends("long")], server.ends("long"), strict=False))
    assert server.waits("short")[-1] < 2.1 * longest


def test_the_time_of_rows_is_measured_though_all_steps_would_have_prompts() -> None:
    costs = COSTS["busy"]
    loads = {name: load._replace(begin=0.0) for name, load in FLOODS.items()}
    server = Server(costs, long=LONGS._replace(begin=0.0), **loads)
    server.play(10.0)
    for rows in (1, 10):
        assert server.scheduler._times.of(rows, 0) == pytest.approx(costs.fixed + rows * costs.row, rel=0.2)


def test_while_every_tenant_waits_for_its_share_less_of_the_time_is_fixed() -> None:
    costs = COSTS["quiet"]
    fixed = []
    for calm in (CALM._replace(pause=None), CALM):  # the first has left
        server = Server(costs, long=LONGS, short=FLOODS["short requests"], calm=calm)
        server.play(20.0)
        server.seconds.clear()
        server.play(30.0)
        fixed.append(1.0 - server.seconds.total() / 10.0)
    assert fixed[0] < 0.7 * fixed[1]
