"""One engine core's process under supervision: it is restarted when it dies, within its restart intensity."""

import logging
from collections.abc import Callable
from dataclasses import replace
from itertools import count

import anyio
from anyio import current_time

from personae.actors.frontend.engine_process import EngineProcess, Progress
from personae.actors.frontend.frontend import Frontend
from personae.actors.kit.child import Incident
from personae.actors.kit.supervisor import Supervisor
from personae.actors.options import EngineOptions
from personae.actors.process import Launch
from personae.actors.wire import Describe, Facts, Port
from personae.errors import (
    EngineCoreDied,
    EngineCoreHangs,
    EngineLost,
    LoadError,
    RestartsExhausted,
    StartFailed,
)

MAX_RESTARTS = 5
WITHIN = 60.0  # seconds in which `max_restarts` are counted

log = logging.getLogger("personae.actors")


class SupervisedEngine:
    """Create it before the supervisors run. `serve` sets the frontend that it serves. `add_to` puts it below
    a supervisor; if that one already runs, the engine starts at once.

    If the engine core dies or hangs more than `max_restarts` times within a minute, it is given up and
    `lose_engine` of the frontend is called. `name` is part of its path and of its log lines.
    `silence_seconds`: see `EngineProcess`.
    """

    def __init__(
        self,
        launch: Launch,
        options: EngineOptions,
        on_progress: Progress | None,
        max_restarts: int,
        hang_seconds: float,
        silence_seconds: float | None = None,
        name: str = "",
    ) -> None:
        self.port = Port("core")
        self.name = name
        self.on_loaded: Callable[[Facts], None] = lambda facts: None
        self._path = ""
        self._launch = launch
        self._options = replace(options, secret=None)  # the engine core does not need it
        self._on_progress = on_progress
        self._max_restarts = max_restarts
        self._hang_seconds = hang_seconds
        self._silence_seconds = silence_seconds
        self._connected: list[Facts] = []
        self._failure: LoadError | EngineLost | None = None  # why the first start failed
        self._settled = anyio.Event()  # loaded, or failed
        self._died_at: float | None = None  # when the previous epoch ended
        self._epochs = count(1)
        self._frontend: Frontend
        self._tree: tuple[Supervisor, Supervisor] | None = None  # the root, and the supervisor below it

    @property
    def facts(self) -> Facts:
        """The facts of the model, as of the first time that it loaded."""
        return self._connected[0]

    def is_up(self) -> bool:
        """Whether the engine core serves now."""
        return self.port.is_open

    async def loaded(self) -> None:
        """Wait until the engine core has loaded for the first time. Raises the LoadError with which it
        refused its options, or EngineLost."""
        await self._settled.wait()
        if self._failure is not None:
            raise self._failure

    def serve(self, frontend: Frontend) -> None:
        """Set the frontend that it serves."""
        self._frontend = frontend
        frontend.connect(self.port, self.port)
        frontend.describe_core = lambda: self.port.tell(Describe())

    def add_to(self, root: Supervisor) -> None:
        """Add it below `root`, which starts it."""
        name = f"{self.name}/core" if self.name else "core"
        self._path = f"{root.path}/{name}"
        # Temporary: when it gives up, the frontend stays and ends the streams with an error.
        core = root.supervisor(name, max_restarts=self._max_restarts, within=WITHIN, restart="temporary")
        core.spawn("process", self._process)
        self._tree = root, core

    async def end(self) -> None:
        """End its process for good, if it was started."""
        if self._tree is not None:
            root, core = self._tree
            await root.remove(core)

    def notes(self, incident: Incident) -> bool:
        """Note an incident below the root. Returns whether to report it: a failed first start is raised
        instead."""
        error = incident.error
        mine = incident.path.startswith(self._path)
        if not self._connected and (failure := start_error(error)) is not None:
            if mine:
                self._failure = failure
                self._settled.set()
            return not (mine or self._path.startswith(incident.path))
        if not mine:
            return True
        if not self._connected and incident.path == self._path and isinstance(error, StartFailed):
            self._failure = EngineLost(f"The engine {self.name} could not be started: {error.__cause__}")
            self._settled.set()
        if self._connected and error is not None and self._died_at is None:
            self._died_at = current_time()
        if isinstance(error, EngineCoreDied | EngineCoreHangs):
            error.__traceback__ = None  # this process's stack says nothing about the cause
        if incident.path == self._path and isinstance(error, RestartsExhausted):
            self._frontend.lose_engine()
        return True

    def _process(self) -> EngineProcess:
        return EngineProcess(
            self._launch,
            self._options,
            next(self._epochs),
            self.port,
            self._frontend,
            self._connect,
            None if self._connected else self._on_progress,
            self._hang_seconds,
            self._silence_seconds,
        )

    def _connect(self, facts: Facts) -> None:
        if self._died_at is not None:
            log.warning(
                "the engine%s is back after %.1f s; %d answers continue",
                f" {self.name}" if self.name else "",
                current_time() - self._died_at,
                len(self._frontend.latest.live),
            )
            self._died_at = None
        self._connected.append(facts)
        self.on_loaded(facts)
        self._settled.set()


def start_error(error: BaseException | None) -> LoadError | EngineLost | None:
    """Return why a start failed: the LoadError behind `error`, or an EngineLost that says how the engine
    core's process ended."""
    while error is not None and not isinstance(error, LoadError):
        if isinstance(error, EngineCoreDied | EngineCoreHangs):
            return EngineLost(error.message)
        error = error.__cause__
    return error
