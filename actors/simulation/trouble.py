"""The costs of a simulated machine, the faults that may happen to it, and the error for what must never
happen."""

from dataclasses import dataclass

from personae.engine.sequence import SequenceLog
from personae.grammar.spec import GrammarSpec


class Wrong(AssertionError):
    """Something happened that must never happen."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Times in seconds. A step takes `step`, plus `token` for each of its tokens, `row` for each row,
    `adapter` for each different adapter, and `context` for each position that a decoding row attends to.

    `runs_ahead`: the device computes asynchronously, as a GPU does. `host` is the executor thread's own time
    per step. `start` is the time that the engine core's process takes to load, `read` that of reading an
    adapter from disk, `place` that of copying it to the device, `compile` that of compiling a grammar.
    `fetch` is the time that a tier takes for a page. From another engine a page takes `transfer`, and the
    first one `connect` more.
    `rests`: now and then the device says that drafts do not pay.
    """

    step: float = 0.004
    token: float = 0.00002
    row: float = 0.00001
    adapter: float = 0.0001
    context: float = 0.0
    host: float = 0.0002
    runs_ahead: bool = True
    rests: bool = True
    start: float = 2.0
    read: float = 0.02
    place: float = 0.002
    compile: float = 0.01
    fetch: float = 0.0002
    transfer: float = 0.0001
    connect: float = 0.001


class Trouble:
    """The faults planted in one epoch of the engine core. This class plants none.

    Each method is called at the moment when its fault may strike, and returns what happens.
    """

    def strikes(self, where: str) -> None:
        """Called at a place in the device's code. May raise, or never return."""

    def slowed(self, seconds: float) -> float:
        """Return how long something takes that should take this long."""
        return seconds

    def fails(self, log: SequenceLog, position: int) -> str | None:
        """Return why no token can be sampled there; None if one can."""
        return None

    def thinks(self, log: SequenceLog, position: int) -> float:
        """Return how many seconds the mask of the token at `position` takes; 0 if it is ready in time."""
        return 0.0

    def reads(self, digest: str) -> None:
        """Called when an adapter is read. May raise AdapterError."""

    def compiles(self, spec: GrammarSpec) -> None:
        """Called when a grammar is compiled. May raise anything."""

    def admits(self, log: SequenceLog) -> None:
        """Called when a sequence is admitted. May raise."""
