"""What a supervisor writes down: its children, their lives, and the incidents that it reports."""

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol

from anyio import Event

Restart = Literal["permanent", "transient", "temporary"]


@dataclass(frozen=True, slots=True)
class Incident:
    """What the report hook is told.

    `restarts` counts how often this actor had been restarted before. `error` is None for what is no exception
    (a late stop, messages dropped unread).
    """

    path: str
    what: str
    error: BaseException | None
    restarts: int


Report = Callable[[Incident], None]

log = logging.getLogger("personae.actors")


def log_incident(incident: Incident) -> None:
    """The default hook: the `personae.actors` logger. What is no exception is what stopping looks like."""
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
    """What a supervisor needs of a child: a cell, or another supervisor."""

    path: str

    def begin(self) -> None:
        """Get ready for a life."""

    async def run(self, ready: Callable[[], None]) -> None:
        """Live one epoch. Calls `ready` when started; raises what killed it; returns when stopped."""

    def stop(self, final: bool = False) -> None:
        """Ask for its end. `final`: there will be no further life, for it and all below it."""

    def cancel(self) -> None:
        """Insist."""

    def close(self) -> None:
        """There is no further life."""


@dataclass(slots=True)
class ChildRun:
    """One run of a child. `settled`: it has started, or ended without that. `expected`: its end was asked
    for.
    """

    settled: Event = field(default_factory=Event)
    ended: Event = field(default_factory=Event)
    started: bool = False
    error: Exception | None = None
    expected: bool = False

    def ready(self) -> None:
        """It has started."""
        self.started = True
        self.settled.set()


@dataclass(slots=True, eq=False)
class Child:
    """A supervisor's note about one of its children.

    `stop_timeout` None waits for ever (supervisors, whose parts are bounded). `passing`: added while the
    supervisor ran, and forgotten when that run ends. `leaving`: to be removed; `gone` is set when it is.
    """

    node: Supervised
    restart: Restart
    stop_timeout: float | None
    passing: bool = False
    epoch: ChildRun | None = None
    restarts: int = 0
    leaving: bool = False
    gone: Event = field(default_factory=Event)


class Intensity:
    """How many restarts a supervisor may still do: at most `most` in any `within` seconds."""

    def __init__(self, most: int, within: float) -> None:
        self._most = most
        self._within = within
        self._times: deque[float] = deque()

    def allows(self, now: float) -> bool:
        """Whether one more restart is allowed now; if so, it is counted. `now` in seconds."""
        while self._times and self._times[0] <= now - self._within:
            self._times.popleft()
        if len(self._times) >= self._most:
            return False
        self._times.append(now)
        return True
