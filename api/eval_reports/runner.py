"""Runs evaluations of this server: `personae eval run` in a process of its own."""

import os
import secrets
import shutil
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Annotated

import anyio
from anyio import CancelScope, Event, open_process, to_thread
from anyio.abc import Process, TaskGroup
from msgspec import Meta, field

from personae.actors.kit.background import background_tasks
from personae.api.eval_reports.reader import OUTPUT, RESULTS, last_line
from personae.api.storage import storage_failure
from personae.api.wire.schema import Body
from personae.errors import Conflict, NotFound, Overloaded, RequestError

START_SECONDS = 300.0  # until the first line of the results: its cases are made before
STOP_SECONDS = 10.0  # a run has so long to stop by itself; then it is killed
NICENESS = 10  # answers come before the judging of answers
MOST_NAMES = 64
_COMMAND = (sys.executable, "-c", "from personae.api.cli import main; main()", "eval", "run")

Word = Annotated[str, Meta(min_length=1, max_length=256, pattern=r"^[^\x00-\x1f]*$")]
Suite = Annotated[str, Meta(pattern=r"^[a-z][a-z0-9_]{0,63}$")]
Words = Annotated[list[Word], Meta(max_length=MOST_NAMES)]


class StartEval(Body, kw_only=True):
    """`POST /v1/eval_reports`. Without `suites` the models decide. `models`: names, `base` for the base; else
    all. `modes` and `tasks`: only these. `count` cases of a task, each with `repeat` seeds from `seed` on;
    `concurrency` of them at the same time."""

    name: Annotated[str, Meta(max_length=200, pattern=r"^[^\x00-\x1f]*$")] = ""
    suites: Annotated[list[Suite], Meta(max_length=MOST_NAMES)] = field(default_factory=list)
    models: Words = field(default_factory=list)
    modes: Words = field(default_factory=list)
    tasks: Words = field(default_factory=list)
    count: Annotated[int, Meta(ge=1, le=10**6)] | None = None
    seed: Annotated[int, Meta(ge=0, le=2**31)] = 0
    repeat: Annotated[int, Meta(ge=1, le=100)] = 1
    temperature: Annotated[float, Meta(ge=0, le=2)] = 0.0
    concurrency: Annotated[int, Meta(ge=1, le=64)] = 4

    def arguments(self) -> list[str]:
        """The same for `personae eval run`."""
        found = [*self.suites, f"--name={self.name}", f"--seed={self.seed}", f"--repeat={self.repeat}"]
        found += [f"--temperature={self.temperature}", f"--concurrency={self.concurrency}"]
        found += [] if self.count is None else [f"--count={self.count}"]
        for option, values in (("model", self.models), ("mode", self.modes), ("task", self.tasks)):
            found += [f"--{option}{'s' * (option == 'model')}={value}" for value in values]
        return found


class EvalRunner:
    """Runs one evaluation at a time. Its results are in `folder`/ID, where `EvalReports` reads them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.running_id: str | None = None
        self._tasks: TaskGroup | None = None
        self._stop, self._ended = Event(), Event()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Take evaluations while the block runs. One that runs at its end is stopped."""
        async with background_tasks() as tasks:
            self._tasks = tasks
            try:
                yield
            finally:
                self._tasks = None

    async def start(self, asked: StartEval, url: str, key: str | None) -> str:
        """Start one that asks the server at `url` with this key. Returns its id once it has begun to play.

        Raises Conflict if another runs, StorageFailed, and RequestError with what the run said if it did not
        begin.
        """
        if self._tasks is None:
            raise Overloaded("This server is stopping, or takes no evaluations.")
        if self.running_id is not None:
            raise Conflict(f"The evaluation `{self.running_id}` runs; wait for it, or cancel it.")
        self.running_id = id = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
        self._stop, self._ended = Event(), Event()
        ended = self._ended
        try:
            await self._tasks.start(self._play, id, asked, url, key)
        except OSError as error:
            if (failure := storage_failure(error)) is not None:
                raise failure from error
            raise RequestError(f"--eval-reports cannot be written: {error.strerror}.") from None
        results = self.folder / id / RESULTS
        with anyio.move_on_after(START_SECONDS):
            while not (results.is_file() and results.stat().st_size) and not ended.is_set():
                with anyio.move_on_after(0.1):
                    await ended.wait()
        if results.is_file():
            return id
        self._stop.set()
        await ended.wait()
        why = last_line(self.folder / id / OUTPUT) or f"it wrote nothing in {START_SECONDS:g} seconds."
        await to_thread.run_sync(shutil.rmtree, self.folder / id, True)
        raise RequestError(f"The evaluation did not begin: {why}")

    async def cancel(self, id: str) -> None:
        """Stop one that runs, and wait until it has. What it has played is kept. Raises NotFound."""
        if id != self.running_id:
            raise NotFound(f"The evaluation `{id[:80]}` does not run.", param="id")
        self._stop.set()
        await self._ended.wait()

    async def _play(
        self,
        id: str,
        asked: StartEval,
        url: str,
        key: str | None,
        *,
        task_status: anyio.abc.TaskStatus[None],
    ) -> None:
        out, ended = self.folder / id, self._ended
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        environment.pop("PERSONAE_API_KEY", None)
        if key is not None:
            environment["PERSONAE_API_KEY"] = key
        try:
            await to_thread.run_sync(lambda: out.mkdir(parents=True))
            with (out / OUTPUT).open("wb") as output:
                process = await open_process(
                    [*_COMMAND, f"--url={url}", f"--out={out}", *asked.arguments()],
                    stdin=None,
                    stdout=output,
                    stderr=output,
                    env=environment,
                )
            task_status.started()
            with suppress(OSError):  # it has ended
                os.setpriority(os.PRIO_PROCESS, process.pid, NICENESS)
            await self._until_ended(process)
        finally:
            self.running_id = None
            ended.set()

    async def _until_ended(self, process: Process) -> None:
        try:
            async with anyio.create_task_group() as tasks:

                async def stop() -> None:
                    await self._stop.wait()
                    with suppress(ProcessLookupError):  # it ends at this moment
                        process.send_signal(signal.SIGTERM)
                        await anyio.sleep(STOP_SECONDS)
                        process.kill()

                tasks.start_soon(stop)
                await process.wait()
                tasks.cancel_scope.cancel()
        finally:
            with CancelScope(shield=True):
                if process.returncode is None:
                    process.kill()
                await process.aclose()
