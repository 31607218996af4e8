"""What the stages of a model exchange while they compute: the hidden states of a step's tokens.

Each stage has some of the layers. Stage 0 embeds the tokens, runs the first layers and sends the hidden
states to the next stage. The last stage sends them back to stage 0, which has the output matrix. So
everything with an entry for each token of the vocabulary is in one place, and the first rank samples as
without stages.

Where several ranks share the layers of a stage, each has the whole hidden states, and sends them to the rank
with its own number in the next stage.

A step's tokens may go through the stages in parts, one after the other. Then stage 0 sends parts while
earlier ones come back. It takes in what has come while it waits to send, so that no stage waits for ever.
"""

import weakref
from collections.abc import Callable
from selectors import EVENT_READ, EVENT_WRITE, DefaultSelector
from socket import socket, socketpair
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from personae.engine.parallel.comm import Comm


class Neighbours(NamedTuple):
    """A rank's connections: from the stage before it, and to the stage after it."""

    before: socket
    after: socket


def ring(size: int, stages: int) -> list[Neighbours]:
    """The connections of all ranks, stage by stage, with `size` ranks in each. The last stage is before the
    first."""
    pairs = [[socketpair() for _ in range(size)] for _ in range(stages)]
    return [
        Neighbours(before=pairs[stage - 1][rank][1], after=pairs[stage][rank][0])
        for stage in range(stages)
        for rank in range(size)
    ]


class Pipeline:
    """The Comm of a rank of one of several stages. `inner`: what the ranks of its stage exchange. `ended` is
    called if a neighbour has closed its connection; it raises an error. One thread calls it.

    `sent`: how many bytes this rank has sent to the next stage so far.
    """

    def __init__(
        self,
        inner: Comm,
        stage: int,
        stages: int,
        neighbours: Neighbours,
        ended: Callable[[], NoReturn],
    ) -> None:
        self.rank, self.size, self.expert_groups = inner.rank, inner.size, inner.expert_groups
        self.stage, self.stages, self.sums = stage, stages, None
        self.all_reduce, self.all_gather = inner.all_reduce, inner.all_gather
        self.inner = inner
        self.sent = 0
        self._ended = ended
        self.open(neighbours)

    def open(self, neighbours: Neighbours) -> None:
        """Begin anew with other connections, in the place of earlier ones."""
        self._before, self._after = neighbours
        self._expected = memoryview(b"")  # what the stage before has still to send
        self._after.setblocking(False)
        self._sending, self._both = DefaultSelector(), DefaultSelector()
        for waiting in (self._sending, self._both):
            waiting.register(self._after, EVENT_WRITE)
        self._both.register(self._before, EVENT_READ)
        for connection in neighbours:
            weakref.finalize(self, connection.close)

    def close(self) -> None:
        """Close the connections, which the neighbours notice."""
        self._before.close()
        self._after.close()

    def send(self, x: Tensor) -> None:
        """See Comm."""
        rest = _bytes_of(x.contiguous())
        self.sent += len(rest)
        while rest:
            waiting = self._both if self._expected else self._sending
            ready = [key.fileobj for key, _ in waiting.select()]
            if self._before in ready:
                self._take()
            if self._after in ready:
                rest = rest[self._give(rest) :]

    def _give(self, content: memoryview) -> int:
        """Send as much as the connection takes now. Returns how many bytes that is."""
        try:
            return self._after.send(content)
        except BlockingIOError:
            return 0
        except OSError:
            self._ended()

    def begin_receive(self, x: Tensor) -> None:
        """See Comm."""
        self._expected = _bytes_of(x)

    def end_receive(self) -> None:
        """See Comm."""
        while self._expected:
            self._take()

    def _take(self) -> None:
        """Take in what has come; wait for it if nothing has."""
        try:
            count = self._before.recv_into(self._expected)
        except OSError:
            count = 0
        if not count:
            self._ended()
        self._expected = self._expected[count:]


def _bytes_of(x: Tensor) -> memoryview:
    return x.view(-1).view(torch.uint8).numpy().data
