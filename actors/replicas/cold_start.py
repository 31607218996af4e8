"""How long it takes until an engine serves, if none does now."""

from anyio import current_time


class ColdStart:
    """`seconds`: how long the last start of an engine took, from its process until it could serve; 0
    before one has."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._begun: float | None = None

    def begin(self) -> None:
        """An engine starts now."""
        if self._begun is None:
            self._begun = current_time()

    def end(self, *, serves: bool) -> None:
        """It has loaded, or could not."""
        if self._begun is not None and serves:
            self.seconds = current_time() - self._begun
        self._begun = None

    @property
    def begun(self) -> bool:
        """Whether an engine starts."""
        return self._begun is not None

    @property
    def left(self) -> float:
        """Seconds until an engine serves that is asked for now, or that starts already."""
        if self._begun is None:
            return self.seconds
        return max(self.seconds - (current_time() - self._begun), 0.0)
