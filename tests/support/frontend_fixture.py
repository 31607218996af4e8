"""The frontend with a simulated engine core, for every order in which messages may arrive.

Each actor has a queue of its own, and a seeded random choice decides whose next message is delivered. Only
messages between the same sender and receiver keep their order, as in mailboxes.
"""

import random
from collections import defaultdict
from dataclasses import dataclass, field
from types import SimpleNamespace

from recorders import MessageQueue

from personae.actors.frontend.adapter_queue import AdapterQueue
from personae.actors.frontend.inbox import Inbox
from personae.actors.frontend.ingress import Ingress
from personae.actors.frontend.streamer import LatestStats, Streamer
from personae.actors.messages import (
    Cancel,
    EngineCoreStarted,
    Message,
    Pin,
    Pinned,
    Preempt,
    StepDone,
    Submission,
    Submit,
    Unpin,
)
from personae.engine.params import SamplingParams
from personae.engine.sequence import Delta, SequenceLog
from personae.engine.stats import SchedulerStats

ADAPTERS = [None, "poet", "clerk"]


class Answer:
    """The caller of a submission."""

    error: Exception | None = None

    def tell(self, value: None) -> None:
        pass

    def fail(self, error: Exception) -> None:
        self.error = error


@dataclass
class FakeCore:
    """Emits a sequence's own length as its next token. Refuses to run a sequence whose adapter is not
    pinned."""

    ingress: MessageQueue
    streamer: MessageQueue
    queue_of: dict[str | None, MessageQueue]
    epoch: int = 0
    envelopes: MessageQueue = field(default_factory=MessageQueue)
    pinned: set[str | None] = field(default_factory=set)
    running: dict[str, list[SequenceLog | int]] = field(default_factory=dict)
    refuses: bool = False

    def start(self) -> None:
        self.epoch += 1
        self.envelopes.clear()
        self.pinned = {None}
        self.running.clear()
        self.ingress.tell(EngineCoreStarted(self.epoch, SchedulerStats()))

    def receive(self, message: Message) -> None:
        match message:
            case Pin(adapter=adapter, epoch=self.epoch):
                if self.refuses:
                    self.queue_of[adapter].tell(Pinned(adapter, self.epoch, "no room"))
                else:
                    self.pinned.add(adapter)
                    self.queue_of[adapter].tell(Pinned(adapter, self.epoch))
            case Unpin(adapter=adapter, epoch=self.epoch):
                self.pinned.discard(adapter)
                assert adapter not in {log.adapter for log, _ in self.running.values()}
            case Submit(logs=logs, epoch=self.epoch):
                for log in logs:
                    assert log.id not in self.running, "submitted twice"
                    self.running[log.id] = [log, len(log.tokens)]
            case Cancel(ids=ids, epoch=self.epoch):
                self.let_go(ids, "cancelled")
            case Preempt(ids=ids, epoch=self.epoch):
                self.let_go(ids, "preempted")

    def let_go(self, ids: tuple[str, ...], finish: str) -> None:
        gone = [id for id in ids if self.running.pop(id, None) is not None]
        self.streamer.tell(StepDone(tuple(Delta(id, finish=finish) for id in gone), SchedulerStats()))

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
        self.streamer.tell(StepDone(tuple(deltas), SchedulerStats()))


class FrontendFixture:
    """The frontend's actors, each with its queue of messages."""

    def __init__(self, seed: int, window: int = 2) -> None:
        self.rng = random.Random(seed)
        self.inbox_of: dict[str, Inbox] = {}
        self.envelopes: dict[object, MessageQueue] = defaultdict(MessageQueue)
        ingress, streamer = self.envelopes["ingress"], self.envelopes["streamer"]
        self.core = FakeCore(ingress, streamer, self.envelopes)
        self.actors: dict[object, object] = {
            "ingress": Ingress(streamer, self.open_queue, 1000),
            "streamer": Streamer(ingress, LatestStats()),
        }
        self.window = window
        self.core.start()

    def open_queue(self, adapter: str | None) -> MessageQueue:
        if adapter not in self.actors:
            core = self.core.envelopes
            self.actors[adapter] = queue = AdapterQueue(
                adapter, core, core, self.envelopes["streamer"], self.window, lambda: self.retire(adapter)
            )
            queue._cell = SimpleNamespace(mailbox=SimpleNamespace(envelopes=self.envelopes[adapter]))
        return self.envelopes[adapter]

    def retire(self, adapter: str | None) -> None:
        """Replace a queue: no message to a queue may depend on its being the same one."""
        assert not self.envelopes[adapter]
        del self.actors[adapter]

    def submit(
        self, id: str, adapter: str | None, tenant: str = "default", *, background: bool = False
    ) -> None:
        params = SamplingParams(max_tokens=6, seed=0)
        log = SequenceLog(id, (7, 7, 7), 3, params, adapter=adapter, tenant=tenant, background=background)
        self.inbox_of[id] = Inbox()
        self.envelopes["ingress"].tell(Submission((log,), self.inbox_of[id], Answer()))

    async def deliver(self) -> bool:
        """Deliver one message to a randomly chosen receiver. Returns False if there is none."""
        waiting = [name for name, envelopes in self.envelopes.items() if envelopes]
        if self.core.envelopes:
            waiting.append(self.core)
        if not waiting:
            return False
        name = self.rng.choice(waiting)
        if name is self.core:
            self.core.receive(self.core.envelopes.popleft())
        else:
            if name not in self.actors:
                self.open_queue(name)
            await self.actors[name].receive(self.envelopes[name].popleft())
        return True

    async def settle(self) -> None:
        """Run until everything that was begun has ended."""
        while True:
            while await self.deliver():
                pass
            if not self.core.running:
                return
            self.core.step(self.rng)

    def heard(self, id: str) -> tuple[list[int], list[str]]:
        deltas = self.inbox_of[id]._deltas
        return [token for d in deltas for token in d.tokens], [d.finish for d in deltas if d.finish]

    def assert_empty(self) -> None:
        ingress, streamer = self.actors["ingress"], self.actors["streamer"]
        assert not ingress._adapter_of
        assert not ingress._withdrawn
        assert not streamer._live
        assert self.core.pinned == {None}
        for adapter in ADAPTERS:
            if adapter in self.actors:
                queue = self.actors[adapter]
                lanes = queue._lanes.values()
                assert not any(lane.waiting or lane.offered for lane in lanes)
                assert [*queue._on_device, *queue._refused] == []
