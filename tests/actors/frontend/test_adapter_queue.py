"""An adapter's queue: how much it offers at a time, and how it releases its adapter."""

import random

import pytest
from fake_executor import make_log
from frontend_fixture import FrontendFixture

from personae.actors.frontend.adapter_queue import Lane
from personae.actors.messages import ReleaseRequest, Unpin, Withdraw

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("anyio_backend", ["asyncio"])]


async def test_sequences_that_run_again_after_a_restart_leave_room_in_the_window() -> None:
    fixture = FrontendFixture(0, window=2)
    for number in range(2):
        fixture.submit(f"{number}", None)
    while await fixture.deliver():
        pass
    fixture.core.step(random.Random(1))  # both have begun
    fixture.core.step(random.Random(2))
    fixture.core.start()
    for number in range(2, 4):
        fixture.submit(f"{number}", None)
    for _ in range(3):
        while await fixture.deliver():
            pass
        fixture.core.step(random.Random(3))
    while await fixture.deliver():
        pass
    assert set(fixture.core.running) == {"0", "1", "2", "3"}


async def test_a_tenant_that_floods_leaves_the_window_of_another_alone() -> None:
    fixture = FrontendFixture(0, window=2)
    for number in range(9):
        fixture.submit(f"flood-{number}", None, "ann")
    fixture.submit("one", None, "bob")
    while await fixture.deliver():
        pass
    assert set(fixture.core.running) == {"flood-0", "flood-1", "one"}


async def test_background_sequences_have_a_smaller_window_of_their_own() -> None:
    fixture = FrontendFixture(0, window=16)
    for number in range(9):
        fixture.submit(f"batch-{number}", None, background=True)
    fixture.submit("chat", None)
    while await fixture.deliver():
        pass
    assert set(fixture.core.running) == {"batch-0", "batch-1", "chat"}
    fixture.core.start()
    await fixture.settle()
    fixture.assert_empty()


async def test_a_queue_that_is_asked_to_release_finishes_what_runs_and_then_unpins_its_adapter() -> None:
    fixture = FrontendFixture(0)
    for number in range(3):
        fixture.submit(f"{number}", "poet")
    while await fixture.deliver():
        pass
    assert set(fixture.core.running) == {"0", "1"}
    fixture.envelopes["poet"].tell(ReleaseRequest("poet", fixture.core.epoch))
    while fixture.core.running:
        assert set(fixture.core.running) <= {"0", "1"}, "nothing new is offered while it yields"
        assert "poet" in fixture.core.pinned
        fixture.core.step(fixture.rng)
        while (
            not (fixture.core.envelopes and isinstance(fixture.core.envelopes[0], Unpin))
            and await fixture.deliver()
        ):
            pass
    await fixture.settle()
    fixture.assert_empty()
    assert fixture.heard("2") == (list(range(3, 9)), ["length"])


async def test_a_queue_that_must_release_now_preempts_long_answers_which_continue_later() -> None:
    fixture = FrontendFixture(0)
    for number in range(3):
        fixture.submit(f"{number}", "poet")
    while await fixture.deliver():
        pass
    fixture.core.step(random.Random(4))  # both of them
    begun = {id: length for id, (_, length) in fixture.core.running.items()}
    assert set(begun) == {"0", "1"}
    fixture.envelopes["poet"].tell(ReleaseRequest("poet", fixture.core.epoch, now=True))
    while "poet" in fixture.core.pinned:
        assert await fixture.deliver(), "it does not wait for their end"
    assert not fixture.core.running
    while await fixture.deliver():
        pass
    assert {id: length for id, (_, length) in fixture.core.running.items()} == begun, "before those that wait"
    await fixture.settle()
    fixture.assert_empty()
    for number in range(3):
        assert fixture.heard(f"{number}") == (list(range(3, 9)), ["length"])


async def test_a_sequence_that_is_withdrawn_while_it_is_preempted_ends() -> None:
    fixture = FrontendFixture(0)
    fixture.submit("0", "poet")
    while await fixture.deliver():
        pass
    fixture.envelopes["poet"].tell(ReleaseRequest("poet", fixture.core.epoch, now=True))
    fixture.envelopes["ingress"].tell(Withdraw(("0",)))
    await fixture.settle()
    fixture.assert_empty()


async def test_a_lane_returns_sequences_by_priority_and_forgets_those_that_left() -> None:
    lane = Lane()
    for i, priority in enumerate([0, 2, -1, 0]):
        lane.add(make_log(f"{i}", [1], priority=priority))
    lane.waiting.pop("0")
    assert [log.id for log in lane.take(2)] == ["2", "3"]
    assert [log.id for log in lane.take(5)] == ["1"]
    assert lane.take(1) == []
