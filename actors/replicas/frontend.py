"""The frontend of one replica. It differs from that of a single engine in that its streams come from the
dispatcher, and return to it when the engine core dies."""

from collections.abc import Callable

from personae.actors.enginecore.step_recorder import LastStep
from personae.actors.frontend.frontend import Frontend
from personae.actors.frontend.ingress import Ingress
from personae.actors.frontend.live_stream import LiveStream
from personae.actors.frontend.probation import CLEARED
from personae.actors.frontend.streamer import LatestStats, Streamer
from personae.actors.kit import gauges
from personae.actors.kit.mailbox import Ref
from personae.actors.kit.supervisor import Supervisor
from personae.actors.messages import (
    Cancel,
    EngineDied,
    HandedOver,
    HandOver,
    Message,
    Orphaned,
    Prefilled,
    Refused,
    Replay,
    ReplicaLost,
    ReplicaProgress,
    ReplicaUp,
    Transfer,
)
from personae.engine.scheduling.step_time import StepCost
from personae.engine.stats import SchedulerStats

SMOOTHING = 0.05  # weight of each new step in the mean
SLOW = 1.5  # steps that take this many times as long count as slower


class ReplicaStats(LatestStats):
    """The latest figures, and the measured time per token. `step_cost` is learned from the steps of all
    replicas. `slowness` is how many times as long a step takes here."""

    def __init__(self, step_cost: StepCost) -> None:
        super().__init__()
        self.step_cost = step_cost
        self.slowness = 1.0

    def update(self, stats: SchedulerStats) -> None:
        """Take new figures, and learn from them if they cover exactly one step."""
        past = self.stats.counters
        super().update(stats)
        now = self.stats.counters
        tokens, seconds = now.tokens - past.tokens, now.step_seconds - past.step_seconds
        if now.steps == past.steps + 1 and tokens > 0 and seconds > 0:
            self.step_cost.observe(tokens, seconds)
            self.slowness += SMOOTHING * (seconds / self.step_cost.of(tokens) - self.slowness)

    def step_seconds(self, tokens: int) -> float:
        """How long a step of this many tokens takes here; 0 until one was measured."""
        return max(self.step_cost.of(tokens), 0.0) * max(self.slowness, 1.0)

    @property
    def token_seconds(self) -> float:
        """How much longer one more token makes a step; 0 until a step was measured. Engines of one kind
        differ by chance, so only one that is clearly slower counts as slower."""
        return self.step_cost.each * (self.slowness if self.slowness > SLOW else 1.0)

    @property
    def prompt_token_seconds(self) -> float:
        """How much longer one more prompt token makes a step, as the engine core has measured."""
        return self.stats.prompt_token_seconds or self.token_seconds


class ReplicaStreamer(Streamer):
    """Hands over its streams when the engine core dies or has to drain. Reports which sequences were admitted
    and which ended."""

    def __init__(
        self, index: int, ingress: Ref[Message], dispatcher: Ref[Message], stats: LatestStats
    ) -> None:
        super().__init__(ingress, stats)
        self._index = index
        self._dispatcher = dispatcher
        self._down = True
        self._on_trial: set[str] = set()
        self._prefilled: list[LiveStream] = []  # in the step that is being delivered

    async def receive(self, message: Message) -> None:
        """Handle one message."""
        match message:
            case Refused(ids=ids):
                ended = tuple(id for id in ids if id in self._live)
                await super().receive(message)
                self._report((), ended)
            case Transfer():
                self._accept(message)
            case EngineDied(on_device=on_device, outside=outside):
                self._down = True
                if on_device is None:
                    on_device = tuple(id for id, live in self._live.items() if live.on_device)
                self._hand_over(tuple(self._live), on_device, outside)
            case HandOver():
                self._down = True
                self._hand_over(tuple(self._live), cancel=True)
            case Replay():
                ended = tuple(id for id, live in self._live.items() if live.inbox is None)
                await super().receive(message)
                self._down = False
                self._report((), ended)
                self._dispatcher.tell(ReplicaUp(self._index))
            case _:
                await super().receive(message)

    def _accept(self, transfer: Transfer) -> None:
        for stream, log in zip(transfer.streams, transfer.logs, strict=True):
            self._live[log.id] = stream
            self._latest.backlog.wait(log)
        ids = tuple(log.id for log in transfer.logs)
        if transfer.trial:
            self._on_trial.update(ids)
        if self._down:  # it died after the dispatcher chose this replica
            self._hand_over(ids)

    def _hand_over(
        self,
        ids: tuple[str, ...],
        on_device: tuple[str, ...] = (),
        outside: bool = True,
        *,
        cancel: bool = False,
    ) -> None:
        streams = tuple(self._live.pop(id) for id in ids)
        for id in ids:
            self._latest.backlog.leave(id)
        self._on_trial.difference_update(ids)
        self._ingress.tell(HandedOver(ids, cancel))
        self._dispatcher.tell(Orphaned(self._index, streams, on_device, outside))

    def _send_on(self, stream: LiveStream) -> None:
        del self._live[stream.log.id]
        self._latest.backlog.leave(stream.log.id)
        self._prefilled.append(stream)

    def _stepped(self, admitted: tuple[str, ...], ended: list[str]) -> None:
        prefilled, self._prefilled = tuple(self._prefilled), []
        self._report(admitted, tuple(ended))
        if prefilled:
            ids = tuple(stream.log.id for stream in prefilled)
            self._on_trial.difference_update(ids)
            self._ingress.tell(HandedOver(ids))
            self._dispatcher.tell(Prefilled(self._index, prefilled))

    def _report(self, admitted: tuple[str, ...], ended: tuple[str, ...]) -> None:
        cleared: tuple[str, ...] = ()
        if self._on_trial:
            live = self._live
            over = [id for id in self._on_trial if id not in live or live[id].record.brought >= CLEARED]
            self._on_trial.difference_update(over)
            cleared = tuple(id for id in over if id in live)
        if admitted or ended or cleared:
            self._dispatcher.tell(ReplicaProgress(self._index, admitted, ended, cleared))


class ReplicaIngress(Ingress):
    """Accepts what the dispatcher has admitted."""

    async def receive(self, message: Message) -> None:
        """Route one message."""
        match message:
            case Transfer(logs=logs):
                self._streamer.tell(message)
                self._accept(logs)
            case HandedOver(ids=ids, cancel=cancel):
                if cancel:
                    self._route(ids, lambda ids: Cancel(ids, self._epoch))
                self._forget(ids)
            case _:
                await super().receive(message)


class ReplicaFrontend(Frontend):
    """The actors of replica `index`, below `root`. All replicas share `step_cost`."""

    def __init__(
        self,
        index: int,
        root: Supervisor,
        dispatcher: Ref[Message],
        step_cost: StepCost,
        *,
        ready: Callable[[], bool],
        max_live: int,
        window: int,
    ) -> None:
        self.index = index
        self._dispatcher = dispatcher
        self.latest: ReplicaStats
        super().__init__(root, ready=ready, max_live=max_live, window=window, name=f"engine-{index}/frontend")
        self.latest = ReplicaStats(step_cost)

    def _make_streamer(self) -> Streamer:
        return ReplicaStreamer(self.index, self.ingress, self._dispatcher, self.latest)

    def _make_ingress(self) -> Ingress:
        return ReplicaIngress(self.streamer, self.queue_of, self._max_live, on_started=self.engine_started)

    def note_engine_death(self, last: LastStep | None, *, outside: bool) -> None:
        """Report every death: its streams move to other replicas."""
        on_device = last.on_device if last is not None else None
        self.streamer.tell(EngineDied(on_device, outside))

    def lose_engine(self) -> None:
        """The engine core will not be started again; the other replicas go on."""
        self.lost.set()
        self._dispatcher.tell(ReplicaLost(self.index))

    async def close(self) -> None:
        """End the actors of a replica that is removed."""
        await self._root.remove(self._supervisor)

    def actors(self) -> list[gauges.Gauge]:
        """What the actors of this replica are doing."""
        return [*gauges.read(self._supervisor), *self.core_actors]
