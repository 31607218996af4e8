"""Distributes each step's deltas to the requests, and keeps the token logs up to date.

The logs turn a crash of the engine core into a pause. When the engine core starts again, the streamer
resubmits every live log that somebody still listens to, with its emitted tokens, and the answer continues
where it was.
"""

from collections import deque
from collections.abc import Mapping

from anyio import current_time
from msgspec.structs import replace

from personae import errors
from personae.actors.client import QueueStats
from personae.actors.frontend.live_stream import QUARANTINED, LiveStream
from personae.actors.frontend.probation import CrashRecord, Probation
from personae.actors.frontend.queue_stats import EndedTokens, queue_stats
from personae.actors.kit.actor import Actor
from personae.actors.kit.mailbox import Ref
from personae.actors.messages import (
    AdapterStats,
    CloseStream,
    EngineDied,
    Message,
    OpenStream,
    Preempted,
    Progress,
    Refused,
    Replay,
    Resubmit,
    Shutdown,
    StepDone,
)
from personae.engine.backlog import Backlog
from personae.engine.sequence import Delta, SequenceLog
from personae.engine.stats import EngineCounters, SchedulerStats, StepSample, added

RECENT_STEPS = 120  # steps kept for the console


class Streamer(Actor[Message]):
    """Delivers deltas to inboxes, and reports to the ingress which sequences started and ended.

    `stats` always holds the figures of the latest step.
    """

    def __init__(self, ingress: Ref[Message], stats: "LatestStats") -> None:
        self._ingress = ingress
        self._latest = stats
        self._live: dict[str, LiveStream] = {}
        stats.live = self._live
        self._probation = Probation()
        self._last_death = EngineDied((), outside=False)
        self._epoch = 0

    async def receive(self, message: Message) -> None:
        """Handle one message."""
        match message:
            case StepDone(deltas=deltas, stats=stats, admitted=admitted, steps=steps):
                self._latest.update(stats)
                self._latest.recent_steps.extend(steps)
                for id in admitted:
                    self._latest.backlog.leave(id)
                    if id in self._live:
                        self._live[id].begin_running(current_time())
                self._stepped(admitted, self._deliver(deltas))
            case EngineDied():
                self._last_death = message
            case OpenStream(logs=logs, inbox=inbox):
                now = current_time()
                for log in logs:
                    self._live[log.id] = LiveStream(log, inbox, now)
                    self._latest.backlog.wait(log)
            case AdapterStats():
                self._latest.hold(message)
            case CloseStream(ids=ids):
                for id in ids:
                    if id in self._live:
                        self._live[id].inbox = None
            case Refused():
                self._refuse(message)
            case Replay(epoch=epoch, stats=stats):
                self._epoch = epoch
                self._latest.begin_epoch(stats)
                self._replay()
            case Shutdown(error=error):
                for live in self._live.values():
                    if live.inbox is not None:
                        live.inbox.fail(error)
                        live.inbox = None

    def _stepped(self, admitted: tuple[str, ...], ended: list[str]) -> None:
        """A step admitted and ended these sequences."""

    def _send_on(self, stream: LiveStream) -> None:
        """Another engine goes on with a stream, as its log asked."""
        raise AssertionError(f"sequence {stream.log.id} ends here, and there is no other engine")

    def _deliver(self, deltas: tuple[Delta, ...]) -> list[str]:
        """Distribute deltas to the inboxes. Returns the ids of the sequences that have ended."""
        started: list[str] = []
        ended: list[str] = []
        returned: list[SequenceLog] = []
        for delta in deltas:
            live = self._live.get(delta.id)
            if live is None:
                continue
            if delta.finish == "preempted":
                returned.append(log := live.begin_again())
                self._latest.backlog.wait(log)
                continue
            prefilled = delta.finish == "prefilled"
            if prefilled:
                delta = replace(delta, finish=None)
            if not live.started:
                live.started = True
                started.append(delta.id)
            if delta.tokens:
                if live.log.targets is not None and not live.emitted:
                    live.first = current_time() - live.opened
                live.emitted += delta.tokens
                live.record.brought += 1
            if live.inbox is not None:
                live.inbox.put(live.unseen(delta))
            if prefilled:
                self._send_on(live)
            if delta.finish is not None:
                del self._live[delta.id]
                self._latest.ended.count(live)
                self._latest.backlog.leave(delta.id)
                if delta.finish != "cancelled":
                    self._latest.backlog.answered(len(live.emitted))
                ended.append(delta.id)
        if started or ended:
            self._ingress.tell(Progress(tuple(started), tuple(ended)))
        if returned:
            self._ingress.tell(Preempted(tuple(returned), self._epoch))
        if not self._probation.over:
            self._try_next()
        return ended

    def _replay(self) -> None:
        closed = tuple(id for id, live in self._live.items() if live.inbox is None)
        for id in closed:
            del self._live[id]
            self._latest.backlog.leave(id)
        for live in self._live.values():
            self._latest.backlog.wait(live.begin_again())
        if closed:
            self._ingress.tell(Progress((), closed))
        died, self._last_death = self._last_death, EngineDied((), outside=False)
        for id in self._probation.judge(self._records(), set(died.on_device or ()), died.outside):
            self._quarantine(id, self._live[id])
        self._try_next()

    def _try_next(self) -> None:
        """Resubmit the next suspect if one is still to be tried, else all others."""
        probation = self._probation
        if not probation.over and (ids := probation.next(self._records())) is not None:
            logs = tuple(self._live[id].begin_again() for id in ids)
            self._ingress.tell(Resubmit(logs, self._epoch, last=probation.over))

    def _records(self) -> dict[str, CrashRecord]:
        return {id: live.record for id, live in self._live.items()}

    def _quarantine(self, id: str, live: LiveStream) -> None:
        live.log_quarantine()
        self._refuse(Refused((id,), "Quarantined", QUARANTINED))

    def _refuse(self, refused: Refused) -> None:
        error: type[errors.PersonaeError] = getattr(errors, refused.kind)
        for id in refused.ids:
            live = self._live.pop(id, None)
            self._latest.backlog.leave(id)
            if live is not None and live.inbox is not None:
                live.inbox.fail(error(refused.message, param=refused.param, code=refused.code))
        self._ingress.tell(Progress((), refused.ids))
        self._try_next()


class LatestStats:
    """The figures of the latest step, for `/metrics` and others that read them.

    Counters continue over the epochs of the engine core. `restarts` counts the epochs after the first.
    `backlog` says how much work waits, `live` has the sequences that have not ended, `ended` counts the
    tokens of those that have, `adapter_stats` says where adapters are.
    """

    def __init__(self) -> None:
        self.stats = SchedulerStats()
        self.backlog = Backlog()
        self.live: Mapping[str, LiveStream] = {}
        self.ended = EndedTokens()
        self.recent_steps: deque[StepSample] = deque(maxlen=RECENT_STEPS)
        self.restarts = -1
        self.adapter_stats = AdapterStats()
        self._before = EngineCounters()
        self._adapters_before = AdapterStats()

    def begin_epoch(self, stats: SchedulerStats) -> None:
        """Go on from the counters so far: a new epoch of the engine core counts from zero."""
        self.restarts += 1
        self._before = self.stats.counters
        self.update(stats)
        self._adapters_before = self.adapter_stats = replace(
            self.adapter_stats, device=0, host=0, host_bytes=0, line=0
        )

    def hold(self, adapter_stats: AdapterStats) -> None:
        """Take the adapter store's figures of this epoch."""
        self.adapter_stats = added(adapter_stats, self._adapters_before)

    def update(self, stats: SchedulerStats) -> None:
        """Take the figures of a step of this epoch."""
        past, now = self.stats.counters, stats.counters
        if self.restarts > 0:
            now += self._before
            stats = replace(stats, counters=now)
        self.stats = stats
        self.backlog.measured(now.tokens - past.tokens, now.step_seconds - past.step_seconds)

    def queues(self) -> tuple[QueueStats, ...]:
        """Return sequences and tokens by tenant and adapter."""
        return queue_stats(self.live.values(), self.ended)
