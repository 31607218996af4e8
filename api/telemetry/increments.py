"""Counters and histograms of several processes as one: each says by how much its own have grown."""

from collections.abc import Iterator

import msgspec
from prometheus_client.core import Metric
from prometheus_client.registry import CollectorRegistry
from prometheus_client.samples import Sample

_SUMMED = ("counter", "histogram")
_LEFT_OUT = "_created"
_Key = tuple[str, tuple[tuple[str, str], ...]]


class Increment(msgspec.Struct, frozen=True, array_like=True):
    """By how much a sample has grown: its family, its own name, its labels."""

    family: str
    name: str
    labels: tuple[tuple[str, str], ...]
    amount: float


class IncrementReader:
    """Finds what has grown in a registry since the last look."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._seen: dict[_Key, float] = {}

    def take(self) -> tuple[Increment, ...]:
        """The increments since the last call."""
        found = []
        for family in self._registry.collect():
            for sample in family.samples:
                if sample.name.endswith(_LEFT_OUT):
                    continue
                key = (sample.name, tuple(sample.labels.items()))
                grown = sample.value - self._seen.get(key, 0.0)
                if grown or key not in self._seen:
                    self._seen[key] = sample.value
                    found.append(Increment(family.name, *key, grown))
        return tuple(found)


class Merged:
    """A registry whose counters and histograms also have what other processes counted."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._added: dict[str, dict[_Key, float]] = {}

    def add(self, increments: tuple[Increment, ...]) -> None:
        """Add what another process counted."""
        for each in increments:
            family = self._added.setdefault(each.family, {})
            key = (each.name, each.labels)
            family[key] = family.get(key, 0.0) + each.amount

    def collect(self) -> Iterator[Metric]:
        """All families, merged."""
        for family in self._registry.collect():
            yield self.merged(family)

    def merged(self, family: Metric) -> Metric:
        """A family with what other processes counted of it."""
        added = self._added.get(family.name)
        if not added or family.type not in _SUMMED:
            return family
        sums = dict(added)
        samples = []
        for sample in family.samples:
            more = sums.pop((sample.name, tuple(sample.labels.items())), 0.0)
            samples.append(sample._replace(value=sample.value + more) if more else sample)
        samples += [Sample(name, dict(labels), value) for (name, labels), value in sums.items()]
        whole = Metric(family.name, family.documentation, family.type, family.unit)
        whole.samples = samples
        return whole
