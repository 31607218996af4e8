"""Helpers for commands that use a running server: its address, and the messages of its refusals."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import httpx


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
