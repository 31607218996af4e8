"""Counts running and waiting sequences and their tokens, by tenant and adapter."""

from collections import Counter, OrderedDict
from collections.abc import Iterable

from personae.actors.client import QueueStats
from personae.actors.frontend.live_stream import LiveStream
from personae.engine.sequence import SequenceLog

MOST_KEYS = 256  # whose ended sequences are counted, the latest ones

QueueKey = tuple[str, str | None]
"""Tenant and adapter."""


class EndedTokens:
    """The tokens of sequences that have ended, for the most recently used tenants and adapters."""

    def __init__(self) -> None:
        self.counts: OrderedDict[QueueKey, int] = OrderedDict()

    def count(self, live: LiveStream) -> None:
        """Count the tokens of a sequence that has ended."""
        key = live.log.tenant, live.log.adapter
        self.counts[key] = self.counts.get(key, 0) + live.tokens
        self.counts.move_to_end(key)
        if len(self.counts) > MOST_KEYS:
            self.counts.popitem(last=False)


def queue_stats(live: Iterable[LiveStream], ended: EndedTokens) -> tuple[QueueStats, ...]:
    """Return the figures of each tenant and adapter."""
    figures = {key: [0, 0, tokens] for key, tokens in ended.counts.items()}
    for each in live:
        found = figures.setdefault((each.log.tenant, each.log.adapter), [0, 0, 0])
        found[not each.on_device] += 1
        found[2] += each.tokens
    return tuple(QueueStats(*key, *found) for key, found in figures.items())


def merged(parts: Iterable[Iterable[QueueStats]], waiting: Iterable[SequenceLog]) -> tuple[QueueStats, ...]:
    """Add up the figures of several engines, and `waiting` sequences that are at none of them."""
    figures: dict[QueueKey, list[int]] = {}
    for part in parts:
        for each in part:
            found = figures.setdefault((each.tenant, each.adapter), [0, 0, 0])
            found[0] += each.running
            found[1] += each.waiting
            found[2] += each.tokens
    for log in waiting:
        figures.setdefault((log.tenant, log.adapter), [0, 0, 0])[1] += 1
    return tuple(QueueStats(*key, *found) for key, found in figures.items())


def by_adapter(queues: Iterable[QueueStats]) -> tuple[Counter[str], Counter[str]]:
    """Count running and waiting sequences by their adapter's digest."""
    running, waiting = Counter[str](), Counter[str]()
    for each in queues:
        if each.adapter is not None:
            if each.running:
                running[each.adapter] += each.running
            if each.waiting:
                waiting[each.adapter] += each.waiting
    return running, waiting
