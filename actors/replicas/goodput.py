"""Which share of the answers with latency targets meets them."""

from collections import deque

from personae.actors.frontend.live_stream import LiveStream

WINDOW = 30.0  # seconds
ENOUGH = 10  # answers: fewer say little


class Goodput:
    """The answers with targets that ended in the last `WINDOW` seconds."""

    def __init__(self) -> None:
        self._ended: deque[tuple[float, bool]] = deque()

    def note(self, stream: LiveStream, now: float) -> None:
        """An answer has ended."""
        targets = stream.log.targets
        if targets is None or (targets.first is None and targets.token is None) or not stream.emitted:
            return
        each = (now - stream.opened - stream.first) / max(len(stream.emitted) - 1, 1)
        self._ended.append((now, targets.met(stream.first, each)))

    def missed(self, now: float) -> float:
        """The share that missed a target; 0 if there are too few."""
        while self._ended and self._ended[0][0] < now - WINDOW:
            self._ended.popleft()
        if len(self._ended) < ENOUGH:
            return 0.0
        return sum(not met for _, met in self._ended) / len(self._ended)
