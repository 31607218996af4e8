"""Supervision: starts actors, restarts them when they die, and stops them in order. The strategies are OTP's
(https://www.erlang.org/doc/system/sup_princ.html).

    async with Supervisor("core", strategy="rest_for_one") as core:
        greeter = core.spawn("greeter", Greeter)
        greeter.tell("world")

- `one_for_one` restarts only the dead child. `rest_for_one` also restarts those started after it.
  `one_for_all` restarts all of them.
- `permanent` children are restarted whenever they end, `transient` ones only when they crash, `temporary`
  ones never.
- After more than `max_restarts` restarts `within` seconds the supervisor gives up: it stops its children and
  crashes itself, so its own supervisor decides. At the top, the body of the `async with` is cancelled and
  RestartsExhausted is raised from it. The time that restarts take does not count: a child that dies as soon
  as it has started is not kept for ever, however long its start takes.

Design:

- *One task decides.* Deaths and removals are queued and handled one by one, each to its end. A child that
  dies during a restart is either part of that restart or handled after it; they never interleave.
- *A stop interrupts it anywhere.* That task runs in a scope of its own. Stopping cancels the scope, whatever
  it waits for, then stops every child that still runs. So a child that hangs in `started()` cannot delay the
  end.
- *Only their supervisor cancels children.* The tree is shielded from the scopes around its `async with`. When
  those are cancelled, the body ends, and the children are then stopped in order, last started first, each
  with its time limit.
- *The first start is strict, a restart is not.* If a child's very first `started()` fails, the whole start
  fails: so a bad model folder becomes a start-up error. A restart that fails counts as one more death.
- *Nothing is lost.* Each death is reported to the hook with its exception. What ends a tree is raised, with
  its cause.
"""

from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from types import TracebackType
from typing import Literal, TypeVar

from anyio import CancelScope, Event, create_task_group, get_cancelled_exc_class, move_on_after
from anyio.abc import TaskGroup

from personae.actors.kit.actor import Actor, ActorCell, BaseCell, unwrap
from personae.actors.kit.bridge import Loop
from personae.actors.kit.child import (
    Child,
    ChildRun,
    Incident,
    Intensity,
    ReportIncident,
    Restart,
    log,
    log_incident,
)
from personae.actors.kit.mailbox import Ref
from personae.actors.kit.thread import ThreadActor, ThreadCell
from personae.errors import ActorStopped, PersonaeError, RestartsExhausted, StartFailed

M = TypeVar("M")

Strategy = Literal["one_for_one", "rest_for_one", "one_for_all"]


class Supervisor:
    """A supervisor. Create it inside a running loop, and use it as an async context manager or as the child
    of another.

    `report` is called on the loop for each incident below it and must not raise. Supervisors below it inherit
    it.
    """

    def __init__(
        self,
        name: str,
        *,
        strategy: Strategy = "one_for_one",
        max_restarts: int = 3,
        within: float = 5.0,
        report: ReportIncident = log_incident,
    ) -> None:
        self.path = name
        self.strategy = strategy
        self.max_restarts = max_restarts
        self.within = within
        self.state: Literal["new", "starting", "running", "stopping", "down", "closed"] = "new"
        self.children: list[Child] = []
        self._report = report
        self._loop = Loop.current()
        self._intensity = Intensity(max_restarts, within)
        self._starting_seconds = 0.0  # seconds that restarts took
        self._actions: deque[Callable[[], Awaitable[PersonaeError | None]]] = deque()
        self._wakeup = Event()
        self._final = False
        self._work = CancelScope()
        self._tasks: TaskGroup | None = None
        self._opened: AbstractAsyncContextManager[None] | None = None

    # Adding and removing children: before the start, or at any time after.

    def spawn(
        self,
        name: str,
        factory: Callable[[], Actor[M]],
        *,
        capacity: int = 64,
        restart: Restart = "permanent",
        stop_timeout: float = 5.0,
    ) -> Ref[M]:
        """Add an actor. Its mailbox of `capacity` messages is open at once. `factory` makes the actor for
        each epoch.

        It starts with the supervisor, after those added before it. If the supervisor already runs, the actor
        starts now and concurrently: a failed start then counts as a death, and the actor lives as long as
        this run of the supervisor. When it is stopped, the message in hand has `stop_timeout` seconds to
        finish, and `stopped()` has as many. Raises ValueError if the name is taken, ActorStopped if the tree
        has ended.
        """
        path = self._free_path(name)
        cell = ActorCell(path, factory, capacity, self._loop, partial(self._incident, path))
        return self._add_cell(cell, restart, stop_timeout)

    def spawn_thread(
        self,
        name: str,
        factory: Callable[[], ThreadActor[M]],
        *,
        capacity: int = 2,
        restart: Restart = "permanent",
        stop_timeout: float = 5.0,
    ) -> Ref[M]:
        """Add an actor with a thread of its own; see `spawn`. A thread that does not end within
        `stop_timeout` is left behind."""
        path = self._free_path(name)
        cell = ThreadCell(path, factory, capacity, self._loop, partial(self._incident, path))
        return self._add_cell(cell, restart, stop_timeout)

    def supervisor(
        self,
        name: str,
        *,
        strategy: Strategy = "one_for_one",
        max_restarts: int = 3,
        within: float = 5.0,
        restart: Restart = "permanent",
    ) -> "Supervisor":
        """Add a supervisor below this one and return it, so that children can be added to it."""
        child = Supervisor(
            self._free_path(name),
            strategy=strategy,
            max_restarts=max_restarts,
            within=within,
            report=self._report,
        )
        self._add(Child(child, restart, None))
        return child

    async def remove(self, child: "Ref[M] | Supervisor") -> None:
        """Stop a child for good. Returns when it is gone. An actor must not call it on itself; it uses
        `self.stop()`."""
        if (record := self._dismiss(child.path)) is not None:
            await record.gone.wait()

    def dismiss(self, child: "Ref[M]") -> None:
        """Remove a child without waiting: it finishes the message in hand; other messages are dropped."""
        self._dismiss(child.path)

    def _dismiss(self, path: str) -> Child | None:
        for record in self.children:
            if record.node.path == path:
                record.leaving = True
                if self._tasks is None:
                    self._forget(record)
                else:
                    self._enqueue(partial(self._remove, record))
                return record
        return None

    def _add_cell(self, cell: BaseCell[M], restart: Restart, stop_timeout: float) -> Ref[M]:
        cell.stop_timeout = stop_timeout
        self._add(Child(cell, restart, stop_timeout))
        return cell.ref

    def _add(self, child: Child) -> None:
        self.children.append(child)
        if self._tasks is not None:
            child.dynamic = True
            if self.state != "stopping":
                self._launch(child)

    def _free_path(self, name: str) -> str:
        path = f"{self.path}/{name}"
        if self.state == "closed":
            raise ActorStopped(f"{self.path} has stopped")
        if any(child.node.path == path for child in self.children):
            raise ValueError(f"{path} exists already")
        return path

    # As the top of a tree.

    async def __aenter__(self) -> "Supervisor":
        if self.state != "new":
            raise RuntimeError(f"{self.path}: a tree runs once")
        self._opened = self._open()
        await self._opened.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        assert self._opened is not None
        return await self._opened.__aexit__(kind, error, trace)

    @asynccontextmanager
    async def _open(self) -> AsyncIterator[None]:
        """Run the tree concurrently with the body. Never wraps the body's exception in a group."""
        epoch = ChildRun()
        error: BaseException | None = None
        async with create_task_group() as tasks:
            with CancelScope() as body:
                self.begin()
                tasks.start_soon(self._run_as_root, epoch, body, name=self.path)
                try:
                    await epoch.settled.wait()
                    yield
                except get_cancelled_exc_class():
                    raise
                except BaseException as raised:
                    error = raised
                finally:
                    self.stop(final=True)
        if epoch.error is not None:
            raise epoch.error from (epoch.error.__cause__ or error)
        if error is not None:
            raise error

    async def _run_as_root(self, epoch: ChildRun, body: CancelScope) -> None:
        with CancelScope(shield=True):
            try:
                await self.run(epoch.ready)
            except PersonaeError as error:
                epoch.error = error
                self._incident(self.path, "gave up", error)
                body.cancel()
            finally:
                self.close()

    # As the child of another.

    def begin(self) -> None:
        """Get ready for an epoch."""
        self.state = "starting"
        self._work = CancelScope()

    async def run(self, ready: Callable[[], None]) -> None:
        """Start the children and supervise them until `stop`. Raises RestartsExhausted or StartFailed."""
        failure: PersonaeError | None = None
        self._intensity = Intensity(self.max_restarts, self.within)
        self._actions.clear()
        async with create_task_group() as self._tasks:
            with self._work:
                failure = await self._supervise(ready)
            self.state = "stopping"
            await self._stop_all(self.children, self._final)
        self._tasks = None
        self.state = "down"
        for child in tuple(self.children):
            if child.dynamic or child.leaving:
                self._forget(child)
        if failure is not None:
            raise failure

    def stop(self, final: bool = False) -> None:
        """Stop all children, last started first, and end. `final`: close each one after it has stopped."""
        self._final = self._final or final
        self._work.cancel()

    def cancel(self) -> None:
        """Do nothing more than `stop`: every child below has its time limit."""

    def close(self) -> None:
        """Close every cell below: no message reaches them any more."""
        self.state = "closed"
        for child in reversed(tuple(self.children)):
            self._forget(child)

    # The one task that decides.

    async def _supervise(self, ready: Callable[[], None]) -> PersonaeError | None:
        for child in tuple(self.children):
            if error := await self._start(child):
                failure = StartFailed(f"{child.node.path} could not be started: {error}")
                failure.__cause__ = error
                return failure
        self.state = "running"
        ready()
        while True:
            while self._actions:
                if failed := await self._actions.popleft()():
                    return failed
            self._wakeup = Event()
            await self._wakeup.wait()

    def _enqueue(self, action: Callable[[], Awaitable[PersonaeError | None]]) -> None:
        self._actions.append(action)
        self._wakeup.set()

    async def _child_ended(self, child: Child, epoch: ChildRun) -> PersonaeError | None:
        if child.epoch is not epoch or epoch.expected:
            return None
        if child.restart == "temporary" or (child.restart == "transient" and epoch.error is None):
            self._forget(child)
            return None
        error = epoch.error
        while True:
            # Starting does not count as time without failures.
            if not self._intensity.allows(self._loop.time() - self._starting_seconds):
                failure = RestartsExhausted(
                    f"{self.path} gives up after more than {self.max_restarts} restarts in {self.within} s "
                    f"of running; {child.node.path} died last"
                )
                failure.__cause__ = error
                return failure
            begun = self._loop.time()
            died = await self._restart(self._affected(child))
            self._starting_seconds += self._loop.time() - begun
            if died is None:
                return None
            child, error = died

    def _affected(self, child: Child) -> list[Child]:
        if self.strategy == "one_for_one":
            return [child]
        first = self.children.index(child) if self.strategy == "rest_for_one" else 0
        return self.children[first:]

    async def _restart(self, group: list[Child]) -> tuple[Child, Exception] | None:
        """Stop those of the group that run, and start them all again. Returns the child that could not be
        started."""
        await self._stop_all(group)
        for child in group:
            if child.restart == "temporary":
                self._forget(child)
                continue
            child.restarts += 1
            if error := await self._start(child):
                return child, error
        return None

    async def _remove(self, child: Child) -> PersonaeError | None:
        await self._stop(child, final=True)
        self._forget(child)
        return None

    def _forget(self, child: Child) -> None:
        if child in self.children:
            self.children.remove(child)
        child.node.close()
        child.gone.set()

    # One child.

    def _launch(self, child: Child) -> ChildRun:
        assert self._tasks is not None
        child.epoch = ChildRun()
        child.node.begin()
        self._tasks.start_soon(self._run_child, child, child.epoch, name=child.node.path)
        return child.epoch

    async def _start(self, child: Child) -> Exception | None:
        epoch = self._launch(child)
        await epoch.settled.wait()
        if epoch.started or epoch.error is None:
            return None  # `_child_ended` handles what happened to it since
        epoch.expected = True
        return epoch.error

    async def _run_child(self, child: Child, epoch: ChildRun) -> None:
        try:
            await child.node.run(epoch.ready)
        except Exception as error:
            epoch.error = unwrap(error)
            self._incident(child.node.path, "crashed", epoch.error)
        finally:
            epoch.ended.set()
            epoch.settled.set()
            self._enqueue(partial(self._child_ended, child, epoch))

    async def _stop_all(self, children: Iterable[Child], final: bool = False) -> None:
        for child in reversed(tuple(children)):
            await self._stop(child, final)

    async def _stop(self, child: Child, final: bool = False) -> None:
        epoch = child.epoch
        if epoch is not None and not epoch.ended.is_set():
            epoch.expected = True
            child.node.stop(final)
            with move_on_after(child.stop_timeout):
                await epoch.ended.wait()
            if not epoch.ended.is_set():
                self._incident(child.node.path, f"did not stop within {child.stop_timeout} s", None)
                child.node.cancel()
                await epoch.ended.wait()
        if final:
            child.node.close()

    def _incident(self, path: str, what: str, error: BaseException | None) -> None:
        restarts = next((child.restarts for child in self.children if child.node.path == path), 0)
        try:
            self._report(Incident(path, what, error, restarts))
        except Exception:
            log.exception("the report hook raised an error for %s %s", path, what)
