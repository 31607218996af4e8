"""`/metrics` of adapters: who runs and waits, as gateways read it, and where adapters are held."""

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from personae.actors.client import AdapterStats, EngineClient, ModelCard
from personae.lora.mix import parts_of

_KNOWN = 4096  # digests whose names are kept
_LISTED = 256  # names in one label


class AdapterNames:
    """Digests by the names under which they were asked for last. `label` bounds the names that are told."""

    def __init__(self, label: Callable[[str], str]) -> None:
        self._label = label
        self._names: OrderedDict[str, str] = OrderedDict()

    def learn(self, card: ModelCard) -> None:
        """A request asks for it."""
        if card.adapter is not None and parts_of(card.adapter) is None:
            self._names[card.adapter] = card.name
            self._names.move_to_end(card.adapter)
            if len(self._names) > _KNOWN:
                self._names.popitem(last=False)

    def of(self, digest: str) -> str:
        """Its name; "mix" for several at once."""
        if parts_of(digest) is not None:
            return "mix"
        name = self._names.get(digest)
        return digest[:12] if name is None else name

    def count(self, sequences: dict[str, int]) -> Counter[str]:
        """Sequences by name as a label."""
        found: Counter[str] = Counter()
        for digest, number in sequences.items():
            found[self._label(self.of(digest))] += number
        return found

    def list(self, sequences: dict[str, int]) -> str:
        """The names, separated by commas, those with most sequences if there are too many."""
        most = sorted(sequences, key=lambda digest: (-sequences[digest], digest))[:_LISTED]
        return ",".join(sorted({self.of(digest) for digest in most}))


class AdapterCollector(Collector):
    """Turns a snapshot of the engine into metrics, at each scrape: label sets that no longer hold are gone.

    `max_adapters`, if known, is how many the device can hold; `registered` counts those on disk.
    """

    def __init__(
        self,
        client: EngineClient,
        names: AdapterNames,
        max_adapters: int | None,
        registered: Callable[[], int] | None,
    ) -> None:
        self._client = client
        self._names = names
        self._max_adapters = max_adapters
        self._registered = registered

    def collect(self) -> Iterator[Metric]:
        """The families of one scrape."""
        stats = self._client.stats().adapters
        yield from _traffic(stats, self._names, self._max_adapters)
        yield from _residency(stats, None if self._registered is None else self._registered())


def _traffic(stats: AdapterStats, names: AdapterNames, max_adapters: int | None) -> Iterator[Metric]:
    info = GaugeMetricFamily(
        "vllm:lora_requests_info",
        "Adapters that run and wait; the value is the Unix time of the scrape.",
        labels=("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
    )
    most = "" if max_adapters is None else str(max_adapters)
    info.add_metric((most, names.list(stats.running), names.list(stats.waiting)), time.time())
    yield info
    sequences = GaugeMetricFamily(
        "personae:adapter_sequences", "Live sequences, by adapter and state.", labels=("adapter", "state")
    )
    for state, counts in (("running", stats.running), ("waiting", stats.waiting)):
        for name, number in names.count(counts).items():
            sequences.add_metric((name, state), number)
    yield sequences


def _residency(stats: AdapterStats, registered: int | None) -> Iterator[Metric]:
    held = GaugeMetricFamily("personae:adapters_held", "Adapters, by where they are.", labels=("place",))
    for place, number in (("device", stats.device), ("host", stats.host), ("disk", registered)):
        if number is not None:
            held.add_metric((place,), number)
    yield held
    for name, text, value in (
        ("personae:adapter_host_bytes", "Bytes of the adapters that are kept on the host.", stats.host_bytes),
        ("personae:adapters_in_line", "Adapters that wait for their place on the device.", stats.line),
    ):
        yield GaugeMetricFamily(name, text, value=value)
    loads = CounterMetricFamily(
        "personae:adapter_loads", "Adapters brought to the device, by where they were.", labels=("source",)
    )
    seconds = CounterMetricFamily(
        "personae:adapter_load_seconds",
        "Time from being asked for to being on the device, by where they were.",
        labels=("source",),
    )
    for source in ("device", "host", "disk"):
        loads.add_metric((source,), stats.loads.get(source, 0))
        seconds.add_metric((source,), stats.load_seconds.get(source, 0.0))
    yield loads
    yield seconds
    for name, text, value in (
        ("personae:adapter_evictions", "Adapters that left the device for others.", stats.evictions),
        ("personae:adapter_yields", "Times that an adapter in use was told to make room.", stats.yields),
    ):
        yield CounterMetricFamily(name, text, value=value)
