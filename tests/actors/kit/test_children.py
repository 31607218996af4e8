"""Children that are added while a tree runs, and children that are removed."""

import anyio
import pytest
from kit_actors import Deed, Doer, crash, family, hang, quiet, whoami
from virtual_clock import virtual_clock

from personae.actors.kit.mailbox import Ref
from personae.actors.kit.supervisor import Supervisor
from personae.errors import ActorStopped

pytestmark = virtual_clock


async def test_a_removed_child_is_gone_and_not_restarted() -> None:
    diary: list[str] = []
    top = Supervisor("top")
    refs = family(top, diary)
    async with top:
        await top.remove(refs[1])
        assert diary == ["+a", "+b", "+c", "-b"]
        with pytest.raises(ActorStopped):
            refs[1].tell(crash)
        await top.remove(refs[1])  # again: nothing to do
        top.spawn("b", Doer)


async def test_a_dismissed_child_finishes_its_message_and_the_caller_does_not_wait() -> None:
    diary: list[str] = []
    top = Supervisor("top", report=quiet)
    refs = family(top, diary)
    async with top:
        refs[1].tell(lambda actor: anyio.sleep(1))
        await anyio.sleep(0.5)
        top.dismiss(refs[1])
        assert diary == ["+a", "+b", "+c"]
        await anyio.sleep(1)
        assert diary == ["+a", "+b", "+c", "-b"]
        top.dismiss(refs[1])  # again: nothing to do


async def test_a_removal_ends_although_the_supervisor_ends_first() -> None:
    removed: list[bool] = []

    async def remove(top: Supervisor, ref: Ref[Deed]) -> None:
        await top.remove(ref)
        removed.append(True)

    async with anyio.create_task_group() as tasks, Supervisor("top", report=quiet) as top:
        doer = top.spawn("doer", Doer, stop_timeout=5)
        other = top.spawn("other", Doer)
        doer.tell(hang)
        await anyio.sleep(1)
        tasks.start_soon(remove, top, doer)
        tasks.start_soon(remove, top, other)
        await anyio.sleep(1)
    assert removed == [True, True]


async def test_a_whole_supervisor_can_be_removed() -> None:
    diary: list[str] = []
    async with Supervisor("top") as top:
        below = top.supervisor("below")
        (doer,) = family(below, diary, "a")
        await doer.ask(whoami)
        await top.remove(below)
        assert diary == ["+a", "-a"]
        with pytest.raises(ActorStopped):
            doer.tell(crash)


async def test_an_actor_may_spawn_others_while_it_handles_a_message() -> None:
    async with Supervisor("top") as top:
        queues = top.supervisor("queues")
        doer = top.spawn("doer", Doer)
        child = await doer.ask(lambda reply: lambda actor: reply.tell(queues.spawn("queue", Doer)))
        assert child.path == "top/queues/queue"
        await child.ask(whoami)


async def test_a_child_added_while_its_supervisor_ran_does_not_survive_the_restart_of_the_supervisor() -> (
    None
):
    top = Supervisor("top", strategy="rest_for_one", report=quiet)
    doer = top.spawn("doer", Doer)
    queues = top.supervisor("queues")
    kept = queues.spawn("kept", Doer)
    async with top:
        passing = queues.spawn("passing", Doer)
        await passing.ask(whoami)
        doer.tell(crash)
        await anyio.sleep(1)
        await kept.ask(whoami)
        with pytest.raises(ActorStopped):
            passing.tell(crash)


async def test_a_name_is_used_once() -> None:
    async with Supervisor("top") as top:
        top.spawn("doer", Doer)
        with pytest.raises(ValueError, match="top/doer exists"):
            top.spawn("doer", Doer)


async def test_nothing_is_added_to_a_tree_that_has_ended_and_it_runs_once() -> None:
    async with Supervisor("top") as top:
        pass
    with pytest.raises(ActorStopped):
        top.spawn("doer", Doer)
    with pytest.raises(RuntimeError, match="runs once"):
        await top.__aenter__()
