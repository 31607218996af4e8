"""What a simulated machine takes, what may befall it, and what must not."""

from dataclasses import dataclass

from personae.engine.sequence import SequenceLog
from personae.grammar.spec import GrammarSpec


class Wrong(AssertionError):
    """Something happened that must never happen."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds. A step takes `step` + `token` for each of its tokens + `row` for each row + `adapter` for each
    different adapter + `context` for each position that a decoding row looks back at.

    `runs_ahead`: the device computes by itself, as a GPU does; `host` is what the executor's thread needs for
    a step. `start` is from the start of the engine core's process until it has loaded, `read` an adapter from
    disk, `place` copying it to the device, `compile` a grammar.
    """

    step: float = 0.004
    token: float = 0.00002
    row: float = 0.00001
    adapter: float = 0.0001
    context: float = 0.0
    host: float = 0.0002
    runs_ahead: bool = True
    start: float = 2.0
    read: float = 0.02
    place: float = 0.002
    compile: float = 0.01


class Trouble:
    """The faults that are planted in one epoch of the engine core; a simulation without faults has this one.

    Each is asked at the moment when it may strike, and answers what shall happen.
    """

    def strikes(self, where: str) -> None:
        """At a place of the device's code: may raise, or never come back."""

    def slowed(self, seconds: float) -> float:
        """How long something takes that should take so long."""
        return seconds

    def fails(self, log: SequenceLog, position: int) -> str | None:
        """Why no token can be sampled there, None when it can."""
        return None

    def thinks(self, log: SequenceLog, position: int) -> float:
        """For how many seconds the mask of the token at `position` is made beside the steps; 0 for one that
        is there in time."""
        return 0.0

    def reads(self, digest: str) -> None:
        """Reading an adapter: may raise AdapterError."""

    def compiles(self, spec: GrammarSpec) -> None:
        """Compiling: may raise anything."""

    def admits(self, log: SequenceLog) -> None:
        """A sequence comes aboard: may raise."""
