"""Stand-ins for a `Ref`: they keep their messages, in order."""

from collections import deque
from typing import Any


class RecordingRef(list[Any]):
    """`tell` appends."""

    tell = list.append


class MessageQueue(deque[Any]):
    """The same, to be taken from."""

    tell = deque.append

    def take(self) -> list[Any]:
        """All that has come since the last time."""
        taken = list(self)
        self.clear()
        return taken
