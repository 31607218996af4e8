"""Replacements for a `Ref` that keep their messages, in order."""

from collections import deque
from typing import Any


class RecordingRef(list[Any]):
    """`tell` appends the message."""

    tell = list.append


class MessageQueue(deque[Any]):
    """The same, with messages that can be taken out."""

    tell = deque.append

    def take(self) -> list[Any]:
        """Take all messages that arrived since the last call."""
        taken = list(self)
        self.clear()
        return taken
