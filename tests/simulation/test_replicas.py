"""Several engines under a virtual clock: in every random scenario each request ends once, with its own
tokens."""

import random
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import anyio
import pytest
from msgspec import structs

from personae.actors.messages import Orphaned, Transfer
from personae.actors.replicas.dispatcher import Dispatcher
from personae.actors.replicas.frontend import ReplicaIngress
from personae.actors.replicas.replica import Replica
from personae.actors.replicas.scaling import ReplicaInfo
from personae.actors.replicas.waiting import Group
from personae.actors.simulation.faults import Faults
from personae.actors.simulation.scenario import PLACEMENT_NAMES, Scenario
from personae.actors.simulation.swarm import draw_several
from personae.actors.simulation.trouble import Costs
from personae.actors.simulation.workload import SimulatedWorkload
from personae.actors.simulation.world import InvariantViolated, simulate
from personae.errors import Conflict, RequestError

CALM = Scenario(
    1,
    SimulatedWorkload(requests=120, rate=200.0, adapters=4, prompt=(8, 40), leaves=0.0),
    every=1,
    replicas=3,
)


@pytest.mark.parametrize("seed", range(12))
def test_invariants_hold_in_random_scenarios(seed: int) -> None:
    report = simulate(draw_several(seed, requests=50))
    assert sum(report.outcomes.values()) >= report.requests == 50
    assert report.lulls


@pytest.mark.parametrize("placement", PLACEMENT_NAMES)
def test_a_run_without_faults_serves_every_request_with_any_policy(placement) -> None:
    report = simulate(replace(CALM, placement=placement))
    assert report.outcomes.keys() <= {"stop", "length"}
    assert (report.restarts, report.moved, report.faults) == (0, 0, {})


@pytest.mark.parametrize(
    "kind", ["crash", "kill", "hang", "stop", "silent", "drag", "full", "load", "partition", "scale"]
)
def test_every_kind_of_fault_strikes_and_no_request_is_lost(kind: str) -> None:
    requests = 250 if kind == "load" else 140  # an engine seldom has work when it loads
    load = replace(CALM.workload, requests=requests, rate=20.0)
    report = simulate(replace(CALM, seed=3, workload=load, faults_every=2.0, kinds=(kind,)))
    assert report.faults[kind]
    assert report.outcomes.keys() <= {"stop", "length", "unlucky"}
    assert report.outcomes.get("unlucky", 0) <= 3
    if kind != "scale":  # under this light load engines are idle when they drain
        assert bool(report.moved) == (kind != "drag")


def kill_at(monkeypatch: pytest.MonkeyPatch, *times: float) -> None:
    """Kill the engines, one after the other, so many seconds after all of them serve."""

    async def run(self: Faults) -> None:
        start = anyio.current_time()
        for index, at in enumerate(times):
            await anyio.sleep(start + at - anyio.current_time())
            process = self._processes()[index]
            assert process is not None
            process.kill()

    monkeypatch.setattr(Faults, "run", run)


BUSY = replace(CALM, workload=replace(CALM.workload, requests=100, rate=100.0, answer=(20, 60)), lull=100)


def test_a_wall_clock_that_jumps_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    load = replace(CALM.workload, rate=20.0)
    scenario = replace(CALM, seed=3, workload=load, faults_every=2.0, kinds=("kill", "silent"))
    steady = simulate(scenario)
    assert steady.restarts
    jumps = random.Random(1)
    monkeypatch.setattr(time, "time", lambda: jumps.uniform(0, 4e9))
    assert simulate(scenario) == steady


def test_no_stream_waits_until_a_dead_engine_has_loaded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    kill_at(monkeypatch, 0.2, 0.5)
    report = simulate(replace(BUSY, costs=Costs(start=30.0)))
    assert report.restarts == 2
    assert report.moved
    assert max(report.waits) < 1.0
    assert max(report.paces) < 1.0


def test_clients_learn_when_an_answer_moves_to_another_numerics_class(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kill_at(monkeypatch, 0.2, 0.3, 0.5)
    alike = simulate(BUSY)
    assert alike.moved
    assert (alike.changed, alike.reported) == (0, 0), "moves within a class are not reported"
    each_its_own = simulate(replace(BUSY, classes=3))
    assert 0 < each_its_own.changed <= each_its_own.moved
    assert each_its_own.reported == each_its_own.changed


def test_an_answer_stays_in_its_numerics_class_while_an_engine_of_that_class_serves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kill_at(monkeypatch, 0.3, 0.4, 0.5)
    report = simulate(replace(BUSY, replicas=6, classes=2))
    assert report.moved
    assert report.changed == 0


@pytest.mark.parametrize("faults", [None, 2.0])
def test_the_dispatcher_knows_the_prefixes_of_engines_that_report_them(faults: float | None) -> None:
    load = replace(CALM.workload, requests=300, rate=100.0, prefixed=0.8, tenants=2)
    kinds = ("kill", "crash", "scale", "silent")
    report = simulate(
        replace(CALM, workload=load, kv_events=True, pages=96, lull=50, faults_every=faults, kinds=kinds)
    )
    assert report.lulls >= 6
    assert report.outcomes.keys() <= {"stop", "length", "unlucky"}
    assert report.hits


def test_only_requests_that_kill_engines_are_ended() -> None:
    load = replace(CALM.workload, requests=150, poison=0.03, siblings=0.0)
    report = simulate(replace(CALM, seed=5, workload=load))
    assert report.outcomes.keys() == {"stop", "length", "quarantined"}
    assert report.outcomes["quarantined"] >= 2
    assert report.restarts <= 2 * report.outcomes["quarantined"]


def test_engines_that_are_given_up_end_every_request() -> None:
    load = replace(CALM.workload, requests=80, poison=0.2)
    report = simulate(replace(CALM, workload=load, max_restarts=1))
    assert report.outcomes["engine lost"]
    assert report.outcomes.keys() <= {"engine lost", "stop", "length", "quarantined"}


def test_one_engine_that_is_given_up_leaves_the_others_serving() -> None:
    load = replace(CALM.workload, requests=150, rate=20.0)
    report = simulate(
        replace(CALM, seed=4, workload=load, max_restarts=0, faults_every=3.0, kinds=("kill",), replicas=8)
    )
    assert 0 < report.restarts + report.faults["kill"] < 8 * 2
    assert report.outcomes.keys() <= {"stop", "length"}


def scale_at(monkeypatch: pytest.MonkeyPatch, *changes: tuple[float, int, float]) -> list[list[ReplicaInfo]]:
    """Scale to `count` engines, so many seconds after all of them serve, with so many seconds to drain. The
    returned list gets the engines at that moment and a minute later."""
    seen: list[list[ReplicaInfo]] = []

    async def run(self: Faults) -> None:
        world = self._scale.__self__  # type: ignore[attr-defined]  # the world's method
        start = anyio.current_time()
        for at, count, seconds in changes:
            await anyio.sleep(start + at - anyio.current_time())
            await world._scaler.scale(count, seconds)
            seen.append(world._scaler.list())
        await anyio.sleep(25.0)
        seen.append(world._scaler.list())

    monkeypatch.setattr(Faults, "run", run)
    return seen


def statuses(infos: list[ReplicaInfo]) -> dict[int, str]:
    return {info.id: info.status for info in infos}


def test_an_engine_that_is_removed_ends_its_answers_first(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = scale_at(monkeypatch, (0.3, 1, 60.0))
    report = simulate(BUSY)
    assert sorted(statuses(seen[0]).values()) == ["draining", "draining", "ready"]
    assert list(statuses(seen[-1]).values()) == ["ready"]
    assert report.outcomes.keys() <= {"stop", "length"}
    assert (report.moved, report.restarts) == (0, 0)


def test_answers_that_do_not_end_in_time_continue_at_another_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = scale_at(monkeypatch, (0.3, 2, 0.05), (0.6, 1, 0.0))
    report = simulate(BUSY)
    assert list(statuses(seen[-1]).values()) == ["ready"]
    assert report.moved
    assert report.restarts == 0
    assert report.outcomes.keys() <= {"stop", "length"}
    assert max(report.paces) < 1.0


def test_an_added_engine_takes_its_share_and_has_a_number_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    busy = replace(BUSY.workload, requests=600, rate=400.0)
    sent: set[int] = set()
    send = Dispatcher._send

    def note(self: Dispatcher, group: Group, replica: Replica, **how: bool) -> None:
        sent.add(replica.index)
        send(self, group, replica, **how)

    monkeypatch.setattr(Dispatcher, "_send", note)
    seen = scale_at(monkeypatch, (0.1, 2, 0.0), (0.2, 6, 0.0))
    report = simulate(replace(BUSY, workload=busy, costs=Costs(start=0.1, step=0.02), every=64))
    assert sorted(statuses(seen[1]).values()) == ["ready"] * 2 + ["starting"] * 4
    assert statuses(seen[-1]) == dict.fromkeys(statuses(seen[1]), "ready")
    assert max(statuses(seen[-1])) == 6, "no number is used twice"
    assert sent == set(range(7))
    assert report.outcomes.keys() <= {"stop", "length"}


def test_an_engine_that_cannot_be_added_is_listed_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    infos: list[list[ReplicaInfo]] = []

    async def run(self: Faults) -> None:
        self.load_fails = True
        scaler = self._scale.__self__._scaler  # type: ignore[attr-defined]  # the world's method
        await scaler.scale(4)
        await anyio.sleep(10.0)
        infos.append(scaler.list())
        await scaler.scale(4)
        await anyio.sleep(10.0)
        infos.append(scaler.list())
        for count in (0, 7):
            with pytest.raises(RequestError, match=f"`replicas` is {count}; it must be from 1 to 6"):
                await scaler.scale(count)

    monkeypatch.setattr(Faults, "run", run)
    report = simulate(CALM)
    failed = infos[0][-1]
    assert (failed.id, failed.status, failed.error) == (3, "failed", "planted: no such weights")
    assert statuses(infos[1]) == dict.fromkeys((0, 1, 2, 4), "ready")
    assert report.outcomes.keys() <= {"stop", "length"}


@pytest.mark.parametrize("seed", range(6))
def test_an_engine_that_is_removed_as_soon_as_it_is_added_leaves_no_process(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    async def run(self: Faults) -> None:
        scaler = self._scale.__self__._scaler  # type: ignore[attr-defined]  # the world's method
        for count in (6, 3, 6, 3):
            with suppress(Conflict):  # draining replicas keep their places
                await scaler.scale(count, 0.0)

    monkeypatch.setattr(Faults, "run", run)
    report = simulate(replace(CALM, seed=seed, workload=replace(CALM.workload, requests=20), every=64))
    assert report.outcomes.keys() <= {"stop", "length"}


def test_an_engine_that_was_given_up_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    infos: list[list[ReplicaInfo]] = []

    async def run(self: Faults) -> None:
        scaler = self._scale.__self__._scaler  # type: ignore[attr-defined]  # the world's method
        process = self._processes()[1]
        assert process is not None
        process.kill()
        await anyio.sleep(5.0)
        infos.append(scaler.list())
        await scaler.scale(3)
        await anyio.sleep(5.0)
        infos.append(scaler.list())

    monkeypatch.setattr(Faults, "run", run)
    report = simulate(replace(BUSY, max_restarts=0))
    assert statuses(infos[0]) == {0: "ready", 1: "failed", 2: "ready"}
    assert statuses(infos[1]) == {0: "ready", 2: "ready", 3: "ready"}
    assert report.outcomes.keys() <= {"stop", "length"}


# Planted bugs


def lost_orphan(monkeypatch: pytest.MonkeyPatch) -> None:
    take_back = Dispatcher._take_back

    def lose(self: Dispatcher, replica: Replica, orphaned: Orphaned) -> None:
        free = self._suspects.judge

        def judge(*args):  # type: ignore[no-untyped-def]  # as the original
            going, guilty = free(*args)
            return going[1:], guilty

        self._suspects.judge = judge  # type: ignore[method-assign]  # for one message
        take_back(self, replica, orphaned)
        del self._suspects.judge

    monkeypatch.setattr(Dispatcher, "_take_back", lose)


def sent_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    send = Dispatcher._send

    def twice(self: Dispatcher, group, replica, **how):  # type: ignore[no-untyped-def]  # as the original
        send(self, group, replica, **how)
        for other in self._replicas.values():
            if other is not replica and other.up:
                other.frontend.ingress.tell(Transfer(tuple(group.streams), tuple(group.logs)))

    monkeypatch.setattr(Dispatcher, "_send", twice)


def stale_log(monkeypatch: pytest.MonkeyPatch) -> None:
    accept = ReplicaIngress._accept

    def forget(self: ReplicaIngress, logs):  # type: ignore[no-untyped-def]  # as the original
        accept(self, tuple(replace_tokens(log) for log in logs))

    def replace_tokens(log):  # type: ignore[no-untyped-def]  # as the original
        return structs.replace(log, tokens=log.tokens[: log.prompt_length])

    monkeypatch.setattr(ReplicaIngress, "_accept", forget)


def leaked_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    release = Replica.release

    def leak(self: Replica, placed) -> None:  # type: ignore[no-untyped-def]  # as the original
        release(self, placed)
        self.work += 1

    monkeypatch.setattr(Replica, "release", leak)


@pytest.mark.parametrize(
    ("plant", "found"),
    [
        (lost_orphan, "never ended"),
        (sent_twice, "alone it would be|ends twice|dispatcher|never ended|on after its end|more of it"),
        (stale_log, "alone it would be|goes on"),
        (leaked_promise, "work of engine"),
    ],
)
def test_a_planted_bug_is_caught(
    plant: Callable[[pytest.MonkeyPatch], None], found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    kill_at(monkeypatch, 0.3, 0.4, 0.5)  # whichever engine has streams then
    with pytest.raises(InvariantViolated, match=found):
        simulate(replace(BUSY, longest_wait=30.0))
