"""What the console's charts are drawn from: some of the metrics, as JSON."""

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from personae.api.context import RequestContext, context_of
from personae.api.http.operation import operation
from personae.api.respond import json_response

_LEFT_OUT = "_created"  # when a metric began
_MAILBOXES = ("personae:mailbox", "personae:actor")


class LiveSample(msgspec.Struct, frozen=True):
    """A number with its labels, as `/metrics` has it."""

    labels: dict[str, str]
    value: float


class LiveMetrics(msgspec.Struct, frozen=True):
    """Samples by the names that they have in `/metrics`."""

    samples: dict[str, list[LiveSample]]
    object: str = "stats"


@operation("GET", "/v1/stats", answers={200: LiveMetrics}, admin=True)
async def get_stats(request: Request) -> Response:
    """Show what the server does now, as JSON: those of the metrics that the console draws."""
    return json_response(_live(context_of(request)))


def _live(context: RequestContext) -> LiveMetrics:
    found: dict[str, list[LiveSample]] = {}
    for family in context.metrics.live():
        if family.name.startswith(_MAILBOXES):
            continue
        for sample in family.samples:
            if not sample.name.endswith(_LEFT_OUT):
                found.setdefault(sample.name, []).append(LiveSample(dict(sample.labels), float(sample.value)))
    return LiveMetrics(found)
