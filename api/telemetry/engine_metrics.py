"""What `/metrics` shows of the engine: read from it at each scrape."""

from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from operator import attrgetter
from typing import TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from personae.actors.client import EngineClient, EngineStats
from personae.actors.kit.gauges import Gauge
from personae.actors.messages import STEP_TOKENS

_LABELS = ("model_name",)
_QUEUES = "/queue/"  # one per adapter: shown as one, so that the number of series does not follow adapters


_Read = Callable[[EngineStats], float]
_GAUGES: tuple[tuple[str, str, _Read], ...] = (
    ("vllm:num_requests_running", "Sequences in the running batch.", attrgetter("running")),
    ("vllm:num_requests_waiting", "Sequences waiting to run.", attrgetter("waiting")),
    (
        "vllm:kv_cache_usage_perc",
        "Share of KV pages in use; 1 is all of them.",
        lambda stats: stats.pages_used / stats.pages_total if stats.pages_total else 0.0,
    ),
    ("personae:kv_pages", "KV pages there are.", attrgetter("pages_total")),
    ("personae:kv_pages_lent", "KV pages whose memory adapters have.", attrgetter("pages_lent")),
    (
        "personae:fairness_gap",
        "Weighted tokens between the most and the least served of those that wait.",
        attrgetter("fairness_gap"),
    ),
)
_COUNTERS: tuple[tuple[str, str, _Read], ...] = (
    ("vllm:prefix_cache_queries", "Prompt tokens looked up in the cache.", attrgetter("prefix_queries")),
    ("vllm:prefix_cache_hits", "Prompt tokens found in the cache.", attrgetter("prefix_hits")),
    ("vllm:num_preemptions", "Sequences put off for want of pages.", attrgetter("preemptions")),
    ("personae:back_restarts", "Times that the engine died and was started again.", attrgetter("restarts")),
    ("personae:steps", "Steps run.", attrgetter("steps")),
    ("personae:step_tokens", "Tokens computed in steps, prompts included.", attrgetter("tokens")),
    ("personae:jumped_tokens", "Tokens that a grammar forced, and nobody chose.", attrgetter("jumped")),
    ("personae:step_seconds", "Time in steps.", attrgetter("step_seconds")),
    (
        "personae:host_gap_seconds",
        "Time between steps in which the device was idle.",
        attrgetter("host_gap_seconds"),
    ),
)


class EngineCollector(Collector):
    """Turns a snapshot of the engine into metrics."""

    def __init__(self, client: EngineClient, model_name: str) -> None:
        self._client = client
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        """All of them. With several replicas what each of them counts has the label `engine`, empty for what
        waits at none of them."""
        stats = self._client.stats()
        engines: list[tuple[tuple[str, ...], EngineStats]] = [((self._model_name,), stats)]
        labels: tuple[str, ...] = _LABELS
        if stats.replicas:
            labels = (*_LABELS, "engine")
            engines = [((self._model_name, str(index)), each) for index, each in enumerate(stats.replicas)]
        for name, text, read in _GAUGES:
            family = _family(GaugeMetricFamily(name, text, labels=labels), read, engines)
            if stats.replicas and name == "vllm:num_requests_waiting":
                unplaced = stats.waiting - sum(each.waiting for each in stats.replicas)
                family.add_metric((self._model_name, ""), unplaced)
            yield family
        for name, text, read in _COUNTERS:
            yield _family(CounterMetricFamily(name, text, labels=labels), read, engines)
        for name, text, value in (
            ("personae:backlog_seconds", "How long it takes to compute what waits.", stats.backlog_seconds),
            ("personae:ready", "1 when the engine can serve.", float(stats.ready)),
        ):
            gauge = GaugeMetricFamily(name, text, labels=_LABELS)
            gauge.add_metric((self._model_name,), value)
            yield gauge
        if stats.replicas:
            yield from self._replicas(stats)
        parts = CounterMetricFamily("personae:step_part_seconds", "Time in parts of steps.", labels=("part",))
        for part, seconds in stats.timings.items():
            parts.add_metric((part,), seconds)
        yield parts
        yield self._step_tokens(stats)
        yield self._cache(stats)
        yield from _actors(stats.actors)

    def _replicas(self, stats: EngineStats) -> Iterator[Metric]:
        """What only several replicas have."""
        ready = GaugeMetricFamily(
            "personae:engine_ready", "1 when this replica can serve.", labels=(*_LABELS, "engine")
        )
        for index, each in enumerate(stats.replicas):
            ready.add_metric((self._model_name, str(index)), float(each.ready))
        yield ready
        moved = CounterMetricFamily(
            "personae:streams_moved",
            "Streams that went on at another replica when theirs died.",
            labels=_LABELS,
        )
        moved.add_metric((self._model_name,), stats.moved)
        yield moved

    def _step_tokens(self, stats: EngineStats) -> Metric:
        sums = [*accumulate(stats.step_tokens)] or [0] * (len(STEP_TOKENS) + 1)
        buckets = [(str(float(bound)), total) for bound, total in zip(STEP_TOKENS, sums, strict=False)]
        steps = HistogramMetricFamily(
            "vllm:iteration_tokens_total", "Tokens computed in a step, prompts included.", labels=_LABELS
        )
        steps.add_metric((self._model_name,), [*buckets, ("+Inf", sums[-1])], sum_value=stats.tokens)
        return steps

    def _cache(self, stats: EngineStats) -> Metric:
        info = GaugeMetricFamily(
            "vllm:cache_config_info", "The KV cache's sizes.", labels=("block_size", "num_gpu_blocks")
        )
        info.add_metric((str(stats.page_size), str(stats.pages_total)), 1)
        return info


_Family = TypeVar("_Family", GaugeMetricFamily, CounterMetricFamily)


def _family(family: _Family, read: _Read, engines: Iterable[tuple[tuple[str, ...], EngineStats]]) -> _Family:
    for labels, stats in engines:
        family.add_metric(labels, read(stats))
    return family


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
