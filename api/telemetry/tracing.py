"""Where spans begin and end. These methods do nothing; `otel.py` has the real tracing."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from personae.actors.client import ModelCard
from personae.api.telemetry.metrics import SequenceClock
from personae.engine.sequence import SequenceLog


class TracedJob(Protocol):
    """What a trace says of a request on its way through the engine."""

    id: str
    model: ModelCard
    logs: list[SequenceLog]
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


class Tracing:
    """Traces every request that generates; `otel.Traced` also traces those over HTTP."""

    def generation(self, job: TracedJob, clocks: Mapping[str, SequenceClock]) -> AbstractContextManager[None]:
        """Wraps a job's time in the engine; `clocks` are those of its sequences."""
        return nullcontext()


UNTRACED = Tracing()
