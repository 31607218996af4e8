"""Runs the requests of one batch, as many at a time as there is room for, and stores their results."""

import logging
from collections.abc import Callable

import anyio
from anyio import CancelScope, Event, Lock, Semaphore, to_thread

from personae.api.batches.call import BatchCall, RetryLater
from personae.api.batches.input import Requests
from personae.api.batches.journal import Journal
from personae.api.batches.model import InputLine, OutputLine
from personae.api.batches.semaphore import SequenceSemaphore
from personae.api.tenants.bodies import Hold
from personae.errors import StorageFailed

logger = logging.getLogger(__name__)

AT_ONCE = 64  # requests of a batch in progress, including those that wait to be tried again
_LEAST_WAIT = 1.0  # seconds until a request is tried again
_READ = 16  # requests read at a time
_DISK_RETRY = 10.0  # seconds after the disk refused a result

MakeCall = Callable[[InputLine], BatchCall]
MakeHold = Callable[[], Hold]


class BatchRun:
    """Runs from the first request without a result to the last one. However it ends, results are on disk."""

    def __init__(
        self, journal: Journal, requests: Requests, call: MakeCall, room: SequenceSemaphore, hold: MakeHold
    ) -> None:
        self._journal = journal
        self._requests = requests
        self._call = call
        self._room = room
        self._hold = hold
        self._places = Semaphore(AT_ONCE)
        self._results: list[OutputLine] = []
        self._news = Event()
        self._writing = Lock()

    async def __call__(self) -> None:
        """Run all requests. Can be cancelled, and started again with another journal on the same folder."""
        try:
            async with anyio.create_task_group() as writer:
                writer.start_soon(self._write)
                async with anyio.create_task_group() as calls:
                    while lines := await to_thread.run_sync(self._requests.take, _READ):
                        for line in lines:
                            if line.custom_id not in self._journal.done:
                                await self._places.acquire()
                                await (held := self._hold()).wait(len(line.body))
                                calls.start_soon(self._answer, line, held)
                await self._save()
                writer.cancel_scope.cancel()
        finally:
            with CancelScope(shield=True):
                await self._flush()

    async def _answer(self, line: InputLine, held: Hold) -> None:
        """Run one request; retry while there is no room for it."""
        try:
            while (result := await self._attempt(line)) is None:
                pass
            self._results.append(result)
            self._news.set()
        finally:
            held.shrink()
            self._places.release()

    async def _attempt(self, line: InputLine) -> OutputLine | None:
        call, taken = self._call(line), 0
        try:
            await call.prepare()
            if call.result is None:
                taken = await self._room.take(call.sequences)
                await call.run()
            return call.result
        except RetryLater as later:
            self._room.give(taken)
            taken = 0
            await anyio.sleep(max(later.seconds, _LEAST_WAIT))
            return None
        finally:
            self._room.give(taken)
            call.close()

    async def _write(self) -> None:
        """Write results until none are left, including those that arrive during a write."""
        while True:
            await self._news.wait()
            self._news = Event()
            await self._save()

    async def _save(self) -> None:
        """Flush, and try again until the disk accepts it."""
        while not await self._flush():  # noqa: ASYNC110  a disk does not notify about free space
            await anyio.sleep(_DISK_RETRY)

    async def _flush(self) -> bool:
        """Write to disk what has arrived so far. False if the disk refused it."""
        async with self._writing:
            results = list(self._results)
            try:
                await to_thread.run_sync(self._journal.write, results)
            except (OSError, StorageFailed) as error:
                logger.error("a batch's results cannot be written: %s", error)
                return False
            del self._results[: len(results)]
        return True
