"""Whether an engine core hangs, by the times at which its messages come."""


class HangDetector:
    """`check` it every `pause` seconds. All times are in seconds, of one monotonic clock.

    Time in which this process stood still (stopped, or in a paused container) does not count. Nobody
    read the engine core's messages then, and the engine core may have stood still, too.
    """

    def __init__(self, now: float, *, hang_seconds: float, silence_seconds: float) -> None:
        self._hang_seconds, self._silence_seconds = hang_seconds, silence_seconds
        self.pause = min(hang_seconds, silence_seconds) / 4
        self._checked = self._message = self._progress = self._step = now

    def note_message(self, now: float) -> None:
        """Any message came."""
        self._message = now

    def note_progress(self, now: float) -> None:
        """The executor is idle, or has handled another message."""
        self._progress = now

    def note_step(self, now: float) -> None:
        """A step came back, or none is in flight."""
        self._step = now

    def check(self, now: float, *, in_flight: bool) -> str | None:
        """Why the engine core hangs; None if it does not. `in_flight`: a step has not come back."""
        stood_still = now - self._checked - self.pause
        self._checked = now
        if stood_still > self.pause:
            self._message, self._progress, self._step = (
                min(now, each + stood_still) for each in (self._message, self._progress, self._step)
            )
        if now - self._message > self._silence_seconds:
            return f"The engine core sent no message for {now - self._message:.1f} s"
        if now - self._progress > self._hang_seconds:
            return f"The engine core has been in the same step for {now - self._progress:.1f} s"
        if in_flight and now - self._step > self._hang_seconds:
            return f"The engine core has not returned a step for {now - self._step:.1f} s"
        return None
