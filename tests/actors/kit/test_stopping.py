"""How an actor ends (stopped, crashed or cancelled), and what happens to calls that wait for it."""

import gc
import weakref

import anyio
import pytest
from kit_actors import Boom, Doer, Unwell, crash, hang, note, whoami
from virtual_clock import virtual_clock

from personae.actors.kit.child import Incident
from personae.actors.kit.supervisor import Supervisor
from personae.errors import ActorStopped

pytestmark = virtual_clock


async def test_tell_ask_and_send_to_a_stopped_actor_raise_actor_stopped() -> None:
    async with Supervisor("top") as top:
        doer = top.spawn("doer", Doer)
    with pytest.raises(ActorStopped):
        doer.tell(crash)
    with pytest.raises(ActorStopped):
        await doer.send(crash)
    with pytest.raises(ActorStopped):
        await doer.ask(whoami)


async def test_an_ask_in_the_mailbox_of_an_actor_that_stops_for_good_fails() -> None:
    async with Supervisor("top", report=lambda incident: None) as top, anyio.create_task_group() as tasks:
        doer = top.spawn("doer", Doer, restart="transient")
        doer.tell(lambda actor: anyio.sleep(10))
        doer.tell(lambda actor: actor.stop())

        async def ask() -> None:
            with pytest.raises(ActorStopped):
                await doer.ask(whoami)

        tasks.start_soon(ask)


async def test_a_stop_does_not_wait_behind_a_full_mailbox() -> None:
    seen: list[object] = []
    incidents: list[Incident] = []
    async with Supervisor("top", report=incidents.append) as top:
        doer = top.spawn("doer", Doer, capacity=100)
        doer.tell(lambda actor: anyio.sleep(1))
        for number in range(99):
            doer.tell(note(seen, number))
        await anyio.sleep(0.5)
    assert seen == []
    assert [(i.path, i.what) for i in incidents] == [("top/doer", "dropped 99 messages")]


async def test_a_stop_lets_the_message_in_hand_finish() -> None:
    finished: list[object] = []

    async def slow(actor: Doer) -> None:
        await anyio.sleep(3)
        finished.append(actor)

    async with Supervisor("top") as top:
        top.spawn("doer", Doer, stop_timeout=5).tell(slow)
        await anyio.sleep(1)
    assert len(finished) == 1


async def test_an_actor_that_does_not_stop_in_time_is_cancelled_and_reported() -> None:
    incidents: list[Incident] = []
    diary: list[str] = []
    async with Supervisor("top", report=incidents.append) as top:
        top.spawn("doer", lambda: Doer("a", diary), stop_timeout=5).tell(hang)
        await anyio.sleep(1)
        ending = anyio.current_time()
    assert anyio.current_time() - ending == pytest.approx(5)
    assert diary == ["+a", "-a"]
    assert [i.what for i in incidents] == ["did not stop within 5 s"]


async def test_a_stopped_hook_that_hangs_is_cut_off_and_reported() -> None:
    class Clinging(Doer):
        async def stopped(self) -> None:
            await anyio.sleep_forever()

    incidents: list[Incident] = []
    async with Supervisor("top", report=incidents.append) as top:
        top.spawn("doer", Clinging, stop_timeout=5)
        ending = anyio.current_time()
    assert anyio.current_time() - ending < 11
    assert "stopped() took over 5 s" in [i.what for i in incidents]


async def test_a_crash_in_stopped_is_reported_and_does_not_hide_the_crash_before_it() -> None:
    class Failing(Doer):
        async def stopped(self) -> None:
            raise KeyError("in stopped")

    incidents: list[Incident] = []
    async with Supervisor("top", report=incidents.append) as top:
        top.spawn("doer", Failing).tell(crash)
        await anyio.sleep(1)
        assert [(i.what, type(i.error)) for i in incidents] == [
            ("stopped() raised", KeyError),
            ("crashed", Boom),
        ]


async def test_stopped_runs_after_a_crash_and_not_after_a_failed_start() -> None:
    diary: list[str] = []
    tries: list[int] = []
    async with Supervisor("top", report=lambda incident: None) as top:
        doer = top.spawn("doer", lambda: Unwell(tries, {2}, "a", diary))
        doer.tell(crash)
        await doer.ask(whoami)
        assert diary == ["+a", "-a", "+a"]
        assert tries == [1, 2, 3]


async def test_no_actor_outlives_its_tree_in_memory() -> None:
    made: list[weakref.ref[Doer]] = []

    def factory() -> Doer:
        doer = Doer()
        made.append(weakref.ref(doer))
        return doer

    async with Supervisor("top", report=lambda incident: None) as top:
        ref = top.spawn("doer", factory)
        ref.tell(crash)
        ref.tell(lambda actor: None)
        await anyio.sleep(1)
    gc.collect()
    assert [doer() for doer in made] == [None, None]
