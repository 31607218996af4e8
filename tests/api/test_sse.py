"""Lines of server-sent events, however their bytes are cut."""

import json
from collections.abc import AsyncIterator, Iterator
from itertools import pairwise

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from personae.api import sse

pytestmark = pytest.mark.anyio

TEXT = 'data: {"a": "x\u2028y\u2029z\u0085é🙂"}\n\nevent: b\r\ndata: c\r: ping\n\ndata: [DONE]\n\n'
LINES = [
    'data: {"a": "x\u2028y\u2029z\u0085é🙂"}',
    "",
    "event: b",
    "data: c",
    ": ping",
    "",
    "data: [DONE]",
    "",
]


class Cut(httpx.SyncByteStream, httpx.AsyncByteStream):
    """A body that comes in pieces."""

    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces = pieces

    def __iter__(self) -> Iterator[bytes]:
        yield from self.pieces

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self.pieces:
            yield piece


def pieces(cuts: list[int]) -> list[bytes]:
    data = TEXT.encode()
    places = sorted({0, len(data), *(cut % len(data) for cut in cuts)})
    return [data[start:end] for start, end in pairwise(places)]


@given(st.lists(st.integers(0, 1000)))
def test_only_cr_and_lf_end_a_line(cuts: list[int]) -> None:
    assert [*sse.lines(httpx.Response(200, stream=Cut(pieces(cuts))))] == LINES


@pytest.mark.parametrize("cuts", [[], [*range(200)], [16, 17, 18]])
async def test_an_asynchronous_answer_has_the_same_lines(cuts: list[int]) -> None:
    response = httpx.Response(200, stream=Cut(pieces(cuts)))
    assert [line async for line in sse.async_lines(response)] == LINES


def test_json_with_such_characters_is_read_whole() -> None:
    first = next(sse.lines(httpx.Response(200, stream=Cut(pieces([])))))
    assert json.loads(first.removeprefix("data: ")) == {"a": "x\u2028y\u2029z\u0085é🙂"}
