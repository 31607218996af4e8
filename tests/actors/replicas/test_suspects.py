"""Which streams continue at once when an engine dies, which are tried alone, and which are ended."""

import pytest

from personae.actors.frontend.inbox import Inbox
from personae.actors.frontend.live_stream import LiveStream
from personae.actors.frontend.probation import CLEARED
from personae.actors.replicas.suspects import Suspects
from personae.engine.params import SamplingParams
from personae.engine.sequence import SequenceLog

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("anyio_backend", ["asyncio"])]


def streams(ids: str) -> dict[str, LiveStream]:
    """One stream per letter. `anyio.Event` needs a loop, so the tests are async."""
    params = SamplingParams(max_tokens=9, seed=0)
    return {id: LiveStream(SequenceLog(id, (7,), 1, params), Inbox(), 0.0) for id in ids}


def ids(found: list[LiveStream]) -> str:
    return "".join(stream.log.id for stream in found)


async def test_cleared_and_waiting_sequences_continue_at_once_and_the_others_are_tried() -> None:
    suspects, live = Suspects(), streams("abcd")
    live["a"].record.brought = CLEARED
    live["b"].record.brought = CLEARED - 1
    free, guilty = suspects.judge(live.values(), "abc", outside=False)
    assert (ids(free), ids(guilty)) == ("ad", "")
    assert suspects.next() is live["b"]
    assert suspects.next() is None, "one at a time"
    suspects.acquit("b")
    assert suspects.next() is live["c"]


async def test_only_the_sequence_on_trial_is_guilty_when_its_engine_dies() -> None:
    suspects, live = Suspects(), streams("abc")
    suspects.judge(live.values(), "abc", outside=False)
    assert suspects.next() is live["a"]
    live["a"].record.brought = CLEARED
    suspects.acquit("a")
    tried = suspects.next()
    assert tried is live["b"]
    free, guilty = suspects.judge([live["a"], live["b"]], "ab", outside=False)
    assert ids(guilty) == "b"
    assert ids(free) == "a"
    assert suspects.next() is live["c"], "still to be tried"


async def test_one_death_from_outside_makes_no_suspects_two_do_and_a_third_ends_the_one_on_trial() -> None:
    suspects, live = Suspects(), streams("ab")
    assert ids(suspects.judge(live.values(), "ab", outside=True)[0]) == "ab"
    live["b"].record.brought = CLEARED
    free, guilty = suspects.judge(live.values(), "ab", outside=True)
    assert (ids(free), ids(guilty)) == ("b", "")
    assert suspects.next() is live["a"]
    assert ids(suspects.judge([live["a"]], "a", outside=True)[1]) == "a"


async def test_a_sequence_that_crashes_engines_after_many_tokens_is_suspect_at_the_second_crash() -> None:
    suspects, live = Suspects(), streams("ab")
    for stream in live.values():
        stream.record.brought = 10
    assert ids(suspects.judge(live.values(), "ab", outside=False)[0]) == "ab"
    free, guilty = suspects.judge(live.values(), "ab", outside=False)  # the next engine, at once
    assert (free, guilty) == ([], [])
    assert suspects.next() is not None
    suspects.acquit("a")
    assert suspects.next() is live["b"]
    assert ids(suspects.judge([live["b"]], "b", outside=False)[1]) == "b"
    assert suspects.over


async def test_a_sequence_on_trial_that_was_not_on_the_device_yet_is_tried_again() -> None:
    suspects, live = Suspects(), streams("a")
    suspects.judge(live.values(), "a", outside=False)
    assert suspects.next() is live["a"]
    assert suspects.judge(live.values(), "", outside=False) == ([], [])
    assert suspects.next() is live["a"]


async def test_a_suspect_that_is_withdrawn_is_not_tried() -> None:
    suspects, live = Suspects(), streams("ab")
    suspects.judge(live.values(), "ab", outside=False)
    assert suspects.drop("a")
    assert not suspects.drop("a")
    assert suspects.next() is live["b"]
