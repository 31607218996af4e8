"""Who runs and waits is counted by adapter, whatever comes first; counters survive a life of Back."""

from hypothesis import given
from hypothesis import strategies as st

from personae.actors.adapter_gauges import AdapterGauges
from personae.actors.messages import Holdings

IDS = st.integers(0, 5).map(str)


@given(st.lists(st.tuples(st.sampled_from(["wait", "start", "leave"]), IDS)))
def test_counts_are_those_of_the_sequences_that_live(news: list[tuple[str, str]]) -> None:
    gauges = AdapterGauges()
    truth: dict[str, str] = {}
    for what, id in news:
        if what == "wait":
            gauges.wait(id, f"adapter {int(id) % 2}")
            truth[id] = "waiting"
        elif what == "start":
            gauges.start(id)
            if id in truth:
                truth[id] = "running"
        else:
            gauges.leave(id)
            truth.pop(id, None)
    for state, counts in (("waiting", gauges.waiting), ("running", gauges.running)):
        expected = [f"adapter {int(id) % 2}" for id, where in truth.items() if where == state]
        assert sorted(counts.elements()) == sorted(expected)


def test_the_base_is_not_counted() -> None:
    gauges = AdapterGauges()
    gauges.wait("a", None)
    gauges.start("a")
    gauges.leave("a")
    assert not gauges.running
    assert not gauges.waiting


def test_counters_go_on_over_the_lives_of_back_and_places_are_empty_at_first() -> None:
    gauges = AdapterGauges()
    gauges.update(Holdings(3, 4, 500, 1, 7, 2, {"disk": 3}, {"disk": 1.5}))
    gauges.begin_life()
    assert gauges.holdings == Holdings(0, 0, 0, 0, 7, 2, {"disk": 3}, {"disk": 1.5})
    gauges.update(Holdings(1, 1, 100, 0, 1, 0, {"disk": 1, "host": 2}, {"disk": 0.5, "host": 0.25}))
    assert gauges.holdings.evictions == 8
    assert gauges.holdings.loads == {"disk": 4, "host": 2}
    assert gauges.holdings.load_seconds == {"disk": 2.0, "host": 0.25}
    assert gauges.holdings.device == 1
