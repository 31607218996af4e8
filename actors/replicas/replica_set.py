"""Several replicas as one: what the client talks to, and what `/metrics` reads."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace as replace_gauge
from functools import reduce
from pathlib import Path
from typing import Any

import anyio
from msgspec.structs import replace

from personae.actors.client import EngineStats
from personae.actors.frontend.queue_stats import merged
from personae.actors.kit import gauges
from personae.actors.kit.mailbox import Ref
from personae.actors.kit.signal import Signal
from personae.actors.kit.supervisor import Supervisor
from personae.actors.messages import AdapterStats, KeepLoaded, KeepSession, Message
from personae.actors.replicas.cold_start import ColdStart
from personae.actors.replicas.dispatcher import Dispatcher, LongPrompts
from personae.actors.replicas.frontend import ReplicaFrontend
from personae.actors.replicas.placement.base import Placement
from personae.actors.replicas.replica import Replica
from personae.engine.scheduling.fairness import FairnessPolicy
from personae.engine.scheduling.step_time import StepCost
from personae.engine.stats import added


class ReplicaSet:
    """The dispatcher, added to a supervisor before it starts, and its replicas, which come and go.

    `max_live` bounds the live sequences of all replicas. Up to `prefill` replicas only compute prompts.
    Engines ask each other for pages at sockets in `page_folder`. `window` bounds the sequences of one adapter
    and tenant that wait in one engine core.

    If it `wakes`, a request that finds no replica has one started. `asked` is set then, and `cold_start` says
    how long that takes.
    """

    def __init__(
        self,
        root: Supervisor,
        placement: Placement,
        policy: FairnessPolicy,
        *,
        max_live: int,
        window: int,
        prefill: int = 0,
        page_folder: Path | None = None,
        wakes: bool = False,
    ) -> None:
        self.wakes, self.asked, self.cold_start = wakes, Signal(), ColdStart()
        self._root = root
        self._prefill, self._page_folder = prefill, page_folder
        self.describe_core: Callable[[], None] = self._describe_cores
        self.lost = anyio.Event()
        self._dispatcher: Dispatcher
        self.ingress: Ref[Message] = root.spawn(
            "dispatcher", self._make_dispatcher, capacity=8 * max_live, restart="permanent"
        )
        self._placement, self._policy, self._max_live, self._window = placement, policy, max_live, window
        self._step_cost = StepCost()
        self._removed = EngineStats(ready=False)  # totals of removed replicas
        self.next_index = 0
        self.replicas: dict[int, Replica] = {}
        self._kept_loaded = KeepLoaded(())

    def add(self, ready: Callable[[], bool]) -> Replica:
        """Add a replica; `ready` says whether its engine core serves."""
        index = self.next_index
        self.next_index += 1
        frontend = ReplicaFrontend(
            index,
            self._root,
            self.ingress,
            self._step_cost,
            ready=ready,
            max_live=self._max_live,
            window=self._window,
        )
        frontend.keep_loaded(self._kept_loaded)
        replica = self.replicas[index] = Replica(
            index,
            frontend,
            prefill=sum(other.prefill for other in self.replicas.values()) < self._prefill,
        )
        return replica

    def page_socket(self, index: int) -> Path | None:
        """Where a replica's engine gives pages to the others; None: it does not."""
        return None if self._page_folder is None else self._page_folder / str(index)

    def remove(self, replica: Replica) -> None:
        """Remove a replica that has no streams. Its counts stay in the totals."""
        stats = replica.frontend.stats()
        self._removed = EngineStats(
            counters=self._removed.counters + stats.counters,
            adapters=added(self._removed.adapters, counted(stats.adapters)),
            restarts=self._removed.restarts + max(stats.restarts, 0),
            ready=False,
        )
        del self.replicas[replica.index]

    def _make_dispatcher(self) -> Dispatcher:
        self._dispatcher = Dispatcher(
            self.replicas, self._placement, self._policy, self._max_live, self.asked, self.cold_start
        )
        return self._dispatcher

    def _describe_cores(self) -> None:
        """Have every engine core write more about itself to the log."""
        for replica in self.replicas.values():
            replica.frontend.describe_core()

    def keep_session(self, message: KeepSession) -> None:
        """Tell every engine core: the session's requests may have gone to several."""
        for replica in self.replicas.values():
            replica.frontend.keep_session(message)

    def keep_loaded(self, message: KeepLoaded) -> None:
        """Tell every engine core, and those of later replicas."""
        self._kept_loaded = message
        for replica in self.replicas.values():
            replica.frontend.keep_loaded(message)

    def actors(self) -> list[gauges.Gauge]:
        """What every actor is doing. Paths in engine cores begin with their replica's name."""
        found = list(gauges.read(self._root))
        for replica in self.replicas.values():
            name = f"engine-{replica.index}"
            found += [
                replace_gauge(gauge, path=f"{name}/{gauge.path}") for gauge in replica.frontend.core_actors
            ]
        return found

    def backlog_seconds(self) -> float:
        """How long the replicas need for the work that waits."""
        return self._dispatcher.backlog_seconds()

    @property
    def live(self) -> int:
        """How many sequences have not ended."""
        return self._dispatcher.live

    @property
    def long_prompts(self) -> LongPrompts:
        """Long prompts: how many have an engine, how long these take, and how long the waiting ones do."""
        return self._dispatcher.long_prompts

    def missed(self, now: float) -> float:
        """The share of the latest answers with latency targets that missed them."""
        return self._dispatcher.goodput.missed(now)

    def stats(self) -> EngineStats:
        """What the engines are doing now: each one, and all together."""
        each = {index: replica.frontend.stats() for index, replica in self.replicas.items()}
        dispatcher = self._dispatcher
        logs = list(dispatcher.waiting())
        waiting = Counter(log.adapter for log in logs if log.adapter is not None)
        total = together((*each.values(), self._removed))
        return replace(
            total,
            ready=total.ready or (self.wakes and not dispatcher.refuses),
            cold_start_seconds=self.cold_start.seconds,
            waiting=total.waiting + len(logs),
            adapter_waiting=added(total.adapter_waiting, dict(waiting)),
            queues=merged((stats.queues for stats in each.values()), logs),
            backlog_seconds=dispatcher.backlog_seconds(),
            actors=tuple(self.actors()),
            moved=dispatcher.moved,
            prefilled=dispatcher.prefilled,
            prefill_engines=sum(replica.prefill for replica in self.replicas.values()),
            changed=dispatcher.changed,
            replicas=each,
        )


def counted(stats: AdapterStats) -> AdapterStats:
    """Return the counters of an adapter store that has ended, without its current state."""
    return replace(stats, device=0, kept_loaded=0, host=0, host_bytes=0, line=0)


def together(each: Sequence[EngineStats]) -> EngineStats:
    """Combine several engines' figures: sums, and the largest fairness gap. Figures that belong to one engine
    are left out."""
    own: dict[str, Any] = {"actors": (), "replicas": {}, "queues": (), "recent_steps": ()}
    total = reduce(added, (replace(stats, **own) for stats in each))
    return replace(
        total,
        ready=any(stats.ready for stats in each),
        restarts=sum(max(stats.restarts, 0) for stats in each),
        fairness_gap=max(stats.fairness_gap for stats in each),
        page_size=max(stats.page_size for stats in each),
    )
