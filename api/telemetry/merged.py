"""Shows several engines as one in `/metrics`: a family appears once, with the samples of all."""

from collections.abc import Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector


class MergedCollector(Collector):
    """A collector of collectors that have the same families. Where two have the same sample, the first's is
    shown."""

    def __init__(self, first: Collector) -> None:
        self._parts = [first]

    def add(self, part: Collector) -> None:
        """Show one more collector."""
        self._parts.append(part)

    def collect(self) -> Iterator[Metric]:
        """The families of one scrape."""
        if len(self._parts) == 1:
            yield from self._parts[0].collect()
            return
        merged: dict[str, Metric] = {}
        seen: set[tuple[str, frozenset[tuple[str, str]]]] = set()
        for part in self._parts:
            for family in part.collect():
                named = {(each.name, frozenset(each.labels.items())): each for each in family.samples}
                new = [sample for key, sample in named.items() if key not in seen]
                seen |= named.keys()
                if family.name in merged:
                    merged[family.name].samples.extend(new)
                else:
                    merged[family.name] = family
        yield from merged.values()
