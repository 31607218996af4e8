"""The metrics of the engine in `/metrics`, read from it at each scrape."""

from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Any

from msgspec.structs import asdict
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from personae.actors.client import EngineClient, EngineStats
from personae.actors.kit.gauges import Gauge
from personae.engine.stats import STEP_TOKENS, CounterMetric, EngineCounters, GaugeMetric, described
from personae.engine.stats import Metric as StatsMetric

_LABEL = "model_name"
_KINDS = {CounterMetric: CounterMetricFamily, GaugeMetric: GaugeMetricFamily}
_QUEUES = "/queue/"  # one per adapter; shown as one, to bound the number of series


_WHOLE = ("personae:ready", "personae:backlog_seconds", "personae:cold_start_seconds")
"""What the server has once, however many replicas there are."""


class EngineCollector(Collector):
    """Turns a snapshot of the engine into metrics."""

    def __init__(self, client: EngineClient, model_name: str) -> None:
        self._client = client
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        """All metrics. With several replicas, the counts of each have the label `engine`. It is empty for
        what waits outside of the replicas."""
        stats = self._client.stats()
        labels: tuple[str, ...] = (_LABEL, "engine") if stats.replicas else (_LABEL,)
        engines: dict[tuple[str, ...], EngineStats] = {(self._model_name,): stats}
        if stats.replicas:
            engines = {(self._model_name, str(index)): each for index, each in stats.replicas.items()}
        shown = {names: [value for _, value in _described(each)] for names, each in engines.items()}
        for place, (metric, total) in enumerate(_described(stats)):
            whole = metric.name in _WHOLE
            named = (metric.label,) if metric.label else (_LABEL,) if whole else labels
            family = _KINDS[type(metric)](metric.name, metric.help, labels=named)
            if metric.label is not None:
                for label, number in _parts(total).items():
                    family.add_metric((label,), number)
            elif whole:
                family.add_metric((self._model_name,), total)
            else:
                for names, values in shown.items():
                    family.add_metric(names, values[place])
            if stats.replicas and metric.name == "vllm:num_requests_waiting":
                unplaced = total - sum(each.waiting for each in stats.replicas.values())
                family.add_metric((self._model_name, ""), unplaced)
            yield family
        usage = GaugeMetricFamily(
            "vllm:kv_cache_usage_perc", "Share of KV pages in use; 1 is all of them.", labels=labels
        )
        for names, each in engines.items():
            usage.add_metric(names, each.pages_used / max(each.pages_total, 1))
        yield usage
        if stats.replicas:
            yield from self._replicas(stats)
        yield self._step_tokens(stats.counters)
        yield self._cache(stats)
        yield from _actors(stats.actors)

    def _replicas(self, stats: EngineStats) -> Iterator[Metric]:
        """Metrics that only several replicas have."""
        ready = GaugeMetricFamily(
            "personae:engine_ready", "1 when this replica can serve.", labels=(_LABEL, "engine")
        )
        for index, each in stats.replicas.items():
            ready.add_metric((self._model_name, str(index)), float(each.ready))
        yield ready
        moved = CounterMetricFamily(
            "personae:streams_moved",
            "Streams that continued at another replica when theirs died or was removed.",
            labels=(_LABEL,),
        )
        moved.add_metric((self._model_name,), stats.moved)
        yield moved
        prefilled = CounterMetricFamily(
            "personae:streams_prefilled",
            "Streams whose prompt was computed by a replica of --prefill-replicas.",
            labels=(_LABEL,),
        )
        prefilled.add_metric((self._model_name,), stats.prefilled)
        yield prefilled
        prefill = GaugeMetricFamily(
            "personae:prefill_engines", "Replicas that only compute prompts now.", labels=(_LABEL,)
        )
        prefill.add_metric((self._model_name,), stats.prefill_engines)
        yield prefill
        changed = CounterMetricFamily(
            "personae:streams_changed_numerics",
            "Streams that continued at another replica whose numbers differ (weights, dtype, processor).",
            labels=(_LABEL,),
        )
        changed.add_metric((self._model_name,), stats.changed)
        yield changed

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


def _described(stats: EngineStats) -> tuple[tuple[StatsMetric, Any], ...]:
    return (*described(stats), *described(stats.counters))


def _parts(value: Any) -> dict[str, float]:
    """The values of a figure with parts, by the part's name or place."""
    if isinstance(value, tuple):
        return {str(place): number for place, number in enumerate(value)}
    return value if isinstance(value, dict) else asdict(value)


def _actors(gauges: Iterable[Gauge]) -> Iterator[Metric]:
    """Mailboxes and restarts by actor. The adapters' queues count as one: the sum of depths, the oldest
    message."""
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
