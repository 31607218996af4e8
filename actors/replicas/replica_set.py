"""Several replicas as one: what the client stands before, and what `/metrics` reads."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace as replace_gauge

import anyio
from msgspec.structs import replace

from personae.actors.client import AdapterUsage, EngineStats
from personae.actors.kit import gauges
from personae.actors.kit.mailbox import Ref
from personae.actors.kit.supervisor import Supervisor
from personae.actors.messages import Message
from personae.actors.replicas.dispatcher import Dispatcher
from personae.actors.replicas.frontend import ReplicaFrontend
from personae.actors.replicas.placement.base import Placement
from personae.actors.replicas.replica import Replica
from personae.engine.scheduling.fairness import FairnessPolicy

_SUMS = (
    "running",
    "waiting",
    "pages_total",
    "pages_used",
    "pages_lent",
    "prefix_queries",
    "prefix_hits",
    "preemptions",
    "steps",
    "step_seconds",
    "host_gap_seconds",
    "tokens",
    "jumped",
)


class ReplicaSet:
    """The dispatcher and its replicas, added to a supervisor before it starts.

    `ready` says of each replica whether its engine core is there. `max_live` bounds the sequences in the
    house, `window` those that an adapter may have waiting in an engine core.
    """

    def __init__(
        self,
        root: Supervisor,
        ready: Sequence[Callable[[], bool]],
        placement: Placement,
        policy: FairnessPolicy,
        *,
        max_live: int,
        window: int,
    ) -> None:
        self._root = root
        self.describe_core: Callable[[], None] = self._describe_cores
        self.lost = anyio.Event()
        self._dispatcher: Dispatcher
        self.ingress: Ref[Message] = root.spawn(
            "dispatcher", self._make_dispatcher, capacity=8 * max_live, restart="permanent"
        )
        self._placement, self._policy, self._max_live = placement, policy, max_live
        self.replicas = [
            Replica(
                index,
                ReplicaFrontend(index, root, self.ingress, ready=each, max_live=max_live, window=window),
            )
            for index, each in enumerate(ready)
        ]

    def _make_dispatcher(self) -> Dispatcher:
        self._dispatcher = Dispatcher(
            self.replicas, self._placement, self._policy, self._max_live, self.lost.set
        )
        return self._dispatcher

    def _describe_cores(self) -> None:
        """Have every engine core say more of itself in the log."""
        for replica in self.replicas:
            replica.frontend.describe_core()

    def actors(self) -> list[gauges.Gauge]:
        """What every actor is doing, those of the engine cores with their replica's name."""
        found = list(gauges.read(self._root))
        for replica in self.replicas:
            name = f"engine-{replica.index}"
            found += [
                replace_gauge(gauge, path=f"{name}/{gauge.path}") for gauge in replica.frontend.core_actors
            ]
        return found

    def stats(self) -> EngineStats:
        """What the engines are doing now: each, and all together."""
        each = tuple(replica.frontend.stats() for replica in self.replicas)
        dispatcher = self._dispatcher
        waiting = [log.adapter for log in dispatcher.waiting()]
        total = together(each)
        usage = replace(
            total.adapters,
            waiting=dict(
                Counter(total.adapters.waiting) + Counter(adapter for adapter in waiting if adapter)
            ),
        )
        return replace(
            total,
            waiting=total.waiting + len(waiting),
            adapters=usage,
            backlog_seconds=dispatcher.backlog_seconds(),
            actors=tuple(self.actors()),
            moved=dispatcher.moved,
            replicas=each,
        )


def together(each: Sequence[EngineStats]) -> EngineStats:
    """Several engines as one: sums, and the widest fairness gap."""
    usages = [stats.adapters for stats in each]
    return EngineStats(
        ready=any(stats.ready for stats in each),
        restarts=sum(max(stats.restarts, 0) for stats in each),
        fairness_gap=max(stats.fairness_gap for stats in each),
        page_size=max(stats.page_size for stats in each),
        step_tokens=tuple(map(sum, zip(*(stats.step_tokens for stats in each), strict=False))),
        timings=_sum(stats.timings for stats in each),
        adapters=AdapterUsage(
            device=sum(usage.device for usage in usages),
            host=sum(usage.host for usage in usages),
            host_bytes=sum(usage.host_bytes for usage in usages),
            line=sum(usage.line for usage in usages),
            evictions=sum(usage.evictions for usage in usages),
            yields=sum(usage.yields for usage in usages),
            loads=_sum(usage.loads for usage in usages),
            load_seconds=_sum(usage.load_seconds for usage in usages),
            running=dict(sum((Counter(usage.running) for usage in usages), Counter())),
            waiting=dict(sum((Counter(usage.waiting) for usage in usages), Counter())),
        ),
        **{name: sum(getattr(stats, name) for stats in each) for name in _SUMS},
    )


def _sum(parts: Iterable[dict[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            total[name] = total.get(name, 0.0) + value
    return total
