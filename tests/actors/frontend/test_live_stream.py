"""What a sequence's reader gets before its first token."""

import pytest

from personae.actors.frontend.inbox import Inbox
from personae.actors.frontend.live_stream import LiveStream
from personae.engine.params import SamplingParams
from personae.engine.sequence import Delta, SequenceLog
from personae.grammar.spec import GrammarSpec

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])]
REGEX = GrammarSpec("regex", "a+")


@pytest.mark.parametrize(("adapter", "grammar", "told"), [(None, None, 0), ("p", None, 1), (None, REGEX, 1)])
async def test_a_sequence_that_could_be_refused_until_it_runs_tells_once_that_it_runs(
    adapter: str | None, grammar: GrammarSpec | None, told: int
) -> None:
    params = SamplingParams(max_tokens=9, seed=0)
    inbox = Inbox()
    live = LiveStream(SequenceLog("one", (7,), 1, params, adapter=adapter, grammar=grammar), inbox, 0.0)
    live.begin_running(1.5)
    live.begin_again()  # the engine died
    live.begin_running(3.0)
    inbox.put(live.unseen(Delta("one", (5,), cached=0)))
    assert await inbox.get() == [*[Delta("one")] * told, Delta("one", (5,), cached=0, queued=1.5)]
