"""What the stages of a model exchange while they compute: the hidden states of a step's tokens.

Each stage has some of the layers. Stage 0 embeds the tokens, runs the first layers and sends the hidden
states to the next stage. The last stage sends them back to stage 0, which has the output matrix. So
everything with an entry for each token of the vocabulary is in one place, and the first rank samples as
without stages.

Where several ranks share the layers of a stage, each has the whole hidden states, and sends them to the rank
with its own number in the next stage.

The hidden states go through sockets. From and to a GPU they go through the host's memory.

Several steps are in the stages at the same time, and a large step goes through them in parts. So stage 0
computes and sends while earlier ones come back: a thread takes these in. Then no stage waits for ever to
send.
"""

import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from socket import SHUT_RDWR, socket, socketpair
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
        self.attention_ranks, self.sharing, self.group = inner.attention_ranks, inner.sharing, inner.group
        self.stage, self.stages, self.sums, self.two_batches = stage, stages, None, None
        self.all_reduce, self.all_gather = inner.all_reduce, inner.all_gather
        self.gather_rows, self.reduce_scatter = inner.gather_rows, inner.reduce_scatter
        self.inner = inner
        self.sent = 0
        self._ended = ended
        self.open(neighbours)

    def open(self, neighbours: Neighbours) -> None:
        """Begin anew with other connections, in the place of earlier ones."""
        self._before, self._after = neighbours
        self._receiver = ThreadPoolExecutor(1, "stages")
        self._finalizer = weakref.finalize(self, _close, neighbours)

    def close(self) -> None:
        """Close the connections, which the neighbours notice."""
        self._finalizer()

    def send(self, x: Tensor) -> None:
        """Give the hidden states [T, H] of a step to the next stage; the last stage gives them to stage 0."""
        content = _bytes_of(x.contiguous().cpu())
        self.sent += len(content)
        try:
            self._after.sendall(content)
        except OSError:
            self._ended()

    def receive(self, x: Tensor) -> None:
        """Fill x [T, H] with what the stage before sends."""
        host = _on_host(x)
        _fill(host, self._before, self._ended)
        if host is not x:
            x.copy_(host)

    def begin_receive(self, x: Tensor) -> "Incoming":
        """Begin to fill x [T, H] with what the stage before sends, after what was asked for earlier."""
        host = _on_host(x)
        return Incoming(x, host, self._receiver.submit(_fill, host, self._before, self._ended))


class Incoming:
    """Hidden states that another stage sends into `x`. A thread takes them into `host`. It leaves the GPU
    alone, where they would come between kernels of another step."""

    def __init__(self, x: Tensor, host: Tensor, taken: Future[None]) -> None:
        self._x, self._host, self._taken = x, host, taken

    def done(self) -> bool:
        """Whether they have come."""
        return self._taken.done()

    def result(self) -> None:
        """Wait until they have come. Then x has them."""
        self._taken.result()
        if self._host is not self._x:
            self._x.copy_(self._host)
            self._host = self._x


def _bytes_of(x: Tensor) -> memoryview:
    return x.view(-1).view(torch.uint8).numpy().data


def _on_host(x: Tensor) -> Tensor:
    """x itself, or one like it on the host."""
    return x if x.device.type == "cpu" else torch.empty(x.shape, dtype=x.dtype)


def _fill(host: Tensor, before: socket, ended: Callable[[], NoReturn]) -> None:
    rest = _bytes_of(host)
    while rest:
        try:
            count = before.recv_into(rest)
        except OSError:
            count = 0
        if not count:
            ended()
        rest = rest[count:]


def _close(neighbours: Neighbours) -> None:
    for connection in neighbours:
        with suppress(OSError):  # the neighbour has gone
            connection.shutdown(SHUT_RDWR)  # a thread may wait for data
        connection.close()
