"""The sockets between a frontend and engines on other machines: tickets, TLS, and unknown peers."""

import socket
import ssl
from collections.abc import Callable
from functools import partial
from typing import Any

import anyio
import pytest
from anyio import to_thread
from anyio.abc import ByteStream
from patience import PATIENCE

from personae.actors.cluster.contact import GREETING, TICKET_BYTES, UNKNOWN, WELCOME, Contact, Dial
from personae.actors.cluster.dial import dial
from personae.actors.cluster.frames import FrameReader
from personae.actors.cluster.listener import MAX_UNIDENTIFIED, Listener, open_listener
from personae.actors.framing import frame, receive_first
from personae.actors.line import Line
from personae.actors.wire import Describe, messages
from personae.engine.machine_sockets import ENGINE, FRONTEND, new_identity
from personae.errors import LineBroken, LoadError

pytestmark = pytest.mark.anyio


def call(listener: Listener, **changes: Any) -> Dial:
    contact = {"host": listener.host, "port": listener.port, "certificate": listener.certificate}
    identity = changes.pop("identity", None)
    return Dial(Contact(**{**contact, **changes}), identity)


async def in_thread(do: Callable[[], Any]) -> Any:
    with anyio.fail_after(PATIENCE):
        return await to_thread.run_sync(do, abandon_on_cancel=True)


async def raw(listener: Listener, data: bytes, count: int = 1) -> bytes:
    """What a peer that sends `data` receives."""

    def talk() -> bytes:
        with socket.create_connection((listener.host, listener.port), PATIENCE) as connection:
            connection.sendall(data)
            try:
                return connection.recv(count)
            except ConnectionResetError:
                return b""

    answer: bytes = await in_thread(talk)
    return answer


async def both(listener: Listener, expected: Any, dialled: Dial) -> tuple[Line, ByteStream]:
    line: Line = await in_thread(partial(dial, dialled, expected.ticket))
    return line, await expected.stream()


async def test_a_ticket_opens_one_connection_once(anyio_backend) -> None:
    async with open_listener("127.0.0.1") as listener, listener.expect() as expected:
        line, stream = await both(listener, expected, call(listener))
        line.sendall(b"first data")
        assert await stream.receive() == b"first data"
        with pytest.raises(LoadError, match="does not know the ticket"):
            await in_thread(partial(dial, call(listener), expected.ticket))
        line.close()
        await stream.aclose()


@pytest.mark.parametrize("wrong", ["unknown", "expired", "withdrawn", "of another listener"])
async def test_a_wrong_ticket_is_refused_and_the_right_one_still_holds(anyio_backend, wrong: str) -> None:
    async with (
        open_listener("127.0.0.1") as listener,
        open_listener("127.0.0.1") as other,
        listener.expect() as right,
        listener.expect(0.0) as expired,
        other.expect() as foreign,
    ):
        async with listener.expect() as withdrawn:
            pass
        tickets = {
            "unknown": bytes(TICKET_BYTES),
            "expired": expired.ticket,
            "withdrawn": withdrawn.ticket,
            "of another listener": foreign.ticket,
        }
        assert await raw(listener, GREETING + tickets[wrong]) == UNKNOWN
        assert await raw(listener, GREETING + right.ticket) == WELCOME
        await (await right.stream()).aclose()


async def test_a_ticket_that_nobody_shows_ends_the_wait_with_a_timeout(anyio_backend) -> None:
    async with open_listener("127.0.0.1") as listener, listener.expect(0.05) as expected:
        with pytest.raises(TimeoutError):
            await expected.stream()


async def test_a_peer_with_another_protocol_is_disconnected_without_an_answer(anyio_backend) -> None:
    async with open_listener("127.0.0.1") as listener:
        for data in (b"GET / HTTP/1.1\r\n\r\n", bytes(200), GREETING[:-1] + b"2" + bytes(TICKET_BYTES)):
            assert await raw(listener, data) == b""


async def test_silent_peers_are_disconnected_in_time_and_keep_no_engine_out(anyio_backend) -> None:
    async with open_listener("127.0.0.1", hello_seconds=PATIENCE) as listener:
        silent = [
            socket.create_connection((listener.host, listener.port)) for _ in range(MAX_UNIDENTIFIED + 8)
        ]
        async with listener.expect() as expected:
            line, stream = await both(listener, expected, call(listener))
            line.close()
            await stream.aclose()
        assert await in_thread(partial(silent[0].recv, 1)) == b"", "the oldest made room"
        for connection in silent:
            connection.close()
    async with open_listener("127.0.0.1", hello_seconds=0.05) as listener:
        assert await raw(listener, GREETING + b"half a ticket") == b"", "its time was over"


async def test_a_taken_port_and_an_address_of_another_machine_are_refused(anyio_backend) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(LoadError, match=rf"127.0.0.1:{port}, can't be opened: .*in use"):
            async with open_listener("127.0.0.1", port):
                raise AssertionError("not reached")
    with pytest.raises(LoadError, match="can't be opened"):
        async with open_listener("203.0.113.1"):
            raise AssertionError("not reached")


@pytest.fixture
def beyond_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treats loopback as an address that other machines reach."""
    for module in ("listener", "dial"):
        monkeypatch.setattr(f"personae.actors.cluster.{module}.is_loopback", lambda host: False)


async def test_beyond_loopback_both_sides_prove_their_identity(anyio_backend, beyond_loopback: None) -> None:
    engine, stranger = new_identity(ENGINE), new_identity(ENGINE)
    async with open_listener("127.0.0.1") as listener, listener.expect() as expected:
        listener.admit(engine.certificate)
        with pytest.raises(LoadError, match="can't be reached"):
            await in_thread(partial(dial, call(listener, identity=stranger), expected.ticket, 0.0))
        impostor = call(listener, identity=engine, certificate=new_identity(FRONTEND).certificate)
        with pytest.raises(LoadError, match="is not the frontend"):
            await in_thread(partial(dial, impostor, expected.ticket))
        with pytest.raises(LoadError, match="is not loopback, and the frontend has sent no certificate"):
            await in_thread(partial(dial, call(listener, certificate=None), expected.ticket))
        line, stream = await both(listener, expected, call(listener, identity=engine))
        line.close()
        await stream.aclose()


async def test_a_session_continues_as_a_stream_with_large_messages_in_both_directions(
    anyio_backend, beyond_loopback: None
) -> None:
    engine = new_identity(ENGINE)
    large = bytes(range(256)) * 4000
    async with open_listener("127.0.0.1") as listener, listener.expect() as expected:
        listener.admit(engine.certificate)
        line, stream = await both(listener, expected, call(listener, identity=engine))
        await stream.send(b"hello")
        assert await in_thread(partial(line.recv, 2)) == b"he"
        mine = await line.stream()
        assert await mine.receive() == b"llo", "what was read is not lost"
        for one, other in ((mine, stream), (stream, mine)):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(one.send, large)
                got = b""
                while len(got) < len(large):
                    got += await other.receive()
            assert got == large
        await mine.aclose()
        with pytest.raises((anyio.EndOfStream, anyio.BrokenResourceError)):
            await stream.receive()
        await stream.aclose()


async def test_nothing_is_readable_on_the_wire_beyond_loopback(anyio_backend, beyond_loopback: None) -> None:
    async with open_listener("127.0.0.1") as listener, listener.expect() as expected:
        answer = await raw(listener, GREETING + expected.ticket, 100)
        assert WELCOME not in answer[:1], "plain text is no TLS record"
        with pytest.raises(ssl.SSLError):
            await in_thread(partial(_tls_without_certificate, listener, expected.ticket))


def _tls_without_certificate(listener: Listener, ticket: bytes) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with (
        socket.create_connection((listener.host, listener.port), PATIENCE) as plain,
        context.wrap_socket(plain) as connection,
    ):
        connection.sendall(GREETING + ticket)
        if not connection.recv(1):
            raise ssl.SSLError("hung up")


async def test_an_incomplete_frame_ends_the_stream_and_one_that_is_too_long_is_not_read(
    anyio_backend,
) -> None:
    async with open_listener("127.0.0.1") as listener:
        for data in (frame(Describe())[:-1], b"\xff\xff\xff\xff", frame(Describe())[:4] + b"\xc1" * 40):
            async with listener.expect() as expected:
                line, stream = await both(listener, expected, call(listener))
                line.sendall(data)
                if data[:1] != b"\xff":
                    line.close()
                reader: FrameReader[Describe] = FrameReader(stream, Describe, 2**20)
                assert await reader.next() is None
                line.close()
                await stream.aclose()
        async with listener.expect() as expected:
            line, stream = await both(listener, expected, call(listener))
            line.sendall(b"\xff\xff\xff\xff")
            with pytest.raises(LineBroken, match="A frame of 4294967295 bytes was announced"):
                await anext(messages(stream, Describe))
            await stream.send(b"\xff\xff\xff\xff")
            with pytest.raises(LineBroken):
                await in_thread(partial(receive_first, line, Describe))
            line.close()
            await stream.aclose()


async def test_cancelling_a_read_of_a_frame_loses_nothing(anyio_backend) -> None:
    async with open_listener("127.0.0.1") as listener, listener.expect() as expected:
        line, stream = await both(listener, expected, call(listener))
        reader: FrameReader[Describe] = FrameReader(stream, Describe, 2**20)
        data = frame(Describe())
        line.sendall(data[:5])
        with anyio.move_on_after(0.05):
            await reader.next()
        line.sendall(data[5:] + data)
        assert [await reader.next(), await reader.next()] == [Describe(), Describe()]
        line.close()
        assert await reader.next() is None
        await stream.aclose()
