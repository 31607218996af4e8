"""One type carries what an engine counts from the step to `/metrics`."""

from typing import Annotated

import msgspec
from prometheus_client import CollectorRegistry, generate_latest

from personae.actors.client import EngineStats
from personae.actors.frontend.streamer import LatestStats
from personae.actors.messages import AdapterStats
from personae.api.telemetry.engine_metrics import EngineCollector
from personae.engine.stats import (
    STEP_TOKENS,
    CounterMetric,
    EngineCounters,
    SchedulerStats,
    StepTimings,
    added,
    described,
)


def test_a_step_is_counted_in_the_first_bucket_that_it_fits() -> None:
    counters = EngineCounters()
    for tokens in (0, 1, 2, 8, 9, STEP_TOKENS[-1], STEP_TOKENS[-1] + 1):
        counters.count_tokens(tokens)
    assert counters.step_tokens == (2, 2, 1, *[0] * (len(STEP_TOKENS) - 4), 1, 1)
    assert counters.tokens == 20 + 2 * STEP_TOKENS[-1] + 1


def test_every_field_of_two_counters_is_added_up() -> None:
    one = EngineCounters(1, 2, 3, 4, 5, 6, 7.5, 8.5, StepTimings(1, 2, 3, 4, 5), tuple(range(14)))
    assert one + one == EngineCounters(
        2, 4, 6, 8, 10, 12, 15.0, 17.0, StepTimings(2, 4, 6, 8, 10), tuple(range(0, 28, 2))
    )
    loads = added(AdapterStats(loads={"disk": 1, "host": 2}), AdapterStats(loads={"disk": 3, "device": 4}))
    assert loads.loads == {"disk": 4, "host": 2, "device": 4}


def test_counters_go_on_over_the_epochs_of_the_engine_core_and_gauges_do_not() -> None:
    latest = LatestStats()
    latest.begin_epoch(SchedulerStats(pages_total=9))
    latest.hold(AdapterStats(device=2, evictions=3, loads={"disk": 2}))
    for steps in (1, 2):
        latest.update(SchedulerStats(running=steps, pages_total=9, counters=EngineCounters(steps=steps)))
    latest.begin_epoch(SchedulerStats(pages_total=9))
    assert (latest.stats.running, latest.stats.counters.steps, latest.restarts) == (0, 2, 1)
    assert latest.adapter_stats == AdapterStats(evictions=3, loads={"disk": 2})
    latest.update(SchedulerStats(counters=EngineCounters(steps=5)))
    latest.hold(AdapterStats(device=1, evictions=1, loads={"disk": 1, "host": 1}))
    assert latest.stats.counters.steps == 7
    assert latest.adapter_stats == AdapterStats(device=1, evictions=4, loads={"disk": 3, "host": 1})


class MoreCounters(EngineCounters):
    drafted: Annotated[int, CounterMetric("personae:drafted_tokens", "Tokens that were proposed.")] = 0


class Client:
    def __init__(self, stats: EngineStats) -> None:
        self.stats = lambda: stats


def test_a_new_field_is_all_that_a_new_counter_takes() -> None:
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(MoreCounters(drafted=3)), type=MoreCounters)
    stats = EngineStats(counters=sent + MoreCounters(drafted=4, steps=1))
    registry = CollectorRegistry()
    registry.register(EngineCollector(Client(stats), "base"))  # type: ignore[arg-type]  # as far as is needed
    shown = generate_latest(registry).decode()
    assert 'personae:drafted_tokens_total{model_name="base"} 7.0' in shown
    assert 'personae:steps_total{model_name="base"} 1.0' in shown
    assert "Tokens that were proposed." in shown


def test_no_two_fields_have_the_same_metric() -> None:
    stats = EngineStats()
    names = [metric.name for each in (stats, stats.counters) for metric, _ in described(each)]
    assert len(names) == len(set(names)) > 15
