"""`/metrics` of writes to the data directory that failed."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from personae.api.tenants.flusher import WriteFailures


class WriteFailureCollector(Collector):
    """Shows the counts of a data directory."""

    def __init__(self, failures: WriteFailures) -> None:
        self._failures = failures

    def collect(self) -> Iterator[Metric]:
        """The family of one scrape."""
        family = CounterMetricFamily(
            "personae:write_failures",
            "Writes to the data directory or the database that failed, by what was to be written.",
            labels=("what",),
        )
        for what, count in sorted(self._failures.counts().items()):
            family.add_metric((what,), count)
        yield family
