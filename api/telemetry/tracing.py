"""Where spans begin and end. Nothing happens here; the tracing that does something is `otel.py`."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from personae.api.telemetry.metrics import SequenceClock

if TYPE_CHECKING:
    from personae.api.generation import Job


class Tracing:
    """Told of every request that generates; of those over HTTP `otel.Traced` is told as well."""

    def generation(self, job: "Job", clocks: Mapping[str, SequenceClock]) -> AbstractContextManager[None]:
        """Around a job's time in the engine; `clocks` are its sequences'."""
        return nullcontext()


UNTRACED = Tracing()
