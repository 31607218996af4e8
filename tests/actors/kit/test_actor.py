import anyio
import msgspec
import pytest
from kit_actors import Boom, Deed, Doer, crash, hang, note, whoami
from virtual_clock import virtual_clock

from personae.actors.kit.actor import Actor
from personae.actors.kit.child import Incident
from personae.actors.kit.mailbox import Ref, Reply
from personae.actors.kit.supervisor import Supervisor
from personae.actors.kit.thread import ThreadActor
from personae.errors import ActorCrashed, ActorStopped, DeadlineExceeded, Overloaded

pytestmark = virtual_clock


class Greet(msgspec.Struct, frozen=True, tag=True):
    name: str
    reply_to: Reply[str]


class Greeter(Actor[Greet]):
    async def receive(self, message: Greet) -> None:
        message.reply_to.tell(f"hello {message.name}")


async def test_an_actor_answers_an_ask() -> None:
    async with Supervisor("top") as top:
        greeter = top.spawn("greeter", Greeter)
        assert await greeter.ask(lambda reply: Greet("world", reply)) == "hello world"


async def test_messages_are_handled_in_the_order_they_were_sent() -> None:
    seen: list[object] = []
    async with Supervisor("top") as top:
        doer = top.spawn("doer", Doer)
        for number in range(50):
            doer.tell(note(seen, number))
        await doer.ask(whoami)
    assert seen == list(range(50))


async def test_one_message_is_handled_at_a_time() -> None:
    seen: list[object] = []

    async def slow(actor: Doer) -> None:
        seen.append("in")
        await anyio.sleep(10)
        seen.append("out")

    async with Supervisor("top") as top:
        doer = top.spawn("doer", Doer)
        doer.tell(slow)
        doer.tell(slow)
        await doer.ask(whoami)
    assert seen == ["in", "out", "in", "out"]


async def test_messages_sent_before_the_start_wait_for_it() -> None:
    seen: list[object] = []
    top = Supervisor("top")
    doer = top.spawn("doer", Doer)
    doer.tell(note(seen, 1))
    async with top:
        await doer.ask(whoami)
    assert seen == [1]


async def test_a_tell_to_a_full_mailbox_raises_overloaded() -> None:
    async with Supervisor("top") as top:
        doer = top.spawn("doer", Doer, capacity=2, stop_timeout=1)
        doer.tell(hang)
        await anyio.sleep(1)  # in hand: it does not count any more
        doer.tell(crash)
        doer.tell(crash)
        with pytest.raises(Overloaded, match="top/doer"):
            doer.tell(crash)


async def test_a_mailbox_of_no_capacity_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        Supervisor("top").spawn("doer", Doer, capacity=0)


async def test_a_send_waits_for_room_and_keeps_its_place() -> None:
    seen: list[object] = []
    async with Supervisor("top") as top, anyio.create_task_group() as tasks:
        doer = top.spawn("doer", Doer, capacity=1)
        doer.tell(lambda actor: anyio.sleep(10))
        await anyio.sleep(1)
        doer.tell(note(seen, 0))
        for number in (1, 2, 3):
            tasks.start_soon(doer.send, note(seen, number))
            await anyio.sleep(0.1)
        with pytest.raises(Overloaded):
            doer.tell(note(seen, "overtaking"))
    assert seen == [0, 1, 2, 3]


async def test_a_send_that_gives_up_leaves_nothing_in_the_mailbox() -> None:
    seen: list[object] = []
    async with Supervisor("top") as top:
        doer = top.spawn("doer", Doer, capacity=1)
        doer.tell(lambda actor: anyio.sleep(10))
        await anyio.sleep(1)
        doer.tell(note(seen, "first"))
        with anyio.move_on_after(1):
            await doer.send(note(seen, "given up"))
        await anyio.sleep(20)
        doer.tell(note(seen, "later"))
        await anyio.sleep(1)
    assert seen == ["first", "later"]


async def test_a_send_fails_when_the_actor_stops_before_there_was_room() -> None:
    failed: list[object] = []

    async def send(doer: Ref[Deed]) -> None:
        try:
            await doer.send(crash)
        except ActorStopped as error:
            failed.append(error)

    async with anyio.create_task_group() as tasks, Supervisor("top") as top:
        doer = top.spawn("doer", Doer, capacity=1, stop_timeout=1)
        doer.tell(hang)
        await anyio.sleep(1)
        doer.tell(crash)
        tasks.start_soon(send, doer)
        await anyio.sleep(1)
    assert len(failed) == 1


async def test_an_ask_past_its_deadline_fails_and_the_actor_is_not_disturbed() -> None:
    async with Supervisor("top") as top:
        doer = top.spawn("doer", Doer)
        before = await doer.ask(whoami)
        finished: list[object] = []

        async def slow(actor: Doer) -> None:
            await anyio.sleep(100)
            finished.append(actor)

        started = anyio.current_time()
        with pytest.raises(DeadlineExceeded):
            await doer.ask(lambda reply: slow, deadline=started + 5)
        assert anyio.current_time() - started == pytest.approx(5)
        assert await doer.ask(whoami) is before
        assert finished == [before]


async def test_an_ask_whose_deadline_has_passed_sends_the_actor_nothing() -> None:
    seen: list[object] = []
    async with Supervisor("top") as top:
        doer = top.spawn("doer", Doer)
        with pytest.raises(DeadlineExceeded):
            await doer.ask(lambda reply: note(seen, 1), deadline=anyio.current_time())
        await doer.ask(whoami)
    assert seen == []


async def test_an_ask_that_is_cancelled_leaves_the_actor_undisturbed() -> None:
    finished: list[object] = []

    async def slow(actor: Doer) -> None:
        await anyio.sleep(10)
        finished.append(actor)

    async with Supervisor("top") as top:
        doer = top.spawn("doer", Doer)
        with anyio.move_on_after(1):
            await doer.ask(lambda reply: slow)
        assert await doer.ask(whoami) in finished


async def test_a_late_answer_is_dropped() -> None:
    async with Supervisor("top") as top:
        doer = top.spawn("doer", Doer)
        waiting: list[bool] = []

        def late(reply: Reply[int]) -> Deed:
            async def deed(actor: Doer) -> None:
                await anyio.sleep(10)
                waiting.append(reply.waiting)
                reply.tell(1)

            return deed

        with pytest.raises(DeadlineExceeded):
            await doer.ask(late, deadline=anyio.current_time() + 1)
        await doer.ask(whoami)
        assert waiting == [False]


async def test_only_the_first_answer_counts() -> None:
    def twice(reply: Reply[int]) -> Deed:
        return lambda actor: (reply.tell(1), reply.tell(2), reply.fail(Boom()))

    async with Supervisor("top") as top:
        assert await top.spawn("doer", Doer).ask(twice) == 1


async def test_an_answer_may_be_an_error_and_the_actor_continues() -> None:
    async with Supervisor("top") as top:
        doer = top.spawn("doer", Doer)
        before = await doer.ask(whoami)
        with pytest.raises(Boom):
            await doer.ask(lambda reply: lambda actor: reply.fail(Boom()))
        assert await doer.ask(whoami) is before


async def test_an_ask_fails_with_the_cause_when_its_message_crashes_the_actor() -> None:
    incidents: list[Incident] = []
    async with Supervisor("top", report=incidents.append) as top:
        doer = top.spawn("doer", Doer)
        with pytest.raises(ActorCrashed) as caught:
            await doer.ask(lambda reply: crash)
        assert isinstance(caught.value.__cause__, Boom)
        await doer.ask(whoami)
    assert [(i.path, i.what, type(i.error), i.restarts) for i in incidents] == [
        ("top/doer", "crashed", Boom, 0)
    ]


async def test_an_ask_fails_when_the_actor_crashes_with_the_answer_still_owed() -> None:
    kept: list[Reply[None]] = []
    async with Supervisor("top", report=lambda incident: None) as top, anyio.create_task_group() as tasks:
        doer = top.spawn("doer", Doer)

        async def ask() -> None:
            with pytest.raises(ActorCrashed):
                await doer.ask(lambda reply: lambda actor: kept.append(reply))

        tasks.start_soon(ask)
        await anyio.sleep(1)
        assert kept[0].waiting
        doer.tell(crash)
        await anyio.sleep(1)
        assert not kept[0].waiting


async def test_the_mailbox_is_kept_over_a_restart_and_the_fatal_message_is_not_redelivered() -> None:
    seen: list[object] = []
    async with Supervisor("top", report=lambda incident: None) as top:
        doer = top.spawn("doer", Doer)
        doer.tell(note(seen, 1))
        doer.tell(crash)
        doer.tell(note(seen, 2))
        second = await doer.ask(whoami)
        assert seen == [1, 2]
        assert await doer.ask(whoami) is second


async def test_an_ask_that_waits_in_the_mailbox_is_answered_after_the_restart() -> None:
    async with Supervisor("top", report=lambda incident: None) as top:
        doer = top.spawn("doer", Doer)
        first = await doer.ask(whoami)
        doer.tell(crash)
        assert await doer.ask(whoami) is not first


async def test_drain_takes_all_that_waits_so_that_an_actor_can_act_once() -> None:
    class Adder(Actor[int]):
        def __init__(self, sums: list[int]) -> None:
            self.sums = sums

        async def receive(self, message: int) -> None:
            self.sums.append(sum((message, *self.drain())))

    sums: list[int] = []
    async with Supervisor("top") as top:
        adder = top.spawn("adder", lambda: Adder(sums))
        await anyio.sleep(1)
        for number in (1, 2, 3, 4):
            adder.tell(number)
        await anyio.sleep(1)
        adder.tell(5)
        await anyio.sleep(1)
    assert sums == [10, 5]


async def test_drained_asks_fail_when_the_actor_crashes() -> None:
    failed: list[BaseException] = []
    async with Supervisor("top", report=lambda incident: None) as top, anyio.create_task_group() as tasks:
        doer = top.spawn("doer", Doer)

        async def ask() -> None:
            try:
                await doer.ask(whoami)
            except ActorCrashed as error:
                failed.append(error)

        async def drain_and_crash(actor: Doer) -> None:
            await anyio.sleep(1)
            assert len(actor.drain()) == 2
            raise Boom

        doer.tell(drain_and_crash)
        tasks.start_soon(ask)
        tasks.start_soon(ask)
    assert len(failed) == 2


async def test_a_background_task_runs_while_messages_are_handled() -> None:
    ticks: list[float] = []

    async def tick() -> None:
        while True:
            ticks.append(anyio.current_time())
            await anyio.sleep(1)

    async with Supervisor("top") as top:
        doer = top.spawn("doer", Doer)
        doer.tell(lambda actor: actor.start_soon(tick))
        await doer.ask(whoami)
        await anyio.sleep(10)
        assert len(ticks) >= 10
    after = len(ticks)
    await anyio.sleep(10)
    assert len(ticks) == after


async def test_a_background_task_that_raises_crashes_the_actor() -> None:
    async def fail() -> None:
        await anyio.sleep(1)
        raise Boom

    incidents: list[Incident] = []
    async with Supervisor("top", report=incidents.append) as top:
        doer = top.spawn("doer", Doer)
        first = await doer.ask(whoami)
        doer.tell(lambda actor: actor.start_soon(fail))
        await anyio.sleep(2)
        assert await doer.ask(whoami) is not first
    assert [type(i.error) for i in incidents] == [Boom]


async def test_a_busy_actor_lets_others_run() -> None:
    async with Supervisor("top") as top:
        greedy = top.spawn("greedy", Doer)

        def again(actor: Doer) -> None:
            actor.ref.tell(again)

        greedy.tell(again)
        for _ in range(100):  # would never run
            await anyio.lowlevel.checkpoint()


async def test_a_cancelled_future_that_an_actor_awaits_is_a_crash_and_not_silence(
    anyio_backend_name: str,
) -> None:
    if anyio_backend_name != "asyncio":
        pytest.skip("only asyncio lets anybody cancel a future")
    import asyncio

    async def await_cancelled(actor: Doer) -> None:
        future = asyncio.get_running_loop().create_future()
        future.cancel()
        await future

    def aside(actor: Doer) -> None:
        actor.start_soon(await_cancelled, actor)

    incidents: list[Incident] = []
    async with Supervisor("top", report=incidents.append) as top:
        doer = top.spawn("doer", Doer)
        for deed in (await_cancelled, aside):
            doer.tell(deed)
            await anyio.sleep(1)
        await doer.ask(whoami)
    assert [type(i.error) for i in incidents] == [RuntimeError, RuntimeError]


async def test_a_tell_from_another_thread_is_refused() -> None:
    async with Supervisor("top") as top:
        doer = top.spawn("doer", Doer)
        with pytest.raises(RuntimeError, match="another thread"):
            await anyio.to_thread.run_sync(doer.tell, crash)


@pytest.mark.parametrize("kind", [Actor, ThreadActor])
async def test_an_actor_without_receive_is_not_made(kind: type) -> None:
    mute = type("Mute", (kind,), {})
    with pytest.raises(TypeError, match=r"Mute .*receive"):
        mute()
