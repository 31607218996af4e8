"""The MCP servers that requests may name: the operator's list of URLs.

An entry allows its own URL and everything below it: `https://mcp.example/team` allows
`https://mcp.example/team/search`, and not `https://mcp.example/teams`.
"""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import NamedTuple
from urllib.parse import urlsplit

from personae.errors import Forbidden, RequestError

_PORTS = {"http": 80, "https": 443}
_LONGEST = 2048


class _Address(NamedTuple):
    scheme: str
    host: str
    port: int
    parts: tuple[str, ...]


def check_servers(urls: tuple[str, ...]) -> tuple[str, ...]:
    """The values of `--mcp-server`. Raises ValueError."""
    for url in urls:
        try:
            _parsed(url)
        except ValueError as error:
            raise ValueError(f"'{url}' is no MCP server: {error}.") from None
        if "?" in url:
            raise ValueError(f"'{url}' has a query; requests choose that.")
    if urls and find_spec("mcp") is None:
        raise ValueError("MCP servers need the package mcp (pip install 'mcp>=2').")
    return urls


def check_allowed(url: str, urls: Sequence[str], param: str) -> None:
    """Check that a request may name this server. Raises RequestError or Forbidden, which name `param`."""
    try:
        place = _parsed(url)
    except ValueError as error:
        raise RequestError(f"`{param}` is no MCP server: {error}.", param=param) from None
    if not urls:
        raise Forbidden(
            "No MCP server may be used: start the server with --mcp-server.",
            param=param,
            code="mcp_server_not_allowed",
        )
    for entry in map(_parsed, urls):
        if place[:3] == entry[:3] and place.parts[: len(entry.parts)] == entry.parts:
            return
    raise Forbidden(
        f"`{param}` is not below one of the server's --mcp-server URLs.",
        param=param,
        code="mcp_server_not_allowed",
    )


def without_query(url: str) -> str:
    """The URL as it is shown: a query may have secrets."""
    return url.partition("?")[0]


def _parsed(url: str) -> _Address:
    """Raises ValueError that says what is wrong, without a full stop."""
    if len(url) > _LONGEST:
        raise ValueError(f"it has more than {_LONGEST} characters")
    if not url.isascii() or not url.isprintable() or " " in url or "\\" in url:
        raise ValueError("a URL has only printable ASCII characters, no space and no backslash")
    try:
        split = urlsplit(url)
        port = split.port
    except ValueError:
        raise ValueError("its host or port is malformed") from None
    if split.scheme not in _PORTS or not split.hostname:
        raise ValueError("it is not an http:// or https:// URL with a host")
    if split.username is not None or split.password is not None:
        raise ValueError("it has a user name or a password; use `authorization`")
    if "#" in url:
        raise ValueError("it has a fragment")
    path = split.path.removesuffix("/")
    parts = tuple(path.split("/")[1:])
    if "%" in path or any(set(part) <= {"."} for part in parts):
        raise ValueError("its path has `%`, an empty part, or a part of dots only")
    return _Address(split.scheme, split.hostname, port or _PORTS[split.scheme], parts)
