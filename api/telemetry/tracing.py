"""Where spans begin and end. These methods do nothing; `otel.py` has the real tracing."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

from starlette.types import ASGIApp

from personae.api.telemetry.metrics import SequenceClock
from personae.errors import LoadError

if TYPE_CHECKING:
    from personae.api.generation import Job


class Tracing:
    """Traces every request that generates; `otel.Traced` also traces those over HTTP."""

    def generation(self, job: "Job", clocks: Mapping[str, SequenceClock]) -> AbstractContextManager[None]:
        """Wraps a job's time in the engine; `clocks` are those of its sequences."""
        return nullcontext()


UNTRACED = Tracing()


@contextmanager
def tracing_to(endpoint: str | None) -> Iterator[tuple[Tracing, Callable[[ASGIApp], ASGIApp]]]:
    """The tracing for an endpoint, and what wraps the app for it. Raises LoadError if it is not installed."""
    if endpoint is None:
        yield UNTRACED, lambda app: app
        return
    if not endpoint.startswith(("http://", "https://")):
        raise LoadError(
            f"--otlp-traces-endpoint {endpoint} is no URL: write one like http://localhost:4318/v1/traces."
        )
    try:
        from personae.api.telemetry.otel import Traced, exporting
    except ImportError as error:
        raise LoadError(
            "--otlp-traces-endpoint needs OpenTelemetry (pip install opentelemetry-sdk "
            f"opentelemetry-exporter-otlp-proto-http): {error}."
        ) from None
    with exporting(endpoint) as tracing:
        yield tracing, lambda app: Traced(app, tracing=tracing)
