"""Where spans begin and end. These methods do nothing; `otel.py` has the real tracing."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from personae.api.telemetry.metrics import SequenceClock

if TYPE_CHECKING:
    from personae.api.generation import Job


class Tracing:
    """Traces every request that generates; `otel.Traced` also traces those over HTTP."""

    def generation(self, job: "Job", clocks: Mapping[str, SequenceClock]) -> AbstractContextManager[None]:
        """Wraps a job's time in the engine; `clocks` are those of its sequences."""
        return nullcontext()


UNTRACED = Tracing()
