"""An adapter's queue: what it lets through at a time, and how it lets go of its adapter."""

import random

import pytest
from fake_executor import make_log
from front_house import House

from personae.actors.adapter_queue import Lane
from personae.actors.messages import Unpin, Withdraw, Yield

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("anyio_backend", ["asyncio"])]


async def test_what_runs_again_after_a_restart_leaves_room_for_others_in_the_window() -> None:
    house = House(0, window=2)
    for number in range(2):
        house.submit(f"{number}", None)
    while await house.deliver():
        pass
    house.back.step(random.Random(1))  # both have begun
    house.back.step(random.Random(2))
    house.back.start()
    for number in range(2, 4):
        house.submit(f"{number}", None)
    for _ in range(3):
        while await house.deliver():
            pass
        house.back.step(random.Random(3))
    while await house.deliver():
        pass
    assert set(house.back.running) == {"0", "1", "2", "3"}


async def test_a_tenant_that_floods_leaves_the_window_of_another_alone() -> None:
    house = House(0, window=2)
    for number in range(9):
        house.submit(f"flood-{number}", None, "ann")
    house.submit("one", None, "bob")
    while await house.deliver():
        pass
    assert set(house.back.running) == {"flood-0", "flood-1", "one"}


async def test_what_a_tenant_lets_wait_leaves_its_window_alone_and_has_a_smaller_one() -> None:
    house = House(0, window=16)
    for number in range(9):
        house.submit(f"batch-{number}", None, background=True)
    house.submit("chat", None)
    while await house.deliver():
        pass
    assert set(house.back.running) == {"batch-0", "batch-1", "chat"}
    house.back.start()
    await house.settle()
    house.assert_empty()


async def test_a_queue_that_is_told_to_yield_finishes_what_runs_and_lets_go_of_its_adapter_between() -> None:
    house = House(0)
    for number in range(3):
        house.submit(f"{number}", "poet")
    while await house.deliver():
        pass
    assert set(house.back.running) == {"0", "1"}
    house.letters["poet"].tell(Yield("poet", house.back.life))
    while house.back.running:
        assert set(house.back.running) <= {"0", "1"}, "nothing new is offered while it yields"
        assert "poet" in house.back.pinned
        house.back.step(house.rng)
        while not (house.back.letters and isinstance(house.back.letters[0], Unpin)) and await house.deliver():
            pass
    await house.settle()
    house.assert_empty()
    assert house.heard("2") == (list(range(3, 9)), ["length"])


async def test_a_queue_that_must_yield_now_lets_go_of_long_answers_which_go_on_where_they_were() -> None:
    house = House(0)
    for number in range(3):
        house.submit(f"{number}", "poet")
    while await house.deliver():
        pass
    house.back.step(random.Random(4))  # both of them
    begun = {id: length for id, (_, length) in house.back.running.items()}
    assert set(begun) == {"0", "1"}
    house.letters["poet"].tell(Yield("poet", house.back.life, now=True))
    while "poet" in house.back.pinned:
        assert await house.deliver(), "it does not wait for their end"
    assert not house.back.running
    while await house.deliver():
        pass
    assert {id: length for id, (_, length) in house.back.running.items()} == begun, "before those that wait"
    await house.settle()
    house.assert_empty()
    for number in range(3):
        assert house.heard(f"{number}") == (list(range(3, 9)), ["length"])


async def test_what_is_withdrawn_while_it_is_taken_back_ends() -> None:
    house = House(0)
    house.submit("0", "poet")
    while await house.deliver():
        pass
    house.letters["poet"].tell(Yield("poet", house.back.life, now=True))
    house.letters["ingress"].tell(Withdraw(("0",)))
    await house.settle()
    house.assert_empty()


async def test_a_lane_hands_out_by_priority_and_forgets_who_has_gone() -> None:
    lane = Lane()
    for i, priority in enumerate([0, 2, -1, 0]):
        lane.add(make_log(f"{i}", [1], priority=priority))
    lane.waiting.pop("0")
    assert [log.id for log in lane.take(2)] == ["2", "3"]
    assert [log.id for log in lane.take(5)] == ["1"]
    assert lane.take(1) == []
