"""Tokens and sequences by tenant and adapter."""

from personae.actors.client import QueueStats
from personae.actors.frontend.inbox import Inbox
from personae.actors.frontend.live_stream import LiveStream
from personae.actors.frontend.queue_stats import MOST_KEYS, EndedTokens, by_adapter, merged, queue_stats
from personae.engine.params import SamplingParams
from personae.engine.sequence import SequenceLog


def live(tenant: str, adapter: str | None, emitted: int = 0) -> LiveStream:
    params = SamplingParams(max_tokens=9, seed=0)
    log = SequenceLog("one", (7, 8, 9), 3, params, adapter=adapter, tenant=tenant)
    stream = LiveStream(log, Inbox(), 0.0)
    if emitted:
        stream.begin_running(0.0)
    stream.emitted += [5] * emitted
    return stream


def test_tokens_of_a_tenant_only_grow_whether_its_sequences_run_wait_or_have_ended() -> None:
    ended = EndedTokens()
    running, waiting = live("ann", "poet", 4), live("ann", "poet")
    assert queue_stats([running, waiting], ended) == (QueueStats("ann", "poet", 1, 1, 3 + 4),)
    running.begin_again()  # the engine died: it waits, and what it has brought stays
    assert queue_stats([running, waiting], ended) == (QueueStats("ann", "poet", 0, 2, 3 + 4),)
    ended.count(running)
    assert queue_stats([waiting], ended) == (QueueStats("ann", "poet", 0, 1, 3 + 4),)


def test_it_is_not_remembered_of_any_number_of_tenants_what_has_ended() -> None:
    ended = EndedTokens()
    for number in range(3 * MOST_KEYS):
        ended.count(live(f"tenant-{number}", None, 1))
        ended.count(live("always", None, 1))
    found = queue_stats([], ended)
    assert len(found) == MOST_KEYS
    assert QueueStats("always", None, 0, 0, 3 * MOST_KEYS * 4) in found


def test_engines_and_those_who_wait_for_one_are_added_up() -> None:
    parts = [
        (QueueStats("ann", "poet", 1, 2, 3), QueueStats("bob", None, 1, 0, 5)),
        (QueueStats("ann", "poet", 2, 0, 9),),
    ]
    found = merged(parts, [live("ann", "poet").log, live("cy", None).log])
    assert found == (
        QueueStats("ann", "poet", 3, 3, 12),
        QueueStats("bob", None, 1, 0, 5),
        QueueStats("cy", None, 0, 1, 0),
    )
    assert by_adapter(found) == ({"poet": 3}, {"poet": 3})
