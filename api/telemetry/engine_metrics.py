"""What `/metrics` shows of the engine: read from it at each scrape."""

from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Any

from msgspec.structs import asdict
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from personae.actors.client import EngineClient, EngineStats
from personae.actors.kit.gauges import Gauge
from personae.engine.stats import STEP_TOKENS, CounterMetric, EngineCounters, GaugeMetric, described

_LABEL = "model_name"
_KINDS = {CounterMetric: CounterMetricFamily, GaugeMetric: GaugeMetricFamily}
_QUEUES = "/queue/"  # one per adapter: shown as one, so that the number of series does not follow adapters


class EngineCollector(Collector):
    """Turns a snapshot of the engine into metrics."""

    def __init__(self, client: EngineClient, model_name: str) -> None:
        self._client = client
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        """All of them."""
        stats = self._client.stats()
        for metric, value in (*described(stats), *described(stats.counters)):
            family = _KINDS[type(metric)](metric.name, metric.help, labels=(metric.label or _LABEL,))
            parts = {self._model_name: value} if metric.label is None else _parts(value)
            for label, number in parts.items():
                family.add_metric((label,), number)
            yield family
        usage = GaugeMetricFamily(
            "vllm:kv_cache_usage_perc", "Share of KV pages in use; 1 is all of them.", labels=(_LABEL,)
        )
        usage.add_metric((self._model_name,), stats.pages_used / max(stats.pages_total, 1))
        yield usage
        yield self._step_tokens(stats.counters)
        yield self._cache(stats)
        yield from _actors(stats.actors)

    def _step_tokens(self, counters: EngineCounters) -> Metric:
        sums = [*accumulate(counters.step_tokens)]
        buckets = [(str(float(bound)), total) for bound, total in zip(STEP_TOKENS, sums, strict=False)]
        steps = HistogramMetricFamily(
            "vllm:iteration_tokens_total", "Tokens computed in a step, prompts included.", labels=(_LABEL,)
        )
        steps.add_metric((self._model_name,), [*buckets, ("+Inf", sums[-1])], sum_value=counters.tokens)
        return steps

    def _cache(self, stats: EngineStats) -> Metric:
        info = GaugeMetricFamily(
            "vllm:cache_config_info", "The KV cache's sizes.", labels=("block_size", "num_gpu_blocks")
        )
        info.add_metric((str(stats.page_size), str(stats.pages_total)), 1)
        return info


def _parts(value: Any) -> dict[str, float]:
    """What a figure with parts has, by the name of the part, or its place."""
    if isinstance(value, tuple):
        return {str(place): number for place, number in enumerate(value)}
    return asdict(value)


def _actors(gauges: Iterable[Gauge]) -> Iterator[Metric]:
    """Mailboxes and restarts by actor. The adapters' queues are one: depths added up, the oldest message."""
    depth = GaugeMetricFamily("personae:mailbox_depth", "Messages waiting.", labels=("actor",))
    oldest = GaugeMetricFamily(
        "personae:mailbox_oldest_seconds", "How long the oldest message has waited.", labels=("actor",)
    )
    restarts = CounterMetricFamily("personae:actor_restarts", "Restarts.", labels=("actor",))
    found: dict[str, tuple[int, float, int]] = {}
    for gauge in gauges:
        head, queue, _ = gauge.path.partition(_QUEUES)
        name = f"{head}/queue" if queue else gauge.path
        depths, age, times = found.get(name, (0, 0.0, 0))
        found[name] = (depths + gauge.depth, max(age, gauge.oldest), times + gauge.restarts)
    for name, (depths, age, times) in found.items():
        depth.add_metric((name,), depths)
        oldest.add_metric((name,), age)
        restarts.add_metric((name,), times)
    yield from (depth, oldest, restarts)
