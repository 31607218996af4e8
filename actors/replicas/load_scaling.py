"""Scaling by load: more replicas while work waits or answers miss their targets, fewer while fewer would do.

Work that waits is measured in seconds of the replicas that serve, and what replicas do by the time that their
steps take. Answers miss their latency targets also while little waits, since each step has many rows. With
fewer of them it takes less time, so another replica helps if the present ones are busy.

There may be no replica at all while nobody asks. The first request then has one started, and waits for it.
"""

import logging
from math import ceil
from typing import NamedTuple

from anyio import current_time, move_on_after, sleep

from personae.actors.kit.actor import Actor
from personae.actors.messages import Message, NoEngine
from personae.actors.replicas.replica import ReplicaState
from personae.actors.replicas.replica_set import ReplicaSet
from personae.actors.replicas.scaling import ReplicaScaler
from personae.errors import Overloaded, RequestError

EVERY = 1.0  # seconds between two looks
LONGEST_WAIT = 2.0  # seconds of waiting work, beyond which more replicas start
PATIENCE = 2.0  # seconds for which work waits so long before they do: a short burst ends by itself
CALM = 60.0  # seconds for which fewer replicas would have done, before one ends
BUSY = 0.6  # the share of their time that the others may compute then
MISSED = 0.1  # the share of the latest answers with targets that may miss them
PAUSE = 60.0  # seconds before another attempt, if replicas could not be added
START_SECONDS = 600.0  # how long requests wait for the first replica

log = logging.getLogger("personae.actors")


class ReplicaLoad(NamedTuple):
    """`serving` replicas serve, and `starting` load. `waiting`: the seconds that those which serve need for
    the work that waits. `busy`: of how many of them steps took the whole time. `live` sequences have not
    ended. `missed`: the share of the latest answers with latency targets that missed them."""

    serving: int
    starting: int
    waiting: float
    busy: float
    live: int = 0
    missed: float = 0.0


class ScalingPolicy:
    """Decides how many replicas there should be, from `least` to `most`."""

    def __init__(self, least: int, most: int) -> None:
        self.least, self.most = least, most
        self._short_since: float | None = None
        self._calm_since: float | None = None

    def wanted(self, now: float, load: ReplicaLoad) -> int:
        """How many replicas to have from now on: as many as there are, more, or one less."""
        count = load.serving + load.starting
        if not count:
            return max(self.least, int(load.live > 0))
        missing = load.missed > MISSED and load.busy > BUSY * load.serving and not load.starting
        short = (load.waiting > LONGEST_WAIT or missing) and count < self.most
        calm = not load.starting and count > self.least and load.busy <= BUSY * (count - 1)
        calm = calm and load.waiting < LONGEST_WAIT / 2 and load.missed <= MISSED
        self._short_since = _since(self._short_since, now, short)
        self._calm_since = _since(self._calm_since, now, calm and (count > 1 or not load.live))
        if self._short_since is not None and now - self._short_since >= PATIENCE:
            needed = max(ceil(load.serving * load.waiting / LONGEST_WAIT), count + missing)
            return max(count, min(needed, 2 * max(load.serving, 1), self.most))
        if self._calm_since is not None and now - self._calm_since >= CALM:
            self._calm_since = now
            return count - 1
        return min(max(count, self.least), self.most)


def _since(before: float | None, now: float, holds: bool) -> float | None:
    """Since when something holds, which held since `before`."""
    if not holds:
        return None
    return now if before is None else before


class LoadScaler(Actor[Message]):
    """Has the scaler add and remove replicas as the policy decides."""

    def __init__(self, replicas: ReplicaSet, scaler: ReplicaScaler, policy: ScalingPolicy) -> None:
        self._replicas, self._scaler, self._policy = replicas, scaler, policy
        self._computed: dict[int, float] = {}  # seconds of steps, by replica

    async def started(self) -> None:
        """Begin to look."""
        self.start_soon(self._watch)

    async def receive(self, message: Message) -> None:
        """Nobody sends it messages."""
        raise TypeError(f"the load scaler has no message {type(message).__name__}")

    async def _watch(self) -> None:
        before = current_time()
        waiting_since: float | None = None
        self._computing()
        while True:
            with move_on_after(EVERY):
                await self._replicas.asked.wait()
            now = current_time()
            load = self._load(now - before)
            before = now
            wanted, there = self._policy.wanted(now, load), load.serving + load.starting
            if wanted != there and (load.serving or (self._replicas.wakes and not there)):
                await self._scale(wanted, load)
            waits = self._replicas.wakes and load.live > 0 and not load.serving
            waiting_since = _since(waiting_since, now, waits)
            if waiting_since is not None and now - waiting_since > START_SECONDS:
                late = Overloaded(f"No engine has started within {START_SECONDS:g} s.", code="no_engine")
                self._replicas.ingress.tell(NoEngine(late))

    async def _scale(self, wanted: int, load: ReplicaLoad) -> None:
        there = load.serving + load.starting
        log.info("from %d to %d engines: %.1f s of work wait", there, wanted, load.waiting)
        try:
            await self._scaler.scale(wanted)
        except RequestError as error:  # replicas that drain still have their places
            log.info("the number of replicas stays: %s", error.message)
            await sleep(PAUSE if there else EVERY)
            return

    def _load(self, seconds: float) -> ReplicaLoad:
        states = [replica.state for replica in self._replicas.replicas.values()]
        return ReplicaLoad(
            states.count(ReplicaState.UP),
            states.count(ReplicaState.STARTING),
            self._replicas.backlog_seconds(),
            self._computing() / seconds if seconds else 0.0,
            self._replicas.live,
            self._replicas.missed(current_time()),
        )

    def _computing(self) -> float:
        """The seconds of steps since the last call."""
        before = self._computed
        self._computed = {
            index: replica.frontend.stats().counters.step_seconds
            for index, replica in self._replicas.replicas.items()
        }
        return sum(max(total - before.get(index, total), 0.0) for index, total in self._computed.items())
