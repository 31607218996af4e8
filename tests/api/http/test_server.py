"""The real server on loopback: what clients do to connections."""

import json
import logging
import re
import resource
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from urllib.parse import urlsplit

import anyio
import httpx
import pytest
from fake_engine import FakeEngine
from live_server import serving
from patience import PATIENCE, eventually
from starlette.types import Receive, Scope, Send

from personae.api.app import create_app
from personae.api.http import server
from personae.api.http.address import bind, url
from personae.api.http.protocol import LOOK_SECONDS
from personae.api.settings import ApiSettings
from personae.errors import LoadError

ASK = {"model": "base", "prompt": "hi"}
SMALL = ApiSettings(max_header_bytes=4096, max_body_bytes=10_000)
HASTY = ApiSettings(header_seconds=0.5, body_seconds=0.5, stall_seconds=0.5)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with serving(create_app(FakeEngine(), SMALL), SMALL) as address:
        yield address


@pytest.fixture(scope="module")
def hasty() -> Iterator[str]:
    """A server with short timeouts."""
    with serving(create_app(FakeEngine(), HASTY), HASTY) as address:
        yield address


def completion(**fields: object) -> bytes:
    """A request as it is sent."""
    body = json.dumps(ASK | fields).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


@contextmanager
def connection(address: str) -> Iterator[socket.socket]:
    place = urlsplit(address)
    with socket.create_connection((place.hostname, place.port), timeout=PATIENCE) as connected:
        yield connected


def read_all(connected: socket.socket) -> bytes:
    """Until the server closes."""
    data = b""
    try:
        while more := connected.recv(65536):
            data += more
    except ConnectionResetError:
        pass
    return data


def refusal(data: bytes) -> tuple[int, dict[str, str]]:
    """Status and error of a raw answer that closes the connection."""
    head, body = data.split(b"\r\n\r\n", 1)
    lines = head.decode().lower().split("\r\n")
    assert any(line.startswith("x-request-id: ") for line in lines)
    assert "connection: close" in lines
    error: dict[str, str] = json.loads(body)["error"]
    return int(lines[0].split()[1]), error


def works(address: str) -> bool:
    return httpx.post(f"{address}/v1/completions", json=ASK, timeout=PATIENCE).status_code == 200


def test_requests_are_served_on_one_connection(address: str) -> None:
    with httpx.Client(base_url=address, timeout=PATIENCE) as client:
        for _ in range(3):
            answer = client.post("/v1/completions", json=ASK)
            assert answer.json()["choices"][0]["text"] == "Hello, world!"
        with client.stream("POST", "/v1/completions", json=ASK | {"stream": True}) as response:
            assert list(response.iter_lines())[-2] == "data: [DONE]"


def test_a_header_without_end_is_refused(address: str) -> None:
    with connection(address) as connected:
        connected.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\nx-flood: ")
        for _ in range(100):
            connected.sendall(b"y" * 1000)
        assert refusal(read_all(connected))[0] == 431
    assert works(address)


def test_many_headers_are_refused_by_name(address: str) -> None:
    lines = "".join(f"x-{number}: {'y' * 30}\r\n" for number in range(200))
    with connection(address) as connected:
        connected.sendall(f"GET /health HTTP/1.1\r\nhost: localhost\r\n{lines}\r\n".encode())
        status, error = refusal(read_all(connected))
    assert (status, error["param"]) == (431, "headers")
    assert works(address)


def heard(address: str, *pieces: bytes, statuses: Sequence[int]) -> bytes:
    """What a hasty server answers to these pieces, a piece each time that it has said something. It gives up
    a client that is held up between two of them, or before it has read everything, so it is asked again until
    answers with these statuses have come, whole.
    """
    found = b""

    def asked() -> bool:
        nonlocal found
        with suppress(OSError), connection(address) as connected:
            connected.sendall(pieces[0])
            found = b""
            for piece in pieces[1:]:
                found += connected.recv(65536)
                connected.sendall(piece)
            found += read_all(connected)
        begun = [int(status) for status in re.findall(rb"HTTP/1\.1 (\d+)", found)]
        return begun == [*statuses] and found.endswith(b"}")

    eventually(asked, f"it answers with {statuses}")
    return found


def test_a_head_that_does_not_come_is_not_waited_for(hasty: str) -> None:
    status, error = refusal(heard(hasty, b"GET /health HTTP/1.1\r\nhost: localhost", statuses=[408]))
    assert (status, error["code"]) == (408, "request_timeout")


def test_a_head_that_does_not_come_after_an_answer_is_not_waited_for() -> None:
    longer = completion(timeout=1.0)  # than a head may take
    app = create_app(FakeEngine(hold_after=1), HASTY)
    with serving(app, HASTY) as address:
        said = heard(address, longer + b"GET /health HTTP/1.1\r\nhost:", b"l", statuses=[504, 408])
    _, line, refused = said.partition(b"HTTP/1.1 408")
    assert refusal(line + refused)[1]["param"] == "headers"


@pytest.mark.parametrize("announced", ["content-length: 1000", "transfer-encoding: chunked"])
def test_nobody_reads_the_rest_of_a_body_that_was_not_asked_for(address: str, announced: str) -> None:
    with connection(address) as connected:
        connected.sendall(f"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n{announced}\r\n\r\n".encode())
        answer = read_all(connected)
    assert answer.startswith(b"HTTP/1.1 200")
    assert b"connection: close" in answer


@pytest.mark.parametrize(
    "codings", [["gzip, chunked"], ["gzip", "chunked"], ["chunked", "chunked"], ["identity"], ["xchunked"]]
)
def test_a_transfer_encoding_other_than_chunked_is_refused(address: str, codings: list[str]) -> None:
    body = completion().partition(b"\r\n\r\n")[2]
    headers = "".join(f"transfer-encoding: {coding}\r\n" for coding in codings)
    with connection(address) as connected:
        connected.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            + headers.encode()
            + b"\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
        )
        answer = read_all(connected)
    assert answer.startswith(b"HTTP/1.1 400")
    assert b"connection: close" in answer  # what follows on it is not read as another request
    assert answer.count(b"HTTP/1.1") == 1


def test_chunked_may_be_written_in_any_case(address: str) -> None:
    head, _, body = completion().partition(b"\r\n\r\n")
    head = re.sub(rb"content-length: \d+", b"transfer-encoding: Chunked", head)
    with connection(address) as connected:
        connected.sendall(head + b"\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(body), body))
        assert connected.recv(100).startswith(b"HTTP/1.1 200")


def test_a_connection_for_which_there_is_no_room_is_answered_503(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "most_connections", lambda: 3)
    with serving(create_app(FakeEngine())) as address, ExitStack() as open_ones:
        for _ in range(3):
            connected = open_ones.enter_context(connection(address))
            connected.sendall(completion())
            assert connected.recv(100).startswith(b"HTTP/1.1 200")
        response = httpx.post(f"{address}/v1/completions", json=ASK)
        assert response.status_code == 503
        assert response.headers["retry-after"] == "1"
        assert response.headers["connection"] == "close"
        assert response.json()["error"]["code"] == "too_many_connections"
        open_ones.close()
        eventually(lambda: works(address), "there is room again")


@pytest.mark.parametrize(
    ("files", "most"), [(256, 160), (1024, 896), (65536, 57344), (2**20, 57344), (50, 1)]
)
def test_connections_leave_files_for_everything_else(
    files: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda what: (files, files))
    assert server.most_connections() == most


def test_a_connection_that_says_nothing_is_closed(hasty: str) -> None:
    with connection(hasty) as connected:
        assert read_all(connected) == b""


def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    settings = ApiSettings(body_seconds=0.5)
    with serving(create_app(FakeEngine(), settings), settings) as address, connection(address) as connected:
        connected.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            b"content-length: 100\r\n\r\n{"
        )
        status, error = refusal(read_all(connected))
    assert (status, error["param"]) == (408, "body")


def test_a_chunked_body_over_the_limit_is_refused(address: str) -> None:
    with connection(address) as connected:
        connected.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            b"transfer-encoding: chunked\r\n\r\n" + b"3000\r\n" + b" " * 0x3000 + b"\r\n"
        )
        status, error = refusal(read_all(connected))
    assert (status, error["code"]) == (413, "payload_too_large")


LONG = 4 * 2**20  # bytes; more than the system buffers, so that some arrive after the answer


def sent_before_reading(connected: socket.socket, pieces: int = 1) -> bytes:
    """The answer to a client that reads only after its whole body is sent, which has so many long pieces."""
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    connected.sendall(f"{head}content-length: {pieces * LONG}\r\n\r\n".encode())
    for _ in range(pieces):
        connected.sendall(b" " * LONG)
    return read_all(connected)


def test_a_client_that_reads_after_sending_gets_the_answer_that_closes_its_connection(address: str) -> None:
    with connection(address) as connected:
        status, error = refusal(sent_before_reading(connected))
    assert (status, error["code"]) == (413, "payload_too_large")


def test_no_http_is_refused_though_more_of_it_comes(address: str) -> None:
    with connection(address) as connected:
        for _ in range(2):
            connected.sendall(b"hello\r\n\r\n" + b" " * LONG)
        status, error = refusal(read_all(connected))
    assert (status, error["code"]) == (400, "invalid_http")


def test_httpx_gets_the_413_of_a_body_over_the_limit(address: str) -> None:
    for _ in range(5):
        answer = httpx.post(f"{address}/v1/completions", content=b" " * LONG, timeout=PATIENCE)
        assert answer.status_code == 413


@pytest.mark.parametrize(
    "settings",
    [
        ApiSettings(max_body_bytes=1, linger_seconds=0.2, linger_bytes=2**40),
        ApiSettings(max_body_bytes=1, linger_bytes=2**18),
    ],
    ids=["time", "bytes"],
)
def test_a_client_that_sends_for_ever_is_waited_for_within_limits(settings: ApiSettings) -> None:
    closed = pytest.raises((BrokenPipeError, ConnectionResetError))
    with (
        serving(create_app(FakeEngine(), settings), settings) as address,
        connection(address) as connected,
        closed,
    ):
        sent_before_reading(connected, pieces=2**20)


def test_a_server_stops_at_once_though_a_client_still_sends() -> None:
    settings = ApiSettings(max_body_bytes=1, linger_seconds=PATIENCE)
    with ExitStack() as stack:
        with serving(create_app(FakeEngine(), settings), settings, stop=True) as address:
            connected = stack.enter_context(connection(address))
            connected.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: l\r\ncontent-length: 9\r\n\r\n")
            answer = b""
            while not answer.endswith(b"}}"):
                answer += connected.recv(65536)
            assert refusal(answer)[0] == 413
            begun = time.monotonic()
        assert time.monotonic() - begun < server._LAST_SECONDS


def test_what_is_no_http_is_refused_in_our_shape(address: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.CRITICAL), connection(address) as connected:
        connected.sendall(b"hello there\r\n\r\n")
        status, error = refusal(read_all(connected))
    assert (status, error["code"]) == (400, "invalid_http")


def test_a_client_that_hangs_up_in_the_middle_of_a_stream_cancels_it() -> None:
    engine = FakeEngine(hold_after=3)
    with serving(create_app(engine)) as address:
        body = ASK | {"stream": True, "n": 2}
        with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=PATIENCE) as response:
            lines = response.iter_lines()
            next(lines)
            assert len(engine.live) == 2
        assert engine.left.wait(PATIENCE)
        assert engine.live == set()
        engine.hold_after = None
        assert works(address)


def test_a_client_that_hangs_up_while_waiting_cancels_too() -> None:
    engine = FakeEngine(hold_after=3)
    with serving(create_app(engine)) as address:
        with connection(address) as connected:
            connected.sendall(completion())
            eventually(lambda: bool(engine.live), "it is being answered")
        assert engine.left.wait(PATIENCE)
        assert len(engine.cancelled) == 1


def test_a_client_that_does_not_read_is_dropped_and_its_sequence_freed() -> None:
    engine = FakeEngine(max_model_len=1_000_000, burst=20)
    endless = completion(stream=True, max_tokens=900_000, ignore_eos=True, logprobs=20)
    settings = ApiSettings(stall_seconds=0.5)
    with serving(create_app(engine, settings), settings) as address, connection(address) as connected:
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connected.sendall(endless)
        assert engine.left.wait(PATIENCE), "the sequence still runs"
        assert engine.live == set()


def test_stopping_finishes_what_runs() -> None:
    engine = FakeEngine()
    with serving(create_app(engine)) as address:
        assert works(address)
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{address}/health")


def test_stopping_cancels_what_does_not_end_in_time(caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeEngine(hold_after=1)
    with caplog.at_level(logging.CRITICAL), serving(create_app(engine), drain_seconds=0) as address:
        client = httpx.Client(timeout=PATIENCE)
        response = client.send(
            client.build_request("POST", f"{address}/v1/completions", json=ASK | {"stream": True}),
            stream=True,
        )
        pieces = response.iter_raw()
        next(pieces)
    assert engine.live == set()
    with pytest.raises(httpx.RemoteProtocolError):
        list(pieces)
    client.close()


def test_an_upload_that_stalls_ends_with_the_drain(caplog: pytest.LogCaptureFixture) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    with caplog.at_level(logging.CRITICAL), ExitStack() as stack:
        with serving(create_app(FakeEngine()), drain_seconds=0.2, stop=True) as address:
            connected = stack.enter_context(connection(address))
            connected.sendall(head + b"content-length: 1000\r\n\r\n{")
            assert works(address)
        status, error = refusal(read_all(connected))
    assert (status, error["code"]) == (503, "shutting_down")
    assert not caplog.records, "no task had to be cancelled"


def test_an_address_in_use_is_a_load_error_before_anything_is_loaded() -> None:
    with bind("127.0.0.1", 0) as first:
        first.listen()
        with pytest.raises(
            LoadError, match=r"Cannot listen on 127\.0\.0\.1 port .*--port 0 takes a free port"
        ):
            bind("127.0.0.1", first.getsockname()[1])


def test_an_address_in_use_says_that_a_server_answers_there(address: str) -> None:
    with pytest.raises(LoadError, match=r"A server of version .* answers there"):
        bind("127.0.0.1", urlsplit(address).port or 0)


def test_a_host_that_does_not_exist_is_a_load_error() -> None:
    with pytest.raises(LoadError, match="Cannot listen"):
        bind("256.256.256.256", 0)


def test_the_url_names_the_port_that_was_found() -> None:
    with bind("127.0.0.1", 0) as listener:
        assert url(listener) == f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_a_client_that_leaves_ends_the_stream_that_runs_while_its_next_request_waits() -> None:
    told = threading.Event()

    async def endless(scope: Scope, receive: Receive, send: Send) -> None:
        async def listen() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            told.set()
            tasks.cancel_scope.cancel()

        await send({"type": "http.response.start", "status": 200, "headers": []})
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(listen)
            while True:
                await send({"type": "http.response.body", "body": b"more", "more_body": True})
                await anyio.sleep(0.001)

    with serving(endless) as address:
        with connection(address) as connected:
            connected.sendall(2 * b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert connected.recv(1)
        eventually(told.is_set, "the stream is told that its client has left")


def test_a_client_that_leaves_ends_the_silent_answer_that_runs_while_its_next_request_waits() -> None:
    engine = FakeEngine(hold_after=3)
    with serving(create_app(engine)) as address:
        with connection(address) as connected:
            connected.sendall(completion())
            eventually(lambda: bool(engine.live), "it is being answered")
            connected.sendall(completion())
            time.sleep(LOOK_SECONDS)  # nothing is found while the client is there
            assert engine.live
        assert engine.left.wait(PATIENCE)
        assert len(engine.submitted) == len(engine.cancelled) == 1
