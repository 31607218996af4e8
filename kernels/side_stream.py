"""Work beside the steps' own, on a GPU: a stream that is forked from theirs and joined again."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class SideStream:
    """Made and used by the thread that runs the steps; within a captured graph, a branch of it.

    Memory that is used within `fork` is taken outside of it and held until `join`. So it is the steps'
    stream's, which gives it to nobody before what was launched within is done.
    """

    def __init__(self) -> None:
        # Of two kernels that may begin, that of the lower number does: the short one, if this is for such.
        self._stream = torch.cuda.Stream(priority=-1)  # type: ignore[no-untyped-call]  # torch has no types here

    @contextmanager
    def fork(self) -> Iterator[None]:
        """What is launched within the block waits for all that the current stream was told before."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """What the current stream is told from now on waits for all that was launched within `fork`."""
        torch.cuda.current_stream().wait_stream(self._stream)
