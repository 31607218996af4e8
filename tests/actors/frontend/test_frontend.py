"""The frontend, for any order in which messages arrive: every request ends once."""

import anyio
import pytest
from frontend_fixture import ADAPTERS, Answer, FrontendFixture
from patience import PATIENCE
from recorders import RecordingRef

from personae.actors.frontend.frontend import IDLE_QUEUES, Frontend
from personae.actors.frontend.inbox import Inbox
from personae.actors.frontend.ingress import LONGEST_RETRY, Ingress
from personae.actors.kit import gauges
from personae.actors.kit.supervisor import Supervisor
from personae.actors.messages import (
    EngineCoreStarted,
    Message,
    Pin,
    Pinned,
    ReleaseRequest,
    StepDone,
    Submission,
    Submit,
    Unpin,
    Withdraw,
)
from personae.engine.params import SamplingParams
from personae.engine.sequence import Delta, SequenceLog
from personae.engine.stats import SchedulerStats
from personae.errors import Overloaded, PersonaeError

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("anyio_backend", ["asyncio"])]


def quarantined(inbox: Inbox) -> bool:
    return inbox._error is not None and inbox._error.code == "quarantined"


@pytest.mark.parametrize("seed", range(150))
async def test_every_request_ends_once_and_complete_however_often_the_engine_core_dies(seed: int) -> None:
    fixture = FrontendFixture(seed)
    rng = fixture.rng
    withdrawn: set[str] = set()
    submitted: list[str] = []
    for _ in range(400):
        match rng.choices(["deliver", "step", "submit", "withdraw", "yield", "crash"], [60, 12, 8, 2, 4, 2])[
            0
        ]:
            case "deliver":
                await fixture.deliver()
            case "step":
                fixture.core.step(rng)
            case "submit":
                submitted.append(f"s{len(submitted)}")
                fixture.submit(submitted[-1], rng.choice(ADAPTERS), rng.choice(["ann", "bob"]))
            case "withdraw" if submitted:
                withdrawn.add(unwanted := rng.choice(submitted))
                fixture.envelopes["ingress"].tell(Withdraw((unwanted,)))
            case "yield":
                for adapter in fixture.core.pinned - {None}:
                    fixture.envelopes[adapter].tell(
                        ReleaseRequest(adapter, fixture.core.epoch, now=rng.random() < 0.5)
                    )
            case "crash":
                fixture.core.start()
    await fixture.settle()
    fixture.assert_empty()
    for id in submitted:
        tokens, ends = fixture.heard(id)
        assert tokens == list(range(3, 3 + len(tokens))), "in order, none twice, none missing"
        if id not in withdrawn and not quarantined(fixture.inbox_of[id]):
            assert (len(tokens), ends) == (6, ["length"])
        assert len(ends) <= 1


@pytest.mark.parametrize("seed", range(50))
async def test_a_request_whose_adapter_finds_no_place_ends_once_around_a_restart(seed: int) -> None:
    fixture = FrontendFixture(seed)
    fixture.core.refuses = True
    for number in range(4):
        fixture.submit(f"{number}", "poet")
        for _ in range(fixture.rng.randrange(8)):
            await fixture.deliver()
    fixture.core.start()
    await fixture.settle()
    fixture.assert_empty()
    for inbox in fixture.inbox_of.values():
        assert isinstance(inbox._error, PersonaeError)


class Placing(RecordingRef):
    """An engine core in which every adapter is loaded and every sequence ends at once."""

    def __init__(self) -> None:
        self.frontend: Frontend

    def tell(self, message: Message) -> None:
        super().append(message)
        match message:
            case Pin(adapter=adapter, epoch=epoch):
                self.frontend.queue_of(adapter).tell(Pinned(adapter, epoch))
            case Submit(logs=logs):
                deltas = tuple(Delta(log.id, (1,), finish="length") for log in logs)
                self.frontend.streamer.tell(StepDone(deltas, SchedulerStats()))


async def test_queues_of_adapters_that_are_not_requested_any_more_are_removed() -> None:
    top, core = Supervisor("top", max_restarts=0), Placing()
    core.frontend = frontend = Frontend(top, ready=lambda: True, max_live=10, window=4)
    frontend.connect(core, core)
    async with top:
        frontend.ingress.tell(EngineCoreStarted(1, SchedulerStats()))
        for number in [*range(3 * IDLE_QUEUES), 0, 0, 3 * IDLE_QUEUES - 1]:
            log = SequenceLog("one", (7,), 1, SamplingParams(max_tokens=1, seed=0), adapter=f"{number}")
            inbox = Inbox()
            await frontend.ingress.ask(lambda reply: Submission((log,), inbox, reply))  # noqa: B023  called at once
            with anyio.fail_after(PATIENCE):
                assert (await inbox.get())[0].finish == "length"
        await anyio.wait_all_tasks_blocked()
        paths = [gauge.path for gauge in gauges.read(top) if "queue" in gauge.path]
        assert len(paths) == IDLE_QUEUES
    pins = [message.adapter for message in core if isinstance(message, Pin)]
    assert pins == [message.adapter for message in core if isinstance(message, Unpin)]
    assert len(pins) == 3 * IDLE_QUEUES + 3


@pytest.mark.parametrize(("seconds", "delivered"), [(0.0, 1.0), (37.5, 37.5), (1e9, LONGEST_RETRY)])
async def test_a_refusal_says_how_long_the_queue_is(seconds: float, delivered: float) -> None:
    ingress = Ingress(RecordingRef(), lambda adapter: RecordingRef(), 1, lambda: seconds)
    logs = tuple(SequenceLog(id, (7,), 1, SamplingParams(max_tokens=1, seed=0)) for id in "ab")
    answer = Answer()
    await ingress.receive(Submission(logs, Inbox(), answer))
    assert isinstance(answer.error, Overloaded)
    assert answer.error.retry_after == delivered
