"""What `/metrics` shows of the engine: read from it at each scrape."""

from collections.abc import Iterable, Iterator
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from personae.actors.client import EngineClient, EngineStats
from personae.actors.kit.gauges import Gauge
from personae.actors.messages import STEP_TOKENS

_LABELS = ("model_name",)
_QUEUES = "/queue/"  # one per adapter: shown as one, so that the number of series does not follow adapters


class EngineCollector(Collector):
    """Turns a snapshot of the engine into metrics."""

    def __init__(self, client: EngineClient, model_name: str) -> None:
        self._client = client
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        """All of them."""
        stats = self._client.stats()
        used = stats.pages_used / stats.pages_total if stats.pages_total else 0.0
        for name, text, value in (
            ("vllm:num_requests_running", "Sequences in the running batch.", stats.running),
            ("vllm:num_requests_waiting", "Sequences waiting to run.", stats.waiting),
            ("vllm:kv_cache_usage_perc", "Share of KV pages in use; 1 is all of them.", used),
            ("personae:ready", "1 when the engine can serve.", float(stats.ready)),
            ("personae:backlog_seconds", "How long it takes to compute what waits.", stats.backlog_seconds),
            ("personae:kv_pages", "KV pages there are.", stats.pages_total),
            ("personae:kv_pages_lent", "KV pages whose memory adapters have.", stats.pages_lent),
            (
                "personae:fairness_gap",
                "Weighted tokens between the most and the least served of those that wait.",
                stats.fairness_gap,
            ),
        ):
            yield self._family(GaugeMetricFamily(name, text, labels=_LABELS), value)
        for name, text, value in (
            ("vllm:prefix_cache_queries", "Prompt tokens looked up in the cache.", stats.prefix_queries),
            ("vllm:prefix_cache_hits", "Prompt tokens found in the cache.", stats.prefix_hits),
            ("vllm:num_preemptions", "Sequences put off for want of pages.", stats.preemptions),
            ("personae:back_restarts", "Times that the engine died and was started again.", stats.restarts),
            ("personae:steps", "Steps run.", stats.steps),
            ("personae:step_tokens", "Tokens computed in steps, prompts included.", stats.tokens),
            ("personae:jumped_tokens", "Tokens that a grammar forced, and nobody chose.", stats.jumped),
            ("personae:step_seconds", "Time in steps.", stats.step_seconds),
            (
                "personae:host_gap_seconds",
                "Time between steps in which the device was idle.",
                stats.host_gap_seconds,
            ),
        ):
            yield self._family(CounterMetricFamily(name, text, labels=_LABELS), value)
        parts = CounterMetricFamily("personae:step_part_seconds", "Time in parts of steps.", labels=("part",))
        for part, seconds in stats.timings.items():
            parts.add_metric((part,), seconds)
        yield parts
        yield self._step_tokens(stats)
        yield self._cache(stats)
        yield from _actors(stats.actors)

    def _family(self, family: GaugeMetricFamily | CounterMetricFamily, value: float) -> Metric:
        family.add_metric((self._model_name,), value)
        return family

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
