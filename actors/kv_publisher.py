"""Publishes KV events as vLLM does, over ZeroMQ.

A message on the PUB socket has three frames: the topic, a sequence number of eight bytes, big-endian, and an
array `[ts, events, data_parallel_rank]` in msgpack; the rank is the engine's number. A subscriber that has
missed messages sends the first number that it wants to the replay socket (a ROUTER). It gets `[number,
message]` for each message that is still kept, and `[-1, empty]` at the end.

The sockets belong to a thread, so a subscriber cannot delay the server.
"""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from personae.engine.scheduling.kv_events import KVEvent
from personae.errors import LoadError

log = logging.getLogger("personae.actors")

KEPT = 10_000  # messages kept for replay
QUEUED = 100_000  # messages that a slow subscriber may lag behind, as in vLLM
WAITING = 10_000  # batches that may wait for the thread
END = (-1).to_bytes(8, "big", signed=True)
_POLL_SECONDS = 0.05


class EventBatch(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """The events of one engine; `ts` is Unix time in seconds."""

    ts: float
    events: Sequence[KVEvent]
    data_parallel_rank: int | None = None


class KVEventPublisher:
    """Created by `publishing`. `dropped` counts batches that came faster than they could be sent."""

    def __init__(self, publish: Any, replay: Any, topic: str) -> None:
        self._publish, self._replay = publish, replay
        self._topic = topic.encode()
        self._batches: queue.Queue[EventBatch | None] = queue.Queue(WAITING)
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=KEPT)
        self._encode = msgspec.msgpack.Encoder().encode
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self.dropped = 0

    def publish(self, engine: int, events: Sequence[KVEvent]) -> None:
        """Send an engine's events; never waits."""
        try:
            self._batches.put_nowait(EventBatch(time.time(), events, engine))
        except queue.Full:
            self.dropped += 1
            if self.dropped == 1:
                log.warning("KV events arrive faster than they can be published; some are lost")

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Send what is left, and end the thread."""
        self._batches.put(None)
        self._thread.join()

    def _run(self) -> None:
        number = 0
        while True:
            if self._replay is not None:
                while self._replay.poll(0):
                    self._answer()
            try:
                batch = self._batches.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                continue
            if batch is None:
                return
            name, data = number.to_bytes(8, "big"), self._encode(batch)
            self._publish.send_multipart((self._topic, name, data))
            self._kept.append((name, data))
            number += 1

    def _answer(self) -> None:
        """Answer a request for replay."""
        frames = self._replay.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != 8:
            log.warning("a replay request for KV events is malformed")
            return
        sender, _, first = frames
        for name, data in self._kept:
            if name >= first:  # big-endian, so bytes compare as the numbers do
                self._replay.send_multipart((sender, b"", name, data))
        self._replay.send_multipart((sender, b"", END, b""))


@contextmanager
def publishing(endpoint: str, replay: str | None, topic: str) -> Iterator[KVEventPublisher]:
    """Bind the sockets, and publish within the block. Raises LoadError if an address cannot be bound."""
    try:
        import zmq  # optional dependency
    except ImportError:
        raise LoadError("--kv-events needs pyzmq: pip install pyzmq.") from None
    context: Any = zmq.Context()
    sockets: list[Any] = []

    def bound(kind: int, address: str, option: str) -> Any:
        socket = context.socket(kind)
        sockets.append(socket)
        socket.set_hwm(QUEUED)
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            raise LoadError(f"{option} {address}: {error}.") from None
        return socket

    try:
        publish = bound(zmq.PUB, endpoint, "--kv-events")
        router = None if replay is None else bound(zmq.ROUTER, replay, "--kv-events-replay")
        publisher = KVEventPublisher(publish, router, topic)
        publisher.start()
        try:
            yield publisher
        finally:
            publisher.close()
    finally:
        for socket in sockets:
            socket.close(linger=200)
        context.term()
