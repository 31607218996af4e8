"""Work in parallel with a step on a GPU: a stream that forks from the step's stream and joins it again."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class SideStream:
    """The thread that runs the steps makes and uses it. Within a captured graph it becomes a branch.

    Memory that is used within `fork` must be allocated before it and held until `join`. So the memory belongs
    to the step's stream, which reuses it only after the forked work is done.
    """

    def __init__(self) -> None:
        # If two kernels may begin, the one with the lower number begins: here the short one.
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
