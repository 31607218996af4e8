"""Front, whatever the order in which messages arrive: every request ends once."""

import anyio
import pytest
from front_house import ADAPTERS, Answer, House
from patience import PATIENCE
from told import Told

from personae.actors.front import IDLE_QUEUES, Front
from personae.actors.inbox import Inbox
from personae.actors.ingress import LONGEST_RETRY, Ingress
from personae.actors.kit import gauges
from personae.actors.kit.supervisor import Supervisor
from personae.actors.messages import (
    BackStarted,
    Load,
    Message,
    Pin,
    Pinned,
    StepDone,
    Submission,
    Submit,
    Unpin,
    Withdraw,
    Yield,
)
from personae.engine.params import SamplingParams
from personae.engine.sequence import Delta, SequenceLog
from personae.errors import Overloaded, PersonaeError

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("anyio_backend", ["asyncio"])]


def quarantined(inbox: Inbox) -> bool:
    return inbox._error is not None and inbox._error.code == "quarantined"


@pytest.mark.parametrize("seed", range(150))
async def test_every_request_ends_once_and_whole_however_often_back_dies(seed: int) -> None:
    house = House(seed)
    rng = house.rng
    withdrawn: set[str] = set()
    submitted: list[str] = []
    for _ in range(400):
        match rng.choices(["deliver", "step", "submit", "withdraw", "yield", "crash"], [60, 12, 8, 2, 4, 2])[
            0
        ]:
            case "deliver":
                await house.deliver()
            case "step":
                house.back.step(rng)
            case "submit":
                submitted.append(f"s{len(submitted)}")
                house.submit(submitted[-1], rng.choice(ADAPTERS), rng.choice(["ann", "bob"]))
            case "withdraw" if submitted:
                withdrawn.add(unwanted := rng.choice(submitted))
                house.letters["ingress"].tell(Withdraw((unwanted,)))
            case "yield":
                for adapter in house.back.pinned - {None}:
                    house.letters[adapter].tell(Yield(adapter, house.back.life, now=rng.random() < 0.5))
            case "crash":
                house.back.start()
    await house.settle()
    house.assert_empty()
    for id in submitted:
        tokens, ends = house.heard(id)
        assert tokens == list(range(3, 3 + len(tokens))), "in order, none twice, none missing"
        if id not in withdrawn and not quarantined(house.inbox_of[id]):
            assert (len(tokens), ends) == (6, ["length"])
        assert len(ends) <= 1


@pytest.mark.parametrize("seed", range(50))
async def test_a_request_whose_adapter_finds_no_place_ends_once_around_a_restart(seed: int) -> None:
    house = House(seed)
    house.back.refuses = True
    for number in range(4):
        house.submit(f"{number}", "poet")
        for _ in range(house.rng.randrange(8)):
            await house.deliver()
    house.back.start()
    await house.settle()
    house.assert_empty()
    for inbox in house.inbox_of.values():
        assert isinstance(inbox._error, PersonaeError)


class Placing(Told):
    """Back in which every adapter has its place and every sequence ends at once."""

    def __init__(self) -> None:
        self.front: Front

    def tell(self, message: Message) -> None:
        super().append(message)
        match message:
            case Pin(adapter=adapter, life=life):
                self.front.queue_of(adapter).tell(Pinned(adapter, life))
            case Submit(logs=logs):
                deltas = tuple(Delta(log.id, (1,), finish="length") for log in logs)
                self.front.streamer.tell(StepDone(deltas, Load()))


async def test_the_queues_of_adapters_that_nobody_asks_for_any_more_do_not_stay() -> None:
    top, back = Supervisor("top", max_restarts=0), Placing()
    back.front = front = Front(top, ready=lambda: True, max_live=10, window=4)
    front.meet(back, back)
    async with top:
        front.ingress.tell(BackStarted(1, Load()))
        for number in [*range(3 * IDLE_QUEUES), 0, 0, 3 * IDLE_QUEUES - 1]:
            log = SequenceLog("one", (7,), 1, SamplingParams(max_tokens=1, seed=0), adapter=f"{number}")
            inbox = Inbox()
            await front.ingress.ask(lambda reply: Submission((log,), inbox, reply))  # noqa: B023  asked at once
            with anyio.fail_after(PATIENCE):
                assert (await inbox.get())[0].finish == "length"
        await anyio.wait_all_tasks_blocked()
        paths = [gauge.path for gauge in gauges.read(top) if "queue" in gauge.path]
        assert len(paths) == IDLE_QUEUES
    pins = [message.adapter for message in back if isinstance(message, Pin)]
    assert pins == [message.adapter for message in back if isinstance(message, Unpin)]
    assert len(pins) == 3 * IDLE_QUEUES + 3


@pytest.mark.parametrize(("seconds", "told"), [(0.0, 1.0), (37.5, 37.5), (1e9, LONGEST_RETRY)])
async def test_who_is_refused_is_told_how_long_the_queue_is(seconds: float, told: float) -> None:
    ingress = Ingress(Told(), lambda adapter: Told(), 1, lambda: seconds)
    logs = tuple(SequenceLog(id, (7,), 1, SamplingParams(max_tokens=1, seed=0)) for id in "ab")
    answer = Answer()
    await ingress.receive(Submission(logs, Inbox(), answer))
    assert isinstance(answer.error, Overloaded)
    assert answer.error.retry_after == told
