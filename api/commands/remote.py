"""Helpers for commands that use a running server: its address, a client, and the messages of its refusals."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from personae.errors import RequestError

if TYPE_CHECKING:
    import httpx

URL = "http://127.0.0.1:8000"
"""Where a server runs, if nobody says."""


def server_root(url: str) -> str:
    """A server's address, given as such, without `http://`, or with `/v1` as OpenAI's clients want it."""
    url = url if "://" in url else f"http://{url}"
    return url.rstrip("/").removesuffix("/v1")


def unreachable(url: str, error: Exception) -> str:
    """What to tell the user if no answer came."""
    return (
        f"{server_root(url)} does not answer ({error}): "
        "start a server with `personae serve`, or say where one is with --url"
    )


def refusal(response: "httpx.Response") -> str:
    """Why the server refused: its own message, except for a missing key."""
    if response.status_code == 401:
        return "the server asks for a valid key: give one as PERSONAE_API_KEY, or with --key"
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the server answered {response.status_code}"


@contextmanager
def server(url: str, key: str | None, tenant: str | None = None) -> Iterator["httpx.Client"]:
    """A client of the server at `url`, for this tenant if it is not the key's. Raises RequestError if no
    answer comes."""
    import httpx

    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    params = {} if tenant is None else {"tenant": tenant}
    times = httpx.Timeout(10.0, read=None)
    try:
        with httpx.Client(base_url=server_root(url), headers=headers, params=params, timeout=times) as client:
            yield client
    except httpx.HTTPError as error:
        raise RequestError(unreachable(url, error)) from None


def checked(response: "httpx.Response") -> "httpx.Response":
    """The response, unless it is an error: then RequestError with the server's reason, and with the field
    if the server refused one (400)."""
    if response.is_error:
        raise RequestError(refusal(response), param=_field(response))
    return response


def _field(response: "httpx.Response") -> str | None:
    """The field that a 400 names."""
    if response.status_code != RequestError.status:
        return None
    try:
        field = response.json()["error"]["param"]
    except (ValueError, KeyError, TypeError):
        return None
    return field if isinstance(field, str) else None
