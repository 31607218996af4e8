"""A supervisor's records: its children, their runs, and the incidents that it reports."""

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol

from anyio import Event

Restart = Literal["permanent", "transient", "temporary"]


@dataclass(frozen=True, slots=True)
class Incident:
    """What the report hook receives.

    `restarts` counts how often this actor was restarted before. `error` is None for incidents without an
    exception (a late stop, messages dropped unread).
    """

    path: str
    what: str
    error: BaseException | None
    restarts: int


ReportIncident = Callable[[Incident], None]

log = logging.getLogger("personae.actors")


def log_incident(incident: Incident) -> None:
    """The default hook: logs to `personae.actors`. Incidents without an exception are part of stopping, and
    logged at debug level."""
    level = logging.DEBUG if incident.error is None else logging.ERROR
    log.log(
        level,
        "%s %s (restarts: %d)",
        incident.path,
        incident.what,
        incident.restarts,
        exc_info=incident.error,
    )


class Supervised(Protocol):
    """What a supervisor needs of a child, which is a cell or another supervisor."""

    path: str

    def begin(self) -> None:
        """Get ready for an epoch."""

    async def run(self, ready: Callable[[], None]) -> None:
        """Run one epoch. Calls `ready` when started. Raises the error that ended it; returns when stopped."""

    def stop(self, final: bool = False) -> None:
        """Ask it to end. `final`: there will be no further epoch, for it and everything below it."""

    def cancel(self) -> None:
        """End it now."""

    def close(self) -> None:
        """Refuse messages: there is no further epoch."""


@dataclass(slots=True)
class ChildRun:
    """One run of a child. `settled`: it has started, or has ended without starting. `expected`: the
    supervisor asked it to end."""

    settled: Event = field(default_factory=Event)
    ended: Event = field(default_factory=Event)
    started: bool = False
    error: Exception | None = None
    expected: bool = False

    def ready(self) -> None:
        """Note that it has started."""
        self.started = True
        self.settled.set()


@dataclass(slots=True, eq=False)
class Child:
    """A supervisor's record of one of its children.

    `stop_timeout` None waits without a limit (for supervisors, whose children have limits). `dynamic`: added
    while the supervisor ran, and forgotten when that run ends. `leaving`: it is being removed; `gone` is set
    when that is done.
    """

    node: Supervised
    restart: Restart
    stop_timeout: float | None
    dynamic: bool = False
    epoch: ChildRun | None = None
    restarts: int = 0
    leaving: bool = False
    gone: Event = field(default_factory=Event)


class Intensity:
    """A limit on restarts: at most `most` within any `within` seconds."""

    def __init__(self, most: int, within: float) -> None:
        self._most = most
        self._within = within
        self._times: deque[float] = deque()

    def allows(self, now: float) -> bool:
        """Whether one more restart is allowed at `now`, in seconds. If so, it is counted."""
        while self._times and self._times[0] <= now - self._within:
            self._times.popleft()
        if len(self._times) >= self._most:
            return False
        self._times.append(now)
        return True
