"""`/metrics` of adapters: which run and wait, in the form that gateways read, and where adapters are held."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from personae.actors.client import EngineClient, EngineStats
from personae.actors.messages import AdapterStats
from personae.api.tenants.store import DEFAULT_TENANT
from personae.lora.mix_id import parts_of

_LISTED = 256  # names in one label


class RegisteredAdapters(Protocol):
    """What the metrics need from the registry."""

    def names_of(self, digest: str) -> set[str]:
        """The names of an adapter's content."""

    def count(self) -> int:
        """The number of all tenants' adapters."""


class AdapterCollector(Collector):
    """Turns a snapshot of the engine into metrics at each scrape. Label sets that no longer apply disappear.

    `label` limits the names that are labels. `max_adapters`, if known, is how many the device can hold.
    `registered` are those that were added while the server runs.
    """

    def __init__(
        self,
        client: EngineClient,
        label: Callable[[str], str],
        max_adapters: int | None,
        registered: RegisteredAdapters | None,
    ) -> None:
        self._client = client
        self._label = label
        self._most = "" if max_adapters is None else str(max_adapters)
        self._registered = registered

    def collect(self) -> Iterator[Metric]:
        """The families of one scrape."""
        stats = self._client.stats()
        yield self._requests(stats)
        sequences = GaugeMetricFamily(
            "personae:adapter_sequences",
            "Live sequences, by adapter and state.",
            labels=("adapter", "state"),
        )
        for state, counts in (("running", stats.adapter_running), ("waiting", stats.adapter_waiting)):
            found: Counter[str] = Counter()
            for digest, number in counts.items():
                found[self._label(self.names(digest)[0])] += number
            for name, number in found.items():
                sequences.add_metric((name, state), number)
        yield sequences
        yield from _residency(stats.adapters, None if self._registered is None else self._registered.count())

    def _requests(self, stats: EngineStats) -> Metric:
        """One series, or one for each replica."""
        labels = ("max_lora", "running_lora_adapters", "waiting_lora_adapters")
        info = GaugeMetricFamily(
            "vllm:lora_requests_info",
            "Adapters that run and wait; the value is the Unix time of the scrape.",
            labels=(*labels, "engine") if stats.replicas else labels,
        )
        engines: dict[tuple[str, ...], EngineStats] = {(): stats}
        if stats.replicas:
            engines = {(str(index),): each for index, each in stats.replicas.items()}
        for engine, each in engines.items():
            values = (self._most, self._list(each.adapter_running), self._list(each.adapter_waiting))
            info.add_metric((*values, *engine), time.time())
        return info

    def _list(self, sequences: dict[str, int]) -> str:
        """The names, separated by commas. If there are too many, those with the most sequences."""
        most = sorted(sequences, key=lambda digest: (-sequences[digest], digest))[:_LISTED]
        return ",".join(sorted({name for digest in most for name in self.names(digest)}))

    def names(self, digest: str) -> list[str]:
        """An adapter's names as requests have them, at least one; "mix" for several at once."""
        if parts_of(digest) is not None:
            return ["mix"]
        cards = self._client.models(DEFAULT_TENANT).values()
        names = {card.name for card in cards if card.adapter == digest}
        if not names and self._registered is not None:
            names = self._registered.names_of(digest)
        return sorted(names) or [digest[:12]]


def _residency(stats: AdapterStats, registered: int | None) -> Iterator[Metric]:
    held = GaugeMetricFamily("personae:adapters_held", "Adapters, by where they are.", labels=("place",))
    for place, number in (("device", stats.device), ("host", stats.host), ("disk", registered)):
        if number is not None:
            held.add_metric((place,), number)
    yield held
    for name, text, value in (
        ("personae:adapter_host_bytes", "Bytes of the adapters that are kept on the host.", stats.host_bytes),
        ("personae:adapters_kept_loaded", "Adapters on the device that stay there.", stats.kept_loaded),
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
        ("personae:adapter_yields", "Times that an adapter in use had to make room.", stats.yields),
    ):
        yield CounterMetricFamily(name, text, value=value)
