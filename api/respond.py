"""Small helpers for the answers of several routes."""

import msgspec
from starlette.responses import Response

encode_json = msgspec.json.Encoder().encode


def json_response(answer: msgspec.Struct, status: int = 200) -> Response:
    """A struct as an HTTP answer."""
    return Response(encode_json(answer), status, media_type="application/json")
