import anyio
import pytest
from kit_actors import Doer, crash, whoami
from virtual_clock import virtual_clock

from personae.actors.kit.gauges import Gauge, dump, read
from personae.actors.kit.supervisor import Supervisor

pytestmark = virtual_clock


async def test_a_reading_shows_what_waits_for_how_long_and_what_was_done() -> None:
    async with Supervisor("top", report=lambda incident: None) as top:
        doer = top.spawn("doer", Doer, capacity=8)
        doer.tell(crash)
        await doer.ask(whoami)
        doer.tell(lambda actor: anyio.sleep(10))
        await anyio.sleep(1)
        doer.tell(crash)
        await anyio.sleep(3)
        doer.tell(lambda actor: None)
        (gauge,) = read(top)
        assert gauge == Gauge(
            path="top/doer",
            state="busy",
            depth=2,
            capacity=8,
            oldest=pytest.approx(3),
            handled=1,
            restarts=1,
        )


async def test_an_idle_actor_has_an_empty_reading() -> None:
    async with Supervisor("top") as top:
        top.spawn("doer", Doer)
        await anyio.sleep(1)
        assert [(g.state, g.depth, g.oldest) for g in read(top)] == [("idle", 0, 0.0)]


async def test_every_actor_of_the_tree_has_a_reading() -> None:
    top = Supervisor("top")
    top.spawn("a", Doer)
    below = top.supervisor("below")
    below.spawn("b", Doer)
    top.spawn("c", Doer)
    assert [gauge.path for gauge in read(top)] == ["top/a", "top/below/b", "top/c"]
    assert {gauge.state for gauge in read(top)} == {"new"}


async def test_a_dump_has_a_line_for_each_actor() -> None:
    async with Supervisor("top") as top:
        top.spawn("doer", Doer)
        await anyio.sleep(1)
        heading, line = dump(read(top)).splitlines()
    assert heading.split() == ["actor", "state", "mailbox", "oldest", "handled", "restarts"]
    assert line.split() == ["top/doer", "idle", "0/64", "0.000s", "0", "0"]
