"""Where requests go, and which goes next."""

import math
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from personae.actors.frontend.inbox import Inbox
from personae.actors.frontend.live_stream import LiveStream
from personae.actors.messages import AdapterStats, SchedulerStats
from personae.actors.replicas.frontend import ReplicaStats
from personae.actors.replicas.placement.base import OVERLOAD, Placement, PlacementRequest
from personae.actors.replicas.placement.d2lpm import DoubleDeficit
from personae.actors.replicas.placement.estimated import EstimatedSeconds
from personae.actors.replicas.placement.least_loaded import LeastLoaded
from personae.actors.replicas.placement.prefix import LongestPrefix
from personae.actors.replicas.placement.random import RandomPlacement
from personae.actors.replicas.prefixes import BLOCK, PrefixIndex, blocks_of
from personae.actors.replicas.replica import STEPS, Placed, Replica
from personae.actors.replicas.sessions import Sessions
from personae.actors.replicas.waiting import LEAD, Group, WaitingGroups
from personae.engine.params import SamplingParams
from personae.engine.scheduling.fairness import VirtualTokenCounters
from personae.engine.scheduling.step_time import StepCost
from personae.engine.sequence import LatencyTargets, SequenceLog

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("anyio_backend", ["asyncio"])]


@dataclass
class Numbers:
    """The figures of a replica, made up by a test."""

    token_seconds: float = 1e-4
    step: float = 0.01
    adapter_stats: AdapterStats = field(default_factory=lambda: AdapterStats(device=4, host=4))

    def step_seconds(self, tokens: int) -> float:
        return self.step


def replica(index: int) -> Replica:
    return Replica(index, SimpleNamespace(latest=Numbers()))  # type: ignore[arg-type]  # nothing else is read


def group(
    id: str,
    *,
    prompt: int = 100,
    adapter: str | None = None,
    tenant: str = "ann",
    first: int = 7,
    **more: object,
) -> Group:
    tokens = tuple(first + at % 5 for at in range(prompt))
    log = SequenceLog(
        id, tokens, prompt, SamplingParams(max_tokens=50, seed=0), adapter=adapter, tenant=tenant, **more
    )
    return Group([LiveStream(log, Inbox(), 0.0)], [log], 50)


def send(group: Group, replica: Replica) -> list[Placed]:
    placed = [Placed(stream, group.key) for stream in group.streams]
    replica.promise(group, placed)
    return placed


def choose(policy: Placement, group: Group, replicas: list[Replica], demand: int = 0) -> Replica | None:
    return policy.choose(PlacementRequest(group, demand or group.work), replicas)


async def test_promised_work_counts_until_it_is_computed() -> None:
    one = replica(0)
    placed = send(group("a"), one)[0]
    assert one.work == 150
    one.admit("a")
    assert one.work == 50, "its prompt is being computed"
    one.release(placed)
    assert (one.work, one.live, one.demand) == (0, {}, {})


@pytest.mark.parametrize("policy", [LeastLoaded(), EstimatedSeconds(), LongestPrefix()])
async def test_a_request_goes_to_the_replica_with_less_promised_work(policy: Placement) -> None:
    replicas = [replica(0), replica(1)]
    for number in range(9):
        chosen = choose(policy, group(f"{number}", prompt=10 + number), replicas)
        assert chosen is not None
        send(group(f"{number}", prompt=600, first=number), chosen)
        chosen.admit(f"{number}")
    assert abs(len(replicas[0].live) - len(replicas[1].live)) == 1


async def test_the_same_prefix_goes_to_the_same_replica_unless_that_is_overloaded() -> None:
    replicas = [replica(0), replica(1), replica(2)]
    for policy in (EstimatedSeconds(), LongestPrefix()):
        (before,) = send(group("before", prompt=10 * BLOCK), replicas[2])
        replicas[2].release(before)
        assert choose(policy, group("again", prompt=10 * BLOCK + 9), replicas) is replicas[2]
        assert choose(policy, group("other", prompt=10 * BLOCK, first=40), replicas) is not replicas[2]
    for number in range(20):
        send(group(f"more-{number}", prompt=9 * BLOCK, first=50 + number), replicas[2])
    assert choose(EstimatedSeconds(), group("late", prompt=10 * BLOCK + 9), replicas) is not replicas[2]


async def test_an_adapter_has_a_home_and_more_of_them_as_its_load_grows() -> None:
    replicas = [replica(index) for index in range(8)]
    policy = EstimatedSeconds()
    homes = {choose(policy, group("a", adapter=f"adapter-{number}"), replicas).index for number in range(40)}  # type: ignore[union-attr]  # there is room
    assert len(homes) >= 6, "adapters are spread"
    used = set()
    for number in range(64):
        log = group(f"{number}", adapter="hot", prompt=400, first=number)
        demand = sum(each.demand["hot"] for each in replicas) + log.work
        chosen = choose(policy, log, replicas, demand)
        assert chosen is not None
        mean = sum(each.work for each in replicas) / 8
        assert chosen.work <= max(OVERLOAD * mean, chosen.batch)
        send(log, chosen)
        chosen.admit(f"{number}")
        used.add(chosen.index)
        if number == 0:
            assert len(used) == 1
    assert len(used) > 4, "one adapter alone may have nearly all of them"


async def test_a_key_has_two_steps_of_prompts_waiting_and_each_tenant_finds_room_for_one() -> None:
    one = replica(0)
    flood = [group(f"{number}", prompt=300, first=number) for number in range(9)]
    sent = 0
    while one.has_room(flood[0].key):
        send(flood[sent], one)
        sent += 1
    assert sent == -(-STEPS * one.batch // 300)
    for number in range(100):
        send(group(f"many-{number}", tenant="flood", adapter=f"{number}", first=number), one)
    assert not one.has_room(group("x", tenant="flood", adapter="new").key), "it has more than its slots"
    assert one.has_room(group("x", tenant="bob").key)
    policies: list[Placement] = [RandomPlacement(), LeastLoaded(), LongestPrefix(), EstimatedSeconds()]
    for policy in policies:
        assert policy.choose(PlacementRequest(flood[-1], 1), [one]) is None
        assert policy.choose(PlacementRequest(flood[-1], 1, returns=True), [one]) is one


async def test_a_replica_that_is_clearly_slower_gets_less_and_one_that_differs_by_chance_does_not() -> None:
    cost = StepCost()
    usual, slow = ReplicaStats(cost), ReplicaStats(cost)
    for steps, tokens in enumerate((10, 50, 100, 200, 30) * 40):
        for stats, factor in ((usual, 1.1 if steps % 3 else 1.0), (slow, 6.0 if steps > 100 else 1.0)):
            past = stats.stats.counters
            seconds = past.step_seconds + factor * (0.005 + 0.0001 * tokens)
            counters = replace(past, steps=past.steps + 1, tokens=past.tokens + tokens, step_seconds=seconds)
            stats.update(SchedulerStats(counters=counters))
    assert usual.token_seconds == cost.each > 0
    assert slow.token_seconds > 1.5 * usual.token_seconds


async def test_prefixes_of_another_tenant_or_adapter_do_not_match() -> None:
    index = PrefixIndex(most=8)
    mine = group("a", prompt=4 * BLOCK, salt=b"ann")
    index.note(mine.blocks)
    assert index.match(blocks_of(mine.logs[0])) == 4 * BLOCK
    assert index.match(group("b", prompt=4 * BLOCK, salt=b"bob").blocks) == 0
    assert index.match(group("c", prompt=4 * BLOCK, salt=b"ann", adapter="x").blocks) == 0
    index.note(group("d", prompt=8 * BLOCK, first=30).blocks)
    assert len(index) == 8
    assert index.match(mine.blocks) == 0, "the oldest are forgotten"


async def test_the_least_served_key_goes_next_and_keys_without_room_are_skipped() -> None:
    policy = VirtualTokenCounters()
    waiting = WaitingGroups(policy)
    for number in range(3):
        waiting.push(group(f"flood-{number}", tenant="flood"))
    waiting.push(group("quiet", tenant="quiet"))
    taken = []
    while (first := waiting.choose()) is not None:
        taken.append(first.logs[0].id)
        waiting.take(first)
        policy.charge(first.key, 100, 0)
    assert taken == ["flood-0", "quiet", "flood-1", "flood-2"]
    assert not waiting.demand
    waiting.push(group("a", tenant="ann"))
    waiting.push(group("b", tenant="bob"))
    first = waiting.choose()
    assert first is not None
    waiting.park(first.key)
    second = waiting.choose()
    assert second is not None
    assert {first.key.tenant, second.key.tenant} == {"ann", "bob"}
    waiting.park(second.key)
    assert waiting.choose() is None
    waiting.unpark()
    assert waiting.keys == 2


async def test_among_requests_with_targets_the_one_with_the_least_time_left_goes_first() -> None:
    waiting = WaitingGroups(VirtualTokenCounters())
    for id, due in (("calm", math.inf), ("late", 5.0), ("soon", 2.0), ("missed", 0.5)):
        each = group(id, tenant=id)
        each.due = due
        waiting.push(each)
    taken = []
    while (chosen := waiting.choose(now=1.0)) is not None:
        taken.append(chosen.logs[0].id)
        waiting.take(chosen)
    assert taken == ["soon", "late", "calm", "missed"], (
        "a request that cannot be in time waits as all others do"
    )


async def test_a_target_moves_no_request_further_forward_than_fairness_allows() -> None:
    policy = VirtualTokenCounters()
    waiting = WaitingGroups(policy)
    for number in range(40):
        hurried = group(f"hurried-{number}", tenant="hurried", prompt=300)
        hurried.due = 2.0
        waiting.push(hurried)
        waiting.push(group(f"calm-{number}", tenant="calm", prompt=300))
    served = Counter[str]()
    for _ in range(40):
        chosen = waiting.choose(now=1.0)
        assert chosen is not None
        waiting.take(chosen)
        policy.charge(chosen.key, 300, 0)
        served[chosen.key.tenant] += 300
        assert served["hurried"] - served["calm"] <= LEAD + 300
    assert served["hurried"] > served["calm"] > 0


async def test_targets_that_are_withdrawn_leave_nothing_behind() -> None:
    waiting = WaitingGroups(VirtualTokenCounters())
    for number in range(1000):
        each = group(f"{number}")
        each.due = 1000.0 + number
        waiting.push(each)
        assert waiting.drop(f"{number}")
    assert len(waiting._due) <= 66
    assert not waiting.prompts


async def test_a_session_stays_at_its_replica_unless_that_is_overloaded() -> None:
    policy = EstimatedSeconds()
    replicas = [replica(0), replica(1), replica(2)]
    request = group("a", prompt=50)
    assert policy.choose(PlacementRequest(request, 100, session=2), replicas) is replicas[2]
    assert policy.choose(PlacementRequest(request, 100, session=7), replicas) is not None, "it is removed"
    for number in range(20):
        send(group(f"more-{number}", prompt=500, first=50 + number), replicas[2])
    assert policy.choose(PlacementRequest(request, 100, session=2), replicas) is not replicas[2]


async def test_a_session_name_belongs_to_its_tenant() -> None:
    sessions = Sessions(most=2)
    sessions.note(group("a", tenant="ann", session="s").logs[0], 1)
    assert sessions.get(group("b", tenant="ann", session="s").logs[0]) == 1
    assert sessions.get(group("b", tenant="bob", session="s").logs[0]) is None
    for number in range(3):
        sessions.note(group("c", tenant="cy", session=f"{number}").logs[0], 1)
    found = [sessions.get(group("d", tenant="cy", session=f"{number}").logs[0]) for number in range(3)]
    assert found == [None, 1, 1], "the tenant's oldest is forgotten"
    assert sessions.get(group("b", tenant="ann", session="s").logs[0]) == 1, "and none of another's"


async def test_a_target_for_each_token_avoids_replicas_whose_steps_take_longer() -> None:
    replicas = [replica(0), replica(1)]
    send(group("a", prompt=400, tenant="bob"), replicas[1])
    wanted = group("b", first=30, targets=LatencyTargets(token=0.02))
    for policy in (LeastLoaded(), EstimatedSeconds(), LongestPrefix()):
        replicas[0].frontend.latest.step = 0.05  # type: ignore[attr-defined]  # a stand-in
        assert choose(policy, group("c", first=30), replicas) is replicas[0]
        assert choose(policy, wanted, replicas) is replicas[1]
        replicas[1].frontend.latest.step = 0.05  # type: ignore[attr-defined]  # a stand-in
        assert choose(policy, wanted, replicas) is replicas[0], "no replica is so fast"
        replicas[1].frontend.latest.step = 0.01  # type: ignore[attr-defined]  # a stand-in


async def test_a_tenant_keeps_its_prefix_until_its_deficit_is_spent_and_is_spread_a_quantum_apart() -> None:
    replicas = [replica(0), replica(1), replica(2)]
    policy = DoubleDeficit(quantum=1000.0)
    used: list[int] = []
    for number in range(60):
        again = group(f"{number}", prompt=4 * BLOCK)  # always the same prompt
        chosen = choose(policy, again, replicas)
        assert chosen is not None
        used.append(chosen.index)
        (placed,) = send(again, chosen)
        chosen.release(placed)
        deficits = [policy.deficit("ann", each.index) for each in replicas]
        assert max(deficits) - min(deficits) <= 1000.0 + 4 * BLOCK + 50
    assert len(set(used)) == 3, "prefix alone would have kept it at one"
    changes = sum(one != other for one, other in pairwise(used))
    assert changes < 12, "it stays for as long as a quantum lasts"
    assert choose(policy, group("other", prompt=4 * BLOCK, tenant="bob", first=30), replicas) is not None
    assert policy.deficit("bob", 0) <= 1000.0, "each tenant has its own"


async def test_choices_of_one_prompt_wait_together_and_one_that_is_withdrawn_leaves_the_others() -> None:
    waiting = WaitingGroups(VirtualTokenCounters())
    logs = [group(id).logs[0] for id in "abc"]
    waiting.push(Group([LiveStream(log, Inbox(), 0.0) for log in logs], logs, 50))
    assert len(waiting) == 3
    assert waiting.drop("a")
    assert not waiting.drop("a")
    first = waiting.choose()
    assert first is not None
    assert [(log.id, log.after) for log in first.logs] == [("b", None), ("c", "b")]
    assert waiting.drop("b")
    assert waiting.drop("c")
    assert waiting.choose() is None
    assert not waiting.demand
