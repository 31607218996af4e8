"""Work in parallel with a step on a GPU: a stream that is forked from the step's and joined again."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class SideStream:
    """Made and used by the thread that runs the steps; within a captured graph, a branch of it.

    Memory that is used within `fork` is taken outside of it and held until `join`. So it is the steps'
    stream's, which reuses it only after the work launched within is done.
    """

    def __init__(self) -> None:
        # Of two kernels that may begin, that of the lower number does: the short one, if this is for such.
        self._stream = torch.cuda.Stream(priority=-1)  # type: ignore[no-untyped-call]  # torch has no types here

    @contextmanager
    def fork(self) -> Iterator[None]:
        """Work launched within the block waits for all earlier work of the current stream."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """Later work of the current stream waits for all work launched within `fork`."""
        torch.cuda.current_stream().wait_stream(self._stream)
