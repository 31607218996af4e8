"""Simulated clients: they send a workload's requests, and check every answer."""

from collections.abc import Awaitable, Callable
from zlib import crc32

import anyio
from anyio.abc import TaskGroup

from personae.actors.frontend.frontend import LocalClient, LocalStream
from personae.actors.frontend.probation import GUILTY
from personae.actors.simulation.machine import Truth
from personae.actors.simulation.run import Run
from personae.actors.simulation.trouble import Wrong
from personae.actors.simulation.witness import ObservedSequence
from personae.actors.simulation.workload import (
    BAD,
    BROKEN,
    PANICS,
    POISON,
    THINKS,
    SimulatedRequest,
    requests,
)
from personae.engine.sequence import SequenceLog
from personae.errors import (
    GRAMMAR_TOO_SLOW,
    EngineLost,
    GrammarError,
    Overloaded,
    PersonaeError,
    Quarantined,
    RequestFailed,
)


class Clients:
    """One task per request, in `tasks`. `fail` is called with any violation."""

    def __init__(
        self, run: Run, client: LocalClient, tasks: TaskGroup, fail: Callable[[BaseException], None]
    ) -> None:
        self._run = run
        self._client = client
        self._tasks = tasks
        self._fail = fail

    async def send_all(self, wait_until_idle: Callable[[], Awaitable[None]]) -> int:
        """Send the workload's requests, and wait until all have ended. Returns how many there were.

        `wait_until_idle` is awaited after every `lull` requests, and at the end.
        """
        scenario, loop = self._run.scenario, self._run.loop
        sent = 0
        late = loop.time()  # the time that the start and the lulls have taken
        for request in requests(scenario.workload, scenario.seed):
            delay = request.at + late - loop.time()
            if delay > 0:
                await anyio.sleep(delay)
            self._run.live.add(request.logs[0].id)
            self._tasks.start_soon(self._run_client, request)
            sent += 1
            if sent % scenario.lull == 0:
                begun = loop.time()
                await wait_until_idle()
                late += loop.time() - begun
        await wait_until_idle()
        return sent

    async def _run_client(self, request: SimulatedRequest) -> None:
        try:
            await self._ask(request)
        except Exception as error:
            self._fail(error)
        finally:
            log = request.logs[0]
            self._run.live.discard(log.id)
            share = crc32(f"{log.id} deletes".encode()) / 2**32
            if log.session is not None and share < self._run.scenario.workload.deletes:
                self._client.forget_session(log.tenant, log.session)

    async def _ask(self, request: SimulatedRequest) -> None:
        witness, now = self._run.witness, self._run.loop.time()
        seen = {
            log.id: ObservedSequence(crc32(log.id.encode()), log, Truth(log), now, witness.restarts())
            for log in request.logs
        }
        if witness.gaps is not None:
            for log in request.logs:
                witness.gaps.arrive(log)
        how = "left"
        try:
            async with self._client.stream(request.logs) as stream:
                await self._read(stream, request, seen)
            if all(sequence.ended for sequence in seen.values()) and (
                stream._arrived or stream._inbox._deltas
            ):
                raise Wrong(f"request {request.logs[0].id} has ended, and more of it has come")
        except PersonaeError as error:
            how = self._allowed(request, error)
        for sequence in seen.values():
            if sequence.ended is None:
                if how == "left" and request.leaves_after is None:
                    raise Wrong(f"sequence {sequence.log.id} has no end")
                witness.end(sequence, how)

    async def _read(
        self, stream: LocalStream, request: SimulatedRequest, seen: dict[str, ObservedSequence]
    ) -> None:
        leaves, read = request.leaves_after, 0
        if leaves == 0:
            return
        async for delta in stream:
            sequence = seen[delta.id]
            self._run.witness.delta(sequence, delta)
            if delta.code == GRAMMAR_TOO_SLOW and may_be_slow(sequence.log):
                pass
            elif delta.finish not in (None, "stop", "length") and not self._run.faults.may_fail(delta.id):
                raise Wrong(f"sequence {delta.id} ends by {delta.finish}: {delta.error}")
            read += len(delta.tokens)
            if leaves is not None and read >= leaves:
                if len(seen) == 1:
                    return
                stream.stop(delta.id)  # one of several
            if request.naps:
                await anyio.sleep(request.naps)

    def _allowed(self, request: SimulatedRequest, error: PersonaeError) -> str:
        """Return the name of an error with which this request may end. Raises Wrong for any other error."""
        log = request.logs[0]
        source = log.grammar.source if log.grammar is not None else ""
        match error:
            case EngineLost():
                return "engine lost"
            case Overloaded():
                return "refused"
            case GrammarError() if source.startswith(BAD):
                return "bad grammar"
            case RequestFailed(code="grammar_failed") if source.startswith(PANICS):
                return "bad grammar"
            case Quarantined() if log.tokens[0] == POISON:
                return "quarantined"
            case Quarantined() if any(self._run.deaths.get(log.id, 0) >= GUILTY for log in request.logs):
                return "unlucky"  # planted faults struck twice while it was on the device
            case RequestFailed() if (log.adapter or "").startswith(BROKEN):
                return "no adapter"
        raise Wrong(f"request {log.id} fails: {error!r}") from error


def may_be_slow(log: SequenceLog) -> bool:
    """Whether the masks of its grammar may take too long."""
    return log.grammar is not None and log.grammar.source.startswith(THINKS)
