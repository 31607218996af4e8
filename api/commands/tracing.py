"""Tracing to the collector that the command line names."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from starlette.types import ASGIApp

from personae.api.telemetry.tracing import UNTRACED, Tracing
from personae.errors import LoadError


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
