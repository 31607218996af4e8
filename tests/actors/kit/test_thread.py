import threading

import anyio
import pytest
from kit_actors import Boom, Deed, Doer, ThreadDoer, crash
from patience import PATIENCE, eventually, soon
from virtual_clock import real_clock

from personae.actors.kit.child import Incident
from personae.actors.kit.mailbox import Ref, Reply
from personae.actors.kit.supervisor import Supervisor
from personae.actors.kit.thread import ThreadActor
from personae.errors import ActorCrashed, ActorStopped, Overloaded, RestartsExhausted, StartFailed

pytestmark = real_clock


def quiet(incident: Incident) -> None:
    """A report hook for planned crashes."""


def which_thread(reply: Reply[threading.Thread]) -> Deed:
    return lambda actor: actor.post(reply, threading.current_thread())


def whoami(reply: Reply[object]) -> Deed:
    return lambda actor: actor.post(reply, actor)


async def run_until_it_gives_up(top: Supervisor) -> None:
    with anyio.fail_after(PATIENCE):
        async with top:
            await anyio.sleep_forever()


def kit_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("top/")]


def hold(gate: threading.Event) -> Deed:
    """An action that keeps the thread busy until the test opens the gate."""
    return lambda actor: gate.wait(PATIENCE)


async def test_every_message_is_handled_on_the_one_thread_of_the_actor() -> None:
    async with Supervisor("top") as top:
        doer = top.spawn_thread("doer", ThreadDoer)
        threads = {await doer.ask(which_thread) for _ in range(20)}
        (thread,) = threads
        assert thread is not threading.main_thread()
        assert thread.name == "top/doer"
    assert not kit_threads()


async def test_the_actor_is_made_started_and_stopped_on_its_thread() -> None:
    where: list[threading.Thread] = []

    class Noting(ThreadActor[Deed]):
        def __init__(self) -> None:
            where.append(threading.current_thread())

        def started(self) -> None:
            where.append(threading.current_thread())

        def receive(self, message: Deed) -> None:
            where.append(threading.current_thread())

        def stopped(self) -> None:
            where.append(threading.current_thread())

    async with Supervisor("top") as top:
        top.spawn_thread("doer", Noting)
    assert len(where) == 3
    assert len(set(where)) == 1
    assert where[0] is not threading.current_thread()


async def test_messages_and_posts_keep_their_order() -> None:
    seen: list[int] = []
    done = anyio.Event()

    def note(number: int) -> Deed:
        return lambda actor: seen.append(number)

    async def main(inbox: Ref[Deed], doer: Ref[Deed]) -> None:
        for number in range(200):
            await doer.send(lambda actor, number=number: actor.post(inbox, note(number)))
        await doer.send(lambda actor: actor.post(inbox, lambda actor: done.set()))
        await done.wait()

    async with Supervisor("top") as top:
        await main(top.spawn("inbox", Doer, capacity=1000), top.spawn_thread("doer", ThreadDoer))
    assert seen == list(range(200))


async def test_a_tell_to_a_full_thread_mailbox_raises_overloaded_and_a_send_waits() -> None:
    gate = threading.Event()
    async with Supervisor("top") as top, anyio.create_task_group() as tasks:
        doer = top.spawn_thread("doer", ThreadDoer, capacity=1)
        busy = threading.Event()
        doer.tell(lambda actor: (busy.set(), gate.wait(PATIENCE)))
        await soon(busy.is_set, "it is busy")
        doer.tell(lambda actor: None)
        with pytest.raises(Overloaded):
            doer.tell(lambda actor: None)
        sent: list[int] = []

        async def send(number: int) -> None:
            await doer.send(lambda actor: sent.append(number))

        for number in range(5):
            tasks.start_soon(send, number)
            await anyio.wait_all_tasks_blocked()
        assert sent == []
        gate.set()
        await soon(lambda: len(sent) == 5, "all are sent")
        assert sent == [0, 1, 2, 3, 4]


async def test_an_actor_sees_and_takes_the_message_that_waits_behind_the_one_in_hand() -> None:
    seen: list[object] = []
    gate = threading.Event()

    class Lookahead(ThreadActor[str]):
        def receive(self, message: str) -> None:
            gate.wait(PATIENCE)
            seen.append((message, self.pending, self.try_next(), self.pending, self.try_next()))

    async with Supervisor("top") as top:
        looker = top.spawn_thread("looker", Lookahead)
        looker.tell("one")
        looker.tell("two")
        gate.set()
        await soon(lambda: len(seen) == 1, "the first is seen")
        looker.tell("three")
        await soon(lambda: len(seen) == 2, "the second is seen")
    assert seen == [("one", True, "two", False, None), ("three", False, None, False, None)]


async def test_a_crash_fails_the_asker_and_restarts_the_actor_on_a_new_thread_with_its_mailbox() -> None:
    incidents: list[Incident] = []
    gate = threading.Event()
    async with Supervisor("top", report=incidents.append) as top:
        doer = top.spawn_thread("doer", ThreadDoer, capacity=3)
        before = await doer.ask(which_thread)
        doer.tell(hold(gate))
        doer.tell(crash)
        gate.set()
        after = await doer.ask(which_thread)
        assert after is not before
        with pytest.raises(ActorCrashed) as caught:
            await doer.ask(lambda reply: crash)
        assert isinstance(caught.value.__cause__, Boom)
        await doer.ask(which_thread)
        assert not before.is_alive()
        assert len(kit_threads()) == 1
    assert [(i.path, i.what, i.restarts) for i in incidents] == [
        ("top/doer", "crashed", 0),
        ("top/doer", "crashed", 1),
    ]


async def test_a_thread_that_is_ended_by_system_exit_is_a_crash_like_any_other() -> None:
    incidents: list[Incident] = []

    def leave(actor: object) -> None:
        raise SystemExit(3)

    async with Supervisor("top", report=incidents.append) as top:
        doer = top.spawn_thread("doer", ThreadDoer)
        doer.tell(leave)
        await doer.ask(whoami)
    (incident,) = incidents
    assert isinstance(incident.error, RuntimeError)
    assert isinstance(incident.error.__cause__, SystemExit)


async def test_a_crash_in_started_on_the_thread_fails_the_start() -> None:
    class Broken(ThreadDoer):
        def started(self) -> None:
            raise Boom

    top = Supervisor("top", report=quiet)
    top.spawn_thread("broken", Broken)
    with pytest.raises(StartFailed) as caught:
        await run_until_it_gives_up(top)
    assert isinstance(caught.value.__cause__, Boom)
    assert not kit_threads()


async def test_a_crash_in_stopped_on_the_thread_is_reported() -> None:
    class Failing(ThreadDoer):
        def stopped(self) -> None:
            raise Boom

    incidents: list[Incident] = []
    async with Supervisor("top", report=incidents.append) as top:
        await top.spawn_thread("doer", Failing).ask(whoami)
    assert [(i.what, type(i.error)) for i in incidents] == [("stopped() raised", Boom)]


async def test_too_many_crashes_on_a_thread_escalate() -> None:
    top = Supervisor("top", max_restarts=1, within=60, report=quiet)
    doer = top.spawn_thread("doer", ThreadDoer)
    doer.tell(crash)
    doer.tell(crash)
    with pytest.raises(RestartsExhausted) as caught:
        await run_until_it_gives_up(top)
    assert isinstance(caught.value.__cause__, Boom)
    assert not kit_threads()


async def test_a_thread_asleep_on_an_empty_mailbox_wakes_to_stop() -> None:
    diary: list[str] = []
    incidents: list[Incident] = []
    async with Supervisor("top", report=incidents.append) as top:
        doer = top.spawn_thread("doer", lambda: ThreadDoer(diary), stop_timeout=PATIENCE)
        await doer.ask(whoami)
    assert incidents == [], "it would be given up"
    assert diary == ["+", "-"]
    assert not kit_threads()


async def test_a_stop_lets_the_message_in_hand_finish_and_leaves_the_others() -> None:
    done: list[str] = []
    incidents: list[Incident] = []
    gate, busy = threading.Event(), threading.Event()

    def deed(actor: ThreadDoer) -> None:
        busy.set()
        gate.wait(PATIENCE)
        eventually(lambda: not actor.pending, "it is to stop")
        done.append("finished")

    async with Supervisor("top", report=incidents.append) as top:
        doer = top.spawn_thread("doer", ThreadDoer)
        doer.tell(deed)
        await soon(busy.is_set, "it is busy")
        doer.tell(crash)
        gate.set()
    assert done == ["finished"]
    assert [i.what for i in incidents] == ["dropped 1 messages"]


async def test_a_thread_that_does_not_stop_in_time_is_reported_and_can_no_longer_post() -> None:
    gate, busy, ended = threading.Event(), threading.Event(), threading.Event()
    incidents: list[Incident] = []
    posted: list[str] = []
    refused: list[BaseException] = []

    def stuck(inbox: Ref[Deed]) -> Deed:
        def deed(actor: ThreadDoer) -> None:
            busy.set()
            gate.wait(PATIENCE)
            try:
                actor.post(inbox, lambda actor: posted.append("too late"))
            except ActorStopped as error:
                refused.append(error)
            ended.set()

        return deed

    async with Supervisor("top", report=incidents.append) as top:
        inbox = top.spawn("inbox", Doer)
        doer = top.spawn_thread("doer", ThreadDoer, stop_timeout=0.02, restart="transient")
        doer.tell(stuck(inbox))
        await soon(busy.is_set, "it is busy")
        await top.remove(doer)
        gate.set()
        await soon(ended.is_set, "the deed ends")
        await anyio.wait_all_tasks_blocked()
    assert [i.what for i in incidents] == [
        "did not stop within 0.02 s",
        "left its thread behind: it does not stop",
    ]
    assert len(refused) == 1
    assert posted == []
    await soon(lambda: not kit_threads(), "the thread ends")


async def test_a_post_that_finds_a_full_mailbox_crashes_the_poster() -> None:
    incidents: list[Incident] = []
    async with Supervisor("top", report=incidents.append) as top:
        inbox = top.spawn("inbox", Doer, capacity=1)
        doer = top.spawn_thread("doer", ThreadDoer)
        resume = anyio.Event()
        inbox.tell(lambda actor: resume.wait())
        await anyio.wait_all_tasks_blocked()
        inbox.tell(lambda actor: None)
        first = await doer.ask(whoami)
        doer.tell(lambda actor: actor.post(inbox, lambda actor: None))
        await soon(lambda: len(incidents) == 1, "it crashes")
        assert await doer.ask(whoami) is not first
        resume.set()
    assert incidents[0].path == "top/doer"
    assert isinstance(incidents[0].error, Overloaded)


async def test_a_post_to_a_stopped_actor_is_reported_and_does_no_harm() -> None:
    incidents: list[Incident] = []
    async with Supervisor("top", report=incidents.append) as top:
        gone = top.spawn("gone", Doer)
        doer = top.spawn_thread("doer", ThreadDoer)
        first = await doer.ask(whoami)
        await top.remove(gone)
        doer.tell(lambda actor: actor.post(gone, lambda actor: None))
        assert await doer.ask(whoami) is first
    assert [(i.path, i.what) for i in incidents] == [
        ("top/doer", "posted to a stopped actor (top/gone has stopped)")
    ]


async def test_a_thread_may_answer_with_an_error() -> None:
    async with Supervisor("top") as top:
        doer = top.spawn_thread("doer", ThreadDoer)
        with pytest.raises(Boom):
            await doer.ask(lambda reply: lambda actor: actor.fail(reply, Boom()))


async def test_a_thread_actor_may_stop_itself_and_post_to_itself() -> None:
    async with Supervisor("top") as top:
        doer = top.spawn_thread("doer", ThreadDoer, capacity=3)
        first = await doer.ask(whoami)
        done = threading.Event()
        doer.tell(lambda actor: actor.post(actor.ref, lambda actor: done.set()))
        await soon(done.is_set, "it has its own message")
        doer.tell(lambda actor: actor.stop())
        assert await doer.ask(whoami) is not first


async def test_a_loop_actor_works_by_the_wall_clock_too() -> None:
    async with Supervisor("top", report=quiet) as top:
        doer = top.spawn("doer", Doer)
        doer.tell(crash)
        answer: list[int] = []
        doer.tell(lambda actor: answer.append(1))
        assert await doer.ask(lambda reply: lambda actor: reply.tell(len(answer))) == 1


async def test_a_storm_of_messages_loses_none_and_counts_right() -> None:
    handled: list[int] = []
    async with Supervisor("top") as top, anyio.create_task_group() as tasks:
        doer = top.spawn_thread("doer", ThreadDoer, capacity=2)

        async def pour(start: int) -> None:
            for number in range(start, start + 100):
                await doer.send(lambda actor, number=number: handled.append(number))

        for start in range(0, 1000, 100):
            tasks.start_soon(pour, start)
        await soon(lambda: len(handled) == 1000, "all are handled")
    assert sorted(handled) == list(range(1000))
