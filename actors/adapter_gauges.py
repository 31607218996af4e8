"""What is to be told of adapters: whose sequences run and wait, and where adapters are held."""

from collections import Counter

from msgspec.structs import replace

from personae.actors.messages import Holdings


class AdapterGauges:
    """Front's view, kept by the streamer. Counters of `holdings` go on over the lives of Back.

    `running` and `waiting` count sequences by adapter digest; the base is not among them.
    """

    def __init__(self) -> None:
        self.holdings = Holdings()
        self.running: Counter[str] = Counter()
        self.waiting: Counter[str] = Counter()
        self._before = Holdings()
        self._adapter_of: dict[str, str] = {}  # of live sequences with an adapter
        self._started: set[str] = set()

    def wait(self, id: str, adapter: str | None) -> None:
        """A sequence has come, or comes again in a new life of Back."""
        if adapter is not None:
            self.leave(id)
            self._adapter_of[id] = adapter
            self.waiting[adapter] += 1

    def start(self, id: str) -> None:
        """It is computed from now on."""
        adapter = self._adapter_of.get(id)
        if adapter is not None and id not in self._started:
            self._started.add(id)
            self._less(self.waiting, adapter)
            self.running[adapter] += 1

    def leave(self, id: str) -> None:
        """It is over."""
        adapter = self._adapter_of.pop(id, None)
        if adapter is not None:
            self._less(self.running if id in self._started else self.waiting, adapter)
            self._started.discard(id)

    def update(self, holdings: Holdings) -> None:
        """The store's figures of this life."""
        before = self._before
        self.holdings = replace(
            holdings,
            evictions=holdings.evictions + before.evictions,
            yields=holdings.yields + before.yields,
            loads=_sums(holdings.loads, before.loads),
            load_seconds=_sums(holdings.load_seconds, before.load_seconds),
        )

    def begin_life(self) -> None:
        """A new life of Back holds nothing, and counts from nought."""
        self._before = replace(self.holdings, device=0, host=0, host_bytes=0, line=0)
        self.holdings = self._before

    def _less(self, counts: Counter[str], adapter: str) -> None:
        counts[adapter] -= 1
        if not counts[adapter]:
            del counts[adapter]


def _sums(these: dict[str, float], those: dict[str, float]) -> dict[str, float]:
    return {name: these.get(name, 0) + those.get(name, 0) for name in {**those, **these}}
