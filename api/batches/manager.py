"""Accepts, shows, cancels and runs batches.

`BatchStore` has what is stored; this module has the running state. Every unfinished batch has one task:

    validating -> in_progress -> finalizing -> completed, or expired when its time was up
               -> failed         cancelling -> cancelled

A task can end at any moment, with the process. The next start finds the status in the database and continues
from there: it validates again, runs requests without a result, and moves files to their places again.
"""

import logging
import re
import shutil
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path

import anyio
from anyio import CancelScope, Lock, to_thread
from anyio.abc import TaskGroup
from msgspec.structs import replace

from personae.actors.kit.background import background_tasks
from personae.api.answering import find_model
from personae.api.base_models.listing import model_of
from personae.api.batches.call import BatchCall
from personae.api.batches.input import ENDPOINTS, Checked, Requests, check
from personae.api.batches.journal import CANCELLED, ERRORS, EXPIRED, OUTPUT, Journal
from personae.api.batches.model import (
    MOVES,
    Batch,
    BatchEntry,
    BatchError,
    BatchErrors,
    Counts,
    CreateBatch,
    Ending,
    InputLine,
    OutputLine,
)
from personae.api.batches.run import BatchRun
from personae.api.batches.semaphore import SequenceSemaphore
from personae.api.batches.shared_journal import SharedJournal
from personae.api.batches.store import BatchStore, new_id
from personae.api.database.leases import LOOK_SECONDS, Leases
from personae.api.exchange import Exchange
from personae.api.files.store import FileStore, expiry
from personae.api.services import Services
from personae.api.settings import ApiSettings
from personae.api.tenants.access import LOCAL_ADMIN, Caller
from personae.api.tenants.data import DataDir
from personae.api.tenants.store import Identity, TenantStore
from personae.api.tenants.workers import Workers
from personae.api.wire.metadata import check_metadata
from personae.errors import Conflict, NotFound, QuotaExceeded, RequestError, StorageFailed

logger = logging.getLogger(__name__)

_WINDOW = re.compile(r"([1-9]\d{0,3})([mhd])")
_SECONDS = {"m": 60, "h": 3600, "d": 24 * 3600}
_LONGEST = 30 * 24 * 3600
_RESULT_FILES = 2  # that a batch may have
_SWEEP = 60.0  # seconds
_AFTER_AN_ERROR = 30.0  # seconds until a batch is tried again after an error


class _RunningBatch:
    """The state of a batch while its task runs. `size` is its input's, in bytes."""

    def __init__(self, tenant: str, size: int) -> None:
        self.tenant = tenant
        self.journal: Journal | None = None
        self.task = CancelScope()  # all of the work; cancelled when another server has taken it over
        self._size = size
        self._cancelled = False
        self._scope: CancelScope | None = None

    @property
    def claim(self) -> int:
        """Bytes of its tenant's files that are reserved for its results: at least as many as its input
        has."""
        return max(self._size, 0 if self.journal is None else self.journal.size)

    def cancellable(self) -> CancelScope:
        """A scope for a part of the work that `cancel` ends."""
        self._scope = CancelScope()
        if self._cancelled:
            self._scope.cancel()
        return self._scope

    def cancel(self) -> None:
        """Cancel the current work of this kind, and later work."""
        self._cancelled = True
        if self._scope is not None:
            self._scope.cancel()


class BatchManager:
    """The batches and files of a data directory. `clock` gives Unix time.

    Without `tenants` there is one tenant, which needs no key. Batches only run within `running`. `lasting`:
    the directory outlives the server.
    """

    def __init__(
        self,
        data: DataDir,
        tenants: TenantStore | None = None,
        clock: Callable[[], float] = time.time,
        *,
        lasting: bool = True,
    ) -> None:
        self.files = FileStore(data, clock)
        self.files.claimed = self._claimed
        self._data = data
        self._tenants = tenants
        self._clock = clock
        self._store = BatchStore(data, self.files, clock)
        self._work: dict[str, _RunningBatch] = {}
        self._taking = Lock()  # from the check of the tenant's limits until the batch counts
        self._tasks: TaskGroup | None = None
        self._lasting = lasting
        unfinished = {entry.batch.id for entry in self._store.unfinished()}
        for folder in data.batches.iterdir():
            if folder.name not in unfinished:
                shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        """Wait until all deletions are done."""
        self.files.close()

    @asynccontextmanager
    async def running(self, services: Services) -> AsyncIterator[None]:
        """Run new batches, and the ones that an earlier server left, while the block runs."""
        self._checks = Workers(threads=1)  # separate ones, because checking a file takes long
        self._services, self._room = services, SequenceSemaphore(services.settings.batch_concurrency)
        leases = self._data.leases
        with nullcontext() if leases is None else leases.running():
            async with background_tasks() as tasks:
                self._tasks = tasks
                tasks.start_soon(self._sweep)
                if leases is not None:
                    tasks.start_soon(self._share, leases)
                elif unfinished := self._store.unfinished():
                    logger.info("resuming unfinished batches: %d", len(unfinished))
                    for entry in unfinished:
                        self._begin(entry)
                try:
                    yield
                finally:
                    self._tasks = None

    async def create(self, who: Identity, body: CreateBatch, settings: ApiSettings) -> Batch:
        """Accept a batch. Raises RequestError, or QuotaExceeded if the tenant has too many at a time."""
        window = _window(body.completion_window)
        if body.endpoint not in ENDPOINTS:
            served = ", ".join(ENDPOINTS)
            raise RequestError(f"`endpoint` must be one of {served}.", param="endpoint")
        check_metadata(body.metadata)
        after = body.output_expires_after
        keep = None if after is None else expiry(after.seconds, "output_expires_after.seconds")
        try:
            file = self.files.find(who.tenant, body.input_file_id)
        except NotFound as error:
            error.param = "input_file_id"
            raise
        now = int(self._clock())
        batch = Batch(
            id=new_id("batch"),
            endpoint=body.endpoint,
            input_file_id=body.input_file_id,
            completion_window=body.completion_window,
            status="validating",
            created_at=now,
            expires_at=now + window,
            metadata=body.metadata,
        )
        if not self._lasting:
            logger.warning("without --data-dir batch %s is forgotten when the server stops", batch.id)
        entry = BatchEntry(who.tenant, batch, keep)
        async with self._taking:
            self._check_open(who, file.bytes, settings)
            mine = self._tasks is not None and self._has_input(entry)
            await self._store.add(entry, settings.max_ended_batches, mine=mine)
            if mine:
                self._begin(entry)
        return batch

    def _check_open(self, who: Identity, size: int, settings: ApiSettings) -> None:
        """Raises QuotaExceeded if the tenant may not have another batch, with an input of `size` bytes."""
        most = settings.max_open_batches if who.limits.batches is None else who.limits.batches
        if len(open := self._store.unfinished(who.tenant)) >= most:
            raise QuotaExceeded(
                f"This tenant has {len(open)} batches that are not done; wait for one to end."
            )
        self.files.check_room(who, size, _RESULT_FILES)

    def get(self, tenant: str, id: str) -> Batch:
        """The batch as it is now. Raises NotFound."""
        return self._live(self._store.find(tenant, id).batch)

    def page(self, tenant: str, after: str | None, limit: int) -> tuple[list[Batch], bool]:
        """A page of them, the newest first, and whether there are more. Raises NotFound."""
        page, more = self._store.page(tenant, after, limit)
        return [self._live(batch) for batch in page], more

    async def cancel(self, tenant: str, id: str) -> Batch:
        """Stop a batch, which keeps its results so far. Raises NotFound, or Conflict if it has ended."""
        entry = await self._store.move(self._store.find(tenant, id), "cancelling")
        if entry.batch.status != "cancelling":
            raise Conflict(f"A batch that is {entry.batch.status} cannot be cancelled.", param="batch_id")
        if id in self._work:
            self._work[id].cancel()
        return self._live(entry.batch)

    async def remove_file(self, tenant: str, id: str) -> None:
        """Delete a file. Raises NotFound, or Conflict while a batch needs it."""
        for entry in self._store.unfinished(tenant):
            if entry.batch.input_file_id == id:
                raise Conflict(
                    f"The file is the input of {entry.batch.id}, which is {entry.batch.status}.",
                    param="file_id",
                )
        await self.files.remove(tenant, id)

    def check_room_for_results(self, who: Identity) -> None:
        """Raises QuotaExceeded if the tenant's files have no room for one more answer of a batch."""
        self.files.check_room(who, 0, files=0)

    def _live(self, batch: Batch) -> Batch:
        """The batch with its current counts."""
        work = self._work.get(batch.id)
        if work is None or work.journal is None:
            return batch
        counts = work.journal.counts(batch.request_counts.total)
        return replace(batch, request_counts=counts, usage=work.journal.usage())

    async def _sweep(self) -> None:
        while True:
            try:
                await to_thread.run_sync(self._data.keep_reserve)
                await self.files.sweep({entry.batch.input_file_id for entry in self._store.unfinished()})
            except Exception as error:
                logger.error("what has expired could not be removed, and is tried again", exc_info=error)
            await anyio.sleep(_SWEEP)

    async def _share(self, leases: Leases) -> None:
        """Take over batches that no server runs, and notice what other servers change."""
        while True:
            try:
                unfinished = {entry.batch.id: entry for entry in self._store.unfinished()}
                for id in await to_thread.run_sync(leases.lost, list(self._work)):
                    if id in self._work and id in unfinished:
                        logger.warning("batch %s is run by another server now", id)
                        self._work[id].task.cancel()
                free = [
                    id for id, each in unfinished.items() if id not in self._work and self._has_input(each)
                ]
                for id in await to_thread.run_sync(leases.take, free):
                    logger.info("taking over the unfinished batch %s", id)
                    self._begin(unfinished[id])
                for id, work in self._work.items():
                    if id in unfinished and unfinished[id].batch.status == "cancelling":
                        work.cancel()
            except StorageFailed as error:
                logger.warning("other servers' batches are not known: %s", error.message)
            except Exception as error:  # a task that ends would take the server with it
                logger.error("other servers' batches are not known", exc_info=error)
            await anyio.sleep(LOOK_SECONDS)

    def _has_input(self, entry: BatchEntry) -> bool:
        """Whether its input is here. With one server, a missing one is an error of the batch."""
        return not self._data.shared or self.files.may_be_brought(entry.batch.input_file_id)

    def _begin(self, entry: BatchEntry) -> None:
        if self._tasks is not None:
            self._work[entry.batch.id] = _RunningBatch(entry.tenant, self._input_bytes(entry))
            self._tasks.start_soon(self._play, entry)

    def _input_bytes(self, entry: BatchEntry) -> int:
        try:
            return self.files.find(entry.tenant, entry.batch.input_file_id).bytes
        except NotFound:
            return 0

    def _claimed(self, tenant: str) -> int:
        """Bytes that results of a tenant's running batches have or will have: even a request that is not run
        has a line."""
        return sum(work.claim for work in self._work.values() if work.tenant == tenant)

    async def _play(self, entry: BatchEntry) -> None:
        """Run one batch to its end, through failures of the disk and the database."""
        work = self._work[entry.batch.id]
        try:
            with work.task:
                while True:
                    try:
                        await self._advance(entry, work)
                        return
                    except StorageFailed as error:
                        logger.error("batch %s is tried again: %s", entry.batch.id, error.message)
                    except Exception as error:
                        logger.error(
                            "batch %s failed unexpectedly and is tried again", entry.batch.id, exc_info=error
                        )
                    await anyio.sleep(_AFTER_AN_ERROR)
        finally:
            del self._work[entry.batch.id]

    async def _advance(self, entry: BatchEntry, work: _RunningBatch) -> None:
        """Continue from its current status to its end."""
        entry = self._store.find(entry.tenant, entry.batch.id)
        if entry.batch.status in MOVES:
            await self.files.bring(entry.batch.input_file_id)
        if entry.batch.status == "validating":
            with work.cancellable():
                entry = await self._validate(entry)
        entry = self._store.find(entry.tenant, entry.batch.id)
        if entry.batch.status not in ("in_progress", "finalizing", "cancelling"):
            return
        folder = self._data.batches / entry.batch.id
        work.journal = journal = await to_thread.run_sync(self._journal, folder)
        ending: Ending = "completed"
        if entry.batch.status == "in_progress":
            with work.cancellable(), anyio.move_on_after(entry.batch.expires_at - self._clock()) as window:
                await self._run(entry, journal)
            ending = "expired" if window.cancelled_caught else "completed"
        entry = await self._store.move(entry, "finalizing", ending=ending)
        await self._finalize(entry, journal)

    def _journal(self, folder: Path) -> Journal:
        return SharedJournal(folder, self._data, folder.name) if self._data.shared else Journal(folder)

    async def _validate(self, entry: BatchEntry) -> BatchEntry:
        batch, settings = entry.batch, self._services.settings
        path = self.files.path(batch.input_file_id)
        try:
            found = await self._checks.run(entry.tenant, lambda: check(path, batch.endpoint, settings))
        except FileNotFoundError:
            found = Checked(errors=[BatchError("file_not_found", "The input file is gone.", "input_file_id")])
        errors = found.errors
        for model, line in found.models.items():
            try:
                with (caller := Caller(Identity(entry.tenant, "tenant"))).until_done:
                    exchange = Exchange(self._services, caller)
                    if self._services.base_models is None:
                        find_model(exchange, model)
                    else:
                        model_of(exchange, self._services.base_models, model)
            except NotFound as error:
                errors.append(BatchError("model_not_found", error.message, "body.model", line))
        if errors:
            errors.sort(key=lambda error: error.line or 0)
            return await self._store.move(entry, "failed", errors=BatchErrors(errors))
        return await self._store.move(entry, "in_progress", request_counts=Counts(found.total))

    async def _run(self, entry: BatchEntry, journal: Journal) -> None:
        path = self.files.path(entry.batch.input_file_id)
        requests = await to_thread.run_sync(Requests, path, self._services.settings)
        try:
            await BatchRun(
                journal,
                requests,
                lambda line: BatchCall(
                    self._services, self._who(entry.tenant), line, self.check_room_for_results
                ),
                self._room,
                lambda: self._services.bodies.hold(
                    self._who(entry.tenant) or Identity(entry.tenant, "tenant")
                ),
            )()
        finally:
            requests.close()

    async def _finalize(self, entry: BatchEntry, journal: Journal) -> None:
        """Move the results to the files' folder, and record it. Steps that were done before can be
        repeated."""
        batch = entry.batch
        ending: Ending = "cancelled" if batch.status == "cancelling" else entry.ending
        counts, usage = journal.counts(batch.request_counts.total), journal.usage()
        if ending != "completed":
            await to_thread.run_sync(self._give_up, entry, journal, ending)
        suffix = batch.id.removeprefix("batch_")
        records = {}
        for name, kind in ((OUTPUT, "output"), (ERRORS, "errors")):
            path = journal.paths[name]
            if path.stat().st_size:
                id, filename = f"file-{suffix}-{kind}", f"{batch.id}_{kind}.jsonl"
                records[name] = self.files.record(id, path, filename, "batch_output", entry.keep)
                await to_thread.run_sync(self.files.take, records[name], path)
        await self._store.finish(
            entry,
            tuple(records.values()),
            ending,
            output_file_id=records[OUTPUT].id if OUTPUT in records else None,
            error_file_id=records[ERRORS].id if ERRORS in records else None,
            request_counts=counts,
            usage=usage,
        )
        await to_thread.run_sync(journal.remove)

    def _give_up(self, entry: BatchEntry, journal: Journal, ending: Ending) -> None:
        """Write a line for every request that was not run."""
        why = EXPIRED if ending == "expired" else CANCELLED
        if not entry.batch.request_counts.total:
            return  # it was never validated
        requests = Requests(self.files.path(entry.batch.input_file_id), self._services.settings)
        try:
            journal.write(OutputLine(new_id("batch_req"), line.custom_id, None, why) for line in requests)
        finally:
            requests.close()

    def _call(self, tenant: str, line: InputLine) -> BatchCall:
        return BatchCall(self._services, self._who(tenant), line, self.check_room_for_results)

    def _who(self, tenant: str) -> Identity | None:
        if self._tenants is None:
            return LOCAL_ADMIN
        return self._tenants.on_behalf_of(tenant)


def _window(text: str) -> int:
    """Seconds of a completion window. Raises RequestError."""
    match = _WINDOW.fullmatch(text)
    seconds = int(match[1]) * _SECONDS[match[2]] if match else 0
    if not 0 < seconds <= _LONGEST:
        raise RequestError(
            "`completion_window` must be a time such as 24h, 90m or 7d, and at most 30d.",
            param="completion_window",
        )
    return seconds
