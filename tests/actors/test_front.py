"""Front with a make-believe Back, in every order in which messages may arrive.

Each actor has a queue of its own, and a seeded die says whose next message is delivered. Between one sender
and one receiver the order is kept, as by mailboxes; nothing else is.
"""

import random
from collections import defaultdict, deque
from dataclasses import dataclass, field
from types import SimpleNamespace

import anyio
import pytest
from fake_executor import make_log
from patience import PATIENCE
from told import Told

from personae.actors.adapter_queue import AdapterQueue, Lane
from personae.actors.front import IDLE_QUEUES, Front
from personae.actors.inbox import Inbox
from personae.actors.ingress import LONGEST_RETRY, Ingress
from personae.actors.kit import gauges
from personae.actors.kit.supervisor import Supervisor
from personae.actors.messages import (
    BackStarted,
    Cancel,
    Load,
    Message,
    Pin,
    Pinned,
    Recall,
    StepDone,
    Submission,
    Submit,
    Unpin,
    Withdraw,
    Yield,
)
from personae.actors.streamer import Latest, Streamer
from personae.engine.params import SamplingParams
from personae.engine.sequence import Delta, SequenceLog
from personae.errors import Overloaded, PersonaeError

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("anyio_backend", ["asyncio"])]
ADAPTERS = [None, "poet", "clerk"]


class Letters(deque[Message]):
    """A mailbox that only notes."""

    tell = deque.append


class Answer:
    """The asker of a submission."""

    error: Exception | None = None

    def tell(self, value: None) -> None:
        pass

    def fail(self, error: Exception) -> None:
        self.error = error


@dataclass
class Back:
    """Emits a sequence's own length as its next token; refuses to run one whose adapter is not pinned."""

    ingress: Letters
    streamer: Letters
    queue_of: dict[str | None, Letters]
    life: int = 0
    letters: Letters = field(default_factory=Letters)
    pinned: set[str | None] = field(default_factory=set)
    running: dict[str, list[SequenceLog | int]] = field(default_factory=dict)
    refuses: bool = False

    def start(self) -> None:
        self.life += 1
        self.letters.clear()
        self.pinned = {None}
        self.running.clear()
        self.ingress.tell(BackStarted(self.life, Load()))

    def receive(self, message: Message) -> None:
        match message:
            case Pin(adapter=adapter, life=self.life):
                if self.refuses:
                    self.queue_of[adapter].tell(Pinned(adapter, self.life, "no room"))
                else:
                    self.pinned.add(adapter)
                    self.queue_of[adapter].tell(Pinned(adapter, self.life))
            case Unpin(adapter=adapter, life=self.life):
                self.pinned.discard(adapter)
                assert adapter not in {log.adapter for log, _ in self.running.values()}
            case Submit(logs=logs, life=self.life):
                for log in logs:
                    assert log.id not in self.running, "submitted twice"
                    self.running[log.id] = [log, len(log.tokens)]
            case Cancel(ids=ids, life=self.life):
                self.let_go(ids, "cancelled")
            case Recall(ids=ids, life=self.life):
                self.let_go(ids, "recalled")

    def let_go(self, ids: tuple[str, ...], finish: str) -> None:
        gone = [id for id in ids if self.running.pop(id, None) is not None]
        self.streamer.tell(StepDone(tuple(Delta(id, finish=finish) for id in gone), Load()))

    def step(self, rng: random.Random) -> None:
        deltas = []
        for id, state in list(self.running.items()):
            log, length = state
            assert log.adapter in self.pinned, "runs without its adapter"
            if rng.random() < 0.5:
                last = length + 1 == log.prompt_length + log.params.max_tokens
                deltas.append(Delta(id, (length,), finish="length" if last else None))
                state[1] = length + 1
                if last:
                    del self.running[id]
        self.streamer.tell(StepDone(tuple(deltas), Load()))


class House:
    """Front's actors, each with its letters."""

    def __init__(self, seed: int, window: int = 2) -> None:
        self.rng = random.Random(seed)
        self.inbox_of: dict[str, Inbox] = {}
        self.letters: dict[object, Letters] = defaultdict(Letters)
        ingress, streamer = self.letters["ingress"], self.letters["streamer"]
        self.back = Back(ingress, streamer, self.letters)
        self.actors: dict[object, object] = {
            "ingress": Ingress(streamer, self.open_queue, 1000),
            "streamer": Streamer(ingress, Latest()),
        }
        self.window = window
        self.back.start()

    def open_queue(self, adapter: str | None) -> Letters:
        if adapter not in self.actors:
            back = self.back.letters
            self.actors[adapter] = queue = AdapterQueue(
                adapter, back, back, self.letters["streamer"], self.window, lambda: self.retire(adapter)
            )
            queue._cell = SimpleNamespace(mailbox=self.letters[adapter])
        return self.letters[adapter]

    def retire(self, adapter: str | None) -> None:
        """Nothing that was meant for a queue may depend on its being the same one."""
        assert not self.letters[adapter]
        del self.actors[adapter]

    def submit(
        self, id: str, adapter: str | None, tenant: str = "default", *, background: bool = False
    ) -> None:
        params = SamplingParams(max_tokens=6, seed=0)
        log = SequenceLog(id, (7, 7, 7), 3, params, adapter=adapter, tenant=tenant, background=background)
        self.inbox_of[id] = Inbox()
        self.letters["ingress"].tell(Submission((log,), self.inbox_of[id], Answer()))

    async def deliver(self) -> bool:
        """One message, of a receiver chosen by the die; False if there is none."""
        waiting = [name for name, letters in self.letters.items() if letters]
        if self.back.letters:
            waiting.append(self.back)
        if not waiting:
            return False
        name = self.rng.choice(waiting)
        if name is self.back:
            self.back.receive(self.back.letters.popleft())
        else:
            if name not in self.actors:
                self.open_queue(name)
            await self.actors[name].receive(self.letters[name].popleft())
        return True

    async def settle(self) -> None:
        """Everything that was begun comes to its end."""
        while True:
            while await self.deliver():
                pass
            if not self.back.running:
                return
            self.back.step(self.rng)

    def heard(self, id: str) -> tuple[list[int], list[str]]:
        deltas = self.inbox_of[id]._deltas
        return [token for d in deltas for token in d.tokens], [d.finish for d in deltas if d.finish]

    def assert_empty(self) -> None:
        ingress, streamer = self.actors["ingress"], self.actors["streamer"]
        assert not ingress._adapter_of
        assert not ingress._withdrawn
        assert not streamer._live
        assert self.back.pinned == {None}
        for adapter in ADAPTERS:
            if adapter in self.actors:
                queue = self.actors[adapter]
                lanes = queue._lanes.values()
                assert not any(lane.waiting or lane.offered for lane in lanes)
                assert [*queue._aboard, *queue._refused] == []


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


async def test_a_lane_hands_out_by_priority_and_forgets_who_has_gone() -> None:
    lane = Lane()
    for i, priority in enumerate([0, 2, -1, 0]):
        lane.add(make_log(f"{i}", [1], priority=priority))
    lane.waiting.pop("0")
    assert [log.id for log in lane.take(2)] == ["2", "3"]
    assert [log.id for log in lane.take(5)] == ["1"]
    assert lane.take(1) == []
