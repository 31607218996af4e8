"""Reads server-sent events from an answer of httpx.

httpx's own `iter_lines` also ends a line at U+0085, U+2028 and U+2029, which JSON may have as they are. In an
event only CR and LF end a line.
"""

import re
from collections.abc import AsyncIterator, Iterator

import httpx

_END = re.compile(rb"\r\n|\r(?=.)|\n", re.DOTALL)  # a CR at the end may be half of a CRLF


def lines(response: httpx.Response) -> Iterator[str]:
    """The lines of a streamed answer, as they come."""
    rest = b""
    for data in response.iter_bytes():
        *complete, rest = _END.split(rest + data)
        yield from (line.decode() for line in complete)
    if rest:
        yield rest.removesuffix(b"\r").decode()


async def async_lines(response: httpx.Response) -> AsyncIterator[str]:
    """The same, of an asynchronous client."""
    rest = b""
    async for data in response.aiter_bytes():
        *complete, rest = _END.split(rest + data)
        for line in complete:
            yield line.decode()
    if rest:
        yield rest.removesuffix(b"\r").decode()
