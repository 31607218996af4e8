"""Small helpers for the answers of several routes."""

import msgspec
from starlette.responses import Response

from personae.api.wire.schema import SamplingFields
from personae.errors import RequestError

encode_json = msgspec.json.Encoder().encode


def json_response(answer: msgspec.Struct, status: int = 200) -> Response:
    """A struct as an HTTP answer."""
    return Response(encode_json(answer), status, media_type="application/json")


def wants_usage(body: SamplingFields) -> bool:
    """Whether a stream must end with the usage. Raises RequestError for stream options without a stream."""
    if body.stream_options is None:
        return False
    if not body.stream:
        raise RequestError("`stream_options` needs `stream` to be true.", param="stream_options")
    return bool(body.stream_options.include_usage)


def wants_running_usage(body: SamplingFields) -> bool:
    """Whether every chunk of a stream must have the usage so far."""
    return wants_usage(body) and bool(body.stream_options and body.stream_options.continuous_usage_stats)
