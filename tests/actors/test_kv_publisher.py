"""KV events over ZeroMQ, as vLLM publishes them, read by a subscriber of the same protocol."""

import time
from typing import Any

import msgspec
import pytest
from patience import PATIENCE

from personae.actors.kv_publisher import END, KVEventPublisher, publishing
from personae.engine.scheduling.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from personae.errors import LoadError

zmq = pytest.importorskip("zmq")

EVENTS = (BlockStored([7, 8], None, [1, 2, 3, 4], 2, lora_name="digest"), BlockRemoved([7]))


@pytest.fixture
def subscriber() -> Any:
    context = zmq.Context()
    sockets: list[Any] = []

    def connected(kind: int, address: str) -> Any:
        sockets.append(context.socket(kind))
        sockets[-1].connect(address)
        return sockets[-1]

    yield connected
    for socket in sockets:
        socket.close(linger=0)
    context.term()


def address(publisher: KVEventPublisher, name: str) -> str:
    return getattr(publisher, name).getsockopt_string(zmq.LAST_ENDPOINT)


def received(socket: Any) -> list[bytes]:
    assert socket.poll(int(1000 * PATIENCE)), "nothing came"
    return socket.recv_multipart()


def test_a_subscriber_reads_the_topic_a_number_and_the_batch_and_asks_for_what_it_missed(
    subscriber: Any,
) -> None:
    with publishing("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", "kv@pod") as publisher:
        socket = subscriber(zmq.SUB, address(publisher, "_publish"))
        socket.setsockopt_string(zmq.SUBSCRIBE, "kv@")
        missed = 0
        while not socket.poll(50):  # a subscription takes a moment, and messages before that are lost
            publisher.publish(0, (AllBlocksCleared(),))
            missed += 1
        while socket.poll(200):
            topic, number, data = socket.recv_multipart()
        before = time.time()
        publisher.publish(3, EVENTS)
        topic, following, data = received(socket)
        assert topic == b"kv@pod"
        assert len(number) == 8
        assert int.from_bytes(following, "big") == int.from_bytes(number, "big") + 1 == missed
        ts, events, rank = msgspec.msgpack.decode(data)
        assert before - 1 < ts < before + PATIENCE
        assert rank == 3
        assert events == [
            ["BlockStored", [7, 8], None, [1, 2, 3, 4], 2, None, None, "digest"],
            ["BlockRemoved", [7], None],
        ]
        replay = subscriber(zmq.DEALER, address(publisher, "_replay"))
        replay.send_multipart((b"", (missed - 1).to_bytes(8, "big")))
        again = [received(replay) for _ in range(3)]
        assert [frames[-2] for frames in again] == [number, following, END]
        assert again[1][-1] == data
        replay.send_multipart((b"", b"nonsense, too long"))
        replay.send_multipart((b"", (missed + 1).to_bytes(8, "big")))
        assert received(replay)[-2] == END, "who asks for nonsense gets nothing, and others are served"


def test_an_address_that_is_taken_is_refused_by_its_option() -> None:
    with publishing("tcp://127.0.0.1:*", None, "") as publisher:
        taken = address(publisher, "_publish")
        with pytest.raises(LoadError, match=f"--kv-events {taken}"), publishing(taken, None, ""):
            raise AssertionError("not reached")
    refused = pytest.raises(LoadError, match="--kv-events-replay nowhere")
    with refused, publishing("tcp://127.0.0.1:*", "nowhere", ""):
        raise AssertionError("not reached")
