from typing import Literal

import anyio
import pytest
from kit_actors import Boom, Deed, Doer, Unwell, crash, family, quiet, whoami
from virtual_clock import virtual_clock

from personae.actors.kit.child import Incident
from personae.actors.kit.supervisor import Strategy, Supervisor
from personae.errors import ActorStopped, RestartsExhausted, StartFailed

pytestmark = virtual_clock


async def run_until_it_gives_up(top: Supervisor) -> None:
    with anyio.fail_after(1000):
        async with top:
            await anyio.sleep_forever()


def stop(actor: Doer) -> None:
    actor.stop()


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ("one_for_one", ["-b", "+b"]),
        ("rest_for_one", ["-b", "-c", "+b", "+c"]),
        ("one_for_all", ["-b", "-c", "-a", "+a", "+b", "+c"]),
    ],
)
async def test_a_strategy_says_who_is_restarted_and_in_which_order(
    strategy: Strategy, expected: list[str]
) -> None:
    diary: list[str] = []
    top = Supervisor("top", strategy=strategy, report=quiet)
    refs = family(top, diary)
    async with top:
        assert diary == ["+a", "+b", "+c"]
        diary.clear()
        refs[1].tell(crash)
        await anyio.sleep(1)
        assert diary == expected


async def test_children_start_in_order_and_stop_in_reverse_order() -> None:
    diary: list[str] = []
    top = Supervisor("top")
    family(top, diary)
    async with top:
        assert diary == ["+a", "+b", "+c"]
    assert diary == ["+a", "+b", "+c", "-c", "-b", "-a"]


async def test_a_child_starts_only_when_the_one_before_it_has_started() -> None:
    class Slow(Doer):
        async def started(self) -> None:
            await anyio.sleep(10)
            await super().started()

    diary: list[str] = []
    top = Supervisor("top")
    top.spawn("slow", lambda: Slow("slow", diary))
    top.spawn("quick", lambda: Doer("quick", diary))
    async with top:
        assert diary == ["+slow", "+quick"]


@pytest.mark.parametrize(
    ("restart", "deed", "restarted"),
    [
        ("permanent", crash, True),
        ("permanent", stop, True),
        ("transient", crash, True),
        ("transient", stop, False),
        ("temporary", crash, False),
        ("temporary", stop, False),
    ],
)
async def test_the_kind_of_a_child_says_whether_it_comes_back(
    restart: Literal["permanent", "transient", "temporary"], deed: Deed, restarted: bool
) -> None:
    async with Supervisor("top", report=quiet) as top:
        doer = top.spawn("doer", Doer, restart=restart)
        first = await doer.ask(whoami)
        doer.tell(deed)
        await anyio.sleep(1)
        if restarted:
            assert await doer.ask(whoami) is not first
        else:
            with pytest.raises(ActorStopped):
                doer.tell(crash)
            top.spawn("doer", Doer)  # its name is free again


async def test_a_temporary_child_is_not_restarted_with_its_siblings() -> None:
    async with Supervisor("top", strategy="one_for_all", report=quiet) as top:
        doer = top.spawn("doer", Doer)
        passing = top.spawn("passing", Doer, restart="temporary")
        await passing.ask(whoami)
        doer.tell(crash)
        await doer.ask(whoami)
        await anyio.sleep(1)
        with pytest.raises(ActorStopped):
            passing.tell(crash)


async def test_restarts_beyond_the_intensity_end_the_tree_with_the_last_cause() -> None:
    incidents: list[Incident] = []
    top = Supervisor("top", max_restarts=2, within=10, report=incidents.append)
    doer = top.spawn("doer", Doer)
    for _ in range(3):
        doer.tell(crash)
    with pytest.raises(RestartsExhausted, match="top gives up") as caught:
        await run_until_it_gives_up(top)
    assert isinstance(caught.value.__cause__, Boom)
    assert [(i.what, i.restarts) for i in incidents] == [
        ("crashed", 0),
        ("crashed", 1),
        ("crashed", 2),
        ("gave up", 0),
    ]


async def test_restarts_spread_over_time_never_exhaust_the_intensity() -> None:
    incidents: list[Incident] = []
    async with Supervisor("top", max_restarts=2, within=10, report=incidents.append) as top:
        doer = top.spawn("doer", Doer)
        for _ in range(20):
            doer.tell(crash)
            await anyio.sleep(5.1)
        await doer.ask(whoami)
    assert [(i.what, i.restarts) for i in incidents] == [("crashed", n) for n in range(20)]


async def test_deaths_just_after_long_starts_exhaust_the_intensity() -> None:
    class Slow(Doer):
        async def started(self) -> None:
            await anyio.sleep(100)

    top = Supervisor("top", max_restarts=2, within=10, report=quiet)
    doer = top.spawn("doer", Slow)
    for _ in range(3):
        doer.tell(crash)
    with pytest.raises(RestartsExhausted, match="more than 2 restarts in 10 s of running"):
        await run_until_it_gives_up(top)


async def test_a_supervisor_that_gives_up_is_restarted_by_its_own_supervisor() -> None:
    diary: list[str] = []
    incidents: list[Incident] = []
    top = Supervisor("top", strategy="rest_for_one", report=incidents.append)
    below = top.supervisor("below", max_restarts=1, within=10)
    worker = below.spawn("worker", lambda: Doer("worker", diary))
    top.spawn("after", lambda: Doer("after", diary))
    async with top:
        worker.tell(crash)
        worker.tell(crash)
        worker.tell(lambda actor: diary.append("kept"))
        await worker.ask(whoami)  # the ref and the mailbox survive the restart of the supervisor itself
        await anyio.sleep(1)
        assert diary == [
            *("+worker", "+after"),
            *("-worker", "+worker"),
            *("-worker", "-after", "+worker", "kept", "+after"),
        ]
    assert [(i.path, i.what) for i in incidents] == [
        ("top/below/worker", "crashed"),
        ("top/below/worker", "crashed"),
        ("top/below", "crashed"),
    ]


async def test_escalation_climbs_to_the_top() -> None:
    top = Supervisor("top", max_restarts=1, report=quiet)
    worker = top.supervisor("middle", max_restarts=1).spawn("worker", Doer)
    for _ in range(4):
        worker.tell(crash)
    with pytest.raises(RestartsExhausted, match="top gives up"):
        await run_until_it_gives_up(top)


async def test_a_failed_first_start_fails_the_tree_and_stops_what_had_started() -> None:
    class Broken(Doer):
        async def started(self) -> None:
            raise Boom

    diary: list[str] = []
    top = Supervisor("top", report=quiet)
    top.spawn("good", lambda: Doer("good", diary))
    broken = top.spawn("broken", Broken)
    top.spawn("never", lambda: Doer("never", diary))
    with pytest.raises(StartFailed, match="top/broken") as caught:
        await run_until_it_gives_up(top)
    assert isinstance(caught.value.__cause__, Boom)
    assert diary == ["+good", "-good"]
    with pytest.raises(ActorStopped):
        broken.tell(crash)


async def test_a_factory_that_raises_is_a_failed_start() -> None:
    def factory() -> Doer:
        raise Boom

    top = Supervisor("top", report=quiet)
    top.spawn("doer", factory)
    with pytest.raises(StartFailed) as caught:
        await run_until_it_gives_up(top)
    assert isinstance(caught.value.__cause__, Boom)


async def test_a_restart_that_cannot_start_counts_until_the_intensity_is_exhausted() -> None:
    tries: list[int] = []
    top = Supervisor("top", max_restarts=3, report=quiet)
    top.spawn("doer", lambda: Unwell(tries, range(2, 9))).tell(crash)
    with pytest.raises(RestartsExhausted):
        await run_until_it_gives_up(top)
    assert tries == [1, 2, 3, 4]


async def test_a_sibling_that_cannot_be_restarted_is_tried_again_with_those_after_it() -> None:
    diary: list[str] = []
    tries: list[int] = []
    top = Supervisor("top", strategy="rest_for_one", report=quiet)
    first = top.spawn("a", lambda: Doer("a", diary))
    top.spawn("b", lambda: Unwell(tries, {2}, "b", diary))
    top.spawn("c", lambda: Doer("c", diary))
    async with top:
        first.tell(crash)
        await anyio.sleep(1)
        assert diary == ["+a", "+b", "+c", "-a", "-c", "-b", "+a", "+b", "+c"]
        assert tries == [1, 2, 3]


async def test_a_tree_ends_though_a_child_hangs_in_started() -> None:
    class Hanging(Doer):
        async def started(self) -> None:
            await anyio.sleep_forever()

    incidents: list[Incident] = []
    with anyio.move_on_after(10):
        top = Supervisor("top", report=incidents.append)
        top.spawn("hanging", Hanging, stop_timeout=2)
        async with top:
            pytest.fail("it never starts")
    assert [i.what for i in incidents] == ["did not stop within 2 s"]


async def test_a_cancelled_body_still_stops_the_children_in_order() -> None:
    diary: list[str] = []

    class Thorough(Doer):
        async def stopped(self) -> None:
            await anyio.sleep(1)
            await super().stopped()

    with anyio.move_on_after(10) as scope:
        top = Supervisor("top")
        for name in "abc":
            top.spawn(name, lambda name=name: Thorough(name, diary))
        async with top:
            await anyio.sleep_forever()
    assert scope.cancelled_caught
    assert diary == ["+a", "+b", "+c", "-c", "-b", "-a"]


async def test_an_exception_in_the_body_comes_out_as_itself_after_the_children_stopped() -> None:
    diary: list[str] = []
    top = Supervisor("top")
    family(top, diary)

    async def fail() -> None:
        async with top:
            raise Boom

    with pytest.raises(Boom):
        await fail()
    assert diary[3:] == ["-c", "-b", "-a"]


async def test_a_child_that_dies_while_it_is_stopped_is_reported_and_not_restarted() -> None:
    diary: list[str] = []
    incidents: list[Incident] = []

    async def slow_crash(actor: Doer) -> None:
        await anyio.sleep(2)
        raise Boom

    async with Supervisor("top", report=incidents.append) as top:
        top.spawn("doer", lambda: Doer("a", diary)).tell(slow_crash)
        await anyio.sleep(1)
    assert diary == ["+a", "-a"]
    assert [type(i.error) for i in incidents] == [Boom]


async def test_two_children_that_die_together_are_both_restarted() -> None:
    diary: list[str] = []
    async with Supervisor("top", report=quiet) as top:
        refs = family(top, diary)
        for ref in refs:
            ref.tell(crash)
        for ref in refs:
            await ref.ask(whoami)
    assert sorted(diary[:9]) == ["+a", "+a", "+b", "+b", "+c", "+c", "-a", "-b", "-c"]


async def test_while_a_tree_goes_down_those_already_stopped_refuse_messages() -> None:
    refused: list[BaseException] = []

    class Early(Doer):
        async def stopped(self) -> None:
            try:
                await late.ask(whoami)
            except ActorStopped as error:
                refused.append(error)

    top = Supervisor("top")
    top.spawn("early", Early)
    late = top.spawn("late", Doer)
    async with top:
        await late.ask(whoami)
    assert len(refused) == 1


async def test_a_report_hook_that_raises_does_no_harm(caplog: pytest.LogCaptureFixture) -> None:
    def hook(incident: Incident) -> None:
        raise KeyError("hook")

    async with Supervisor("top", report=hook) as top:
        doer = top.spawn("doer", Doer)
        doer.tell(crash)
        await doer.ask(whoami)
    assert "the report hook raised an error for top/doer crashed" in caplog.text


async def test_by_default_incidents_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with Supervisor("top") as top:
        doer = top.spawn("doer", Doer)
        doer.tell(crash)
        await doer.ask(whoami)
    assert [r.getMessage() for r in caplog.records] == ["top/doer crashed (restarts: 0)"]
    assert caplog.records[0].exc_info is not None
