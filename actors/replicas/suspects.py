"""Finds the request that makes engines crash, over all replicas, so that it takes no others with it.

When an engine core dies, one of the sequences that it was computing may be the reason. A sequence has proved
harmless there if two of its steps have brought it tokens. Such a sequence continues at another replica at
once, and so does one that was not on the device. The others are suspects. They are tried alone, one after the
other, at a replica that has no other streams. If its engine dies again, the one on trial is guilty. A
sequence takes the number of deaths that it was part of along to other replicas. So one that crashes an engine
only after a few tokens is a suspect the second time, however harmless it looked at first.

A death from outside (a signal that this server did not send) makes suspects only of sequences that were on
the device in two such deaths in a row, without being cleared between them. Only the third one on trial is
proof.
"""

from collections import deque
from collections.abc import Container, Iterable

from personae.actors.frontend.live_stream import LiveStream
from personae.actors.frontend.probation import CLEARED, GUILTY

OUTSIDE = 3  # deaths, the last of them from outside


class Suspects:
    """Decides which streams continue at once. It knows only streams and their records."""

    def __init__(self) -> None:
        self._waiting: deque[LiveStream] = deque()
        self.on_trial: str | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def over(self) -> bool:
        """Whether no stream is on trial or waits for its trial."""
        return self.on_trial is None and not self._waiting

    def judge(
        self, streams: Iterable[LiveStream], on_device: Container[str], outside: bool
    ) -> tuple[list[LiveStream], list[LiveStream]]:
        """Judge the streams of an engine that has died. Returns those that continue at once, and the guilty
        ones; the others wait for `next`."""
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
        if guilty:  # the others are not to blame
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
        """Return the stream to try now; None while another is on trial, or when none waits."""
        if self.on_trial is not None or not self._waiting:
            return None
        stream = self._waiting.popleft()
        self.on_trial = stream.log.id
        return stream

    def acquit(self, id: str) -> None:
        """Note that a sequence is cleared or has ended."""
        if id == self.on_trial:
            self.on_trial = None

    def drop(self, id: str) -> bool:
        """Remove a stream that waits for its trial and is not wanted any more. Returns whether it was
        waiting."""
        for stream in self._waiting:
            if stream.log.id == id:
                self._waiting.remove(stream)
                return True
        return False
