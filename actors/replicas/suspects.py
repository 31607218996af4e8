"""Finds the request that kills engines, over all replicas, so that it takes no others with it.

When an engine core dies, one of the sequences that it was computing may be the reason. A sequence that has
proved harmless there, two of whose steps have brought it tokens, goes on at another replica at once; so does
one that was not aboard. The others are suspects: they are tried alone, one after the other, at a replica
where nobody else is. The one on trial when its engine dies again is guilty. How often a sequence was aboard
when an engine died travels with it, so that one that needs a few tokens to kill is a suspect the second time,
however harmless it looked at first.

A death from outside (a signal that was not ours) makes a suspect only of those that were aboard in two of
them in a row, without being cleared between, and only the third one on trial is proof.
"""

from collections import deque
from collections.abc import Container, Iterable

from personae.actors.frontend.live_stream import LiveStream
from personae.actors.frontend.probation import CLEARED, GUILTY

OUTSIDE = 3  # deaths, the last of them from outside


class Suspects:
    """Decides who goes on at once. Knows streams and their records, nothing else."""

    def __init__(self) -> None:
        self._waiting: deque[LiveStream] = deque()
        self.on_trial: str | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def over(self) -> bool:
        """Nobody is tried or waits for it."""
        return self.on_trial is None and not self._waiting

    def judge(
        self, streams: Iterable[LiveStream], on_device: Container[str], outside: bool
    ) -> tuple[list[LiveStream], list[LiveStream]]:
        """An engine has died that had these streams. Returns those that go on at once, and the guilty; the
        others wait for `next`."""
        free: list[LiveStream] = []
        guilty: list[LiveStream] = []
        suspects: list[LiveStream] = []
        for stream in streams:
            record, id = stream.record, stream.log.id
            if harmless := record.brought >= CLEARED:
                record.deaths, record.suspect = 0, False
            record.brought = 0
            if id in on_device:
                record.deaths += 1
                record.suspect = record.suspect or not (outside or harmless) or record.deaths > 1
            tried = id == self.on_trial
            if tried:
                self.on_trial = None
            if tried and id in on_device and record.deaths >= (OUTSIDE if outside else GUILTY):
                guilty.append(stream)
            else:
                (suspects if record.suspect else free).append(stream)
        if guilty:  # the others were only there
            for stream in suspects:
                if stream.log.id in on_device:
                    stream.record.deaths -= 1
                    stream.record.suspect = stream.record.deaths > 0
            free += [stream for stream in suspects if not stream.record.suspect]
            suspects = [stream for stream in suspects if stream.record.suspect]
        waiting = [*self._waiting, *suspects]
        self._waiting = deque(sorted(waiting, key=lambda stream: -stream.record.deaths))
        return free, guilty

    def next(self) -> LiveStream | None:
        """Who is tried now; None while another is, or when there is nobody."""
        if self.on_trial is not None or not self._waiting:
            return None
        stream = self._waiting.popleft()
        self.on_trial = stream.log.id
        return stream

    def acquit(self, id: str) -> None:
        """This one is cleared, or has ended."""
        if id == self.on_trial:
            self.on_trial = None

    def drop(self, id: str) -> bool:
        """One that waits is not wanted any more; whether it waited."""
        for stream in self._waiting:
            if stream.log.id == id:
                self._waiting.remove(stream)
                return True
        return False
