"""What `personae serve` shows of its start: each phase with its time, at once.

A terminal shows the running phase with a clock, and a line for each phase that has ended. A log gets a line
for each phase when it ends.
"""

import logging
import sys
import threading
from time import monotonic
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

logger = logging.getLogger(__name__)

_SHORTEST = 0.05  # seconds of a phase that is worth a line of a log


class StartUp:
    """The phases of one start, in their order: a phase ends when the next one begins. `drawn`: stderr is a
    terminal for people. Thread-safe. As a file it writes lines to stderr, above what is drawn."""

    def __init__(self, drawn: bool) -> None:
        self._stderr = sys.stderr
        self._console = Console(file=self._stderr, highlight=False)
        self._progress = Progress(
            TextColumn("  {task.description:<12}"),
            BarColumn(24),
            TimeElapsedColumn(),
            TextColumn("{task.fields[amount]}"),
            console=self._console,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._drawn = drawn
        self._phase: str | None = None
        self._begun = 0.0
        self._lock = threading.RLock()

    def begin(self, phase: str, done: int = 0, total: int = 0, *, drawn: bool = True) -> None:
        """A phase begins; or it has got as far as `done` of `total` bytes, if it runs already. A phase that
        writes to the terminal itself is not `drawn`."""
        with self._lock:
            if phase != self._phase:
                self.end()
                self._phase, self._begun = phase, monotonic()
                if self._drawn and drawn:
                    self._progress.add_task(phase, total=None, amount="")
                    self._progress.start()
            if total and self._progress.task_ids:
                amount = f"{done / 2**20:.0f} of {total / 2**20:.0f} MiB"
                self._progress.update(self._progress.task_ids[0], completed=done, total=total, amount=amount)

    def end(self) -> None:
        """The phase that runs ends, if there is one."""
        with self._lock:
            phase, self._phase = self._phase, None
            if phase is None:
                return
            self._clear()
            seconds = monotonic() - self._begun
            if self._drawn:
                self._console.print(f"  {phase:<12} {seconds:6.1f} s")
            elif seconds >= _SHORTEST:
                logger.info("start: %s took %.1f s", phase, seconds)

    def write(self, text: str) -> int:
        """Write whole lines."""
        with self._lock:
            if self._progress.live.is_started:
                self._console.print(text, end="", markup=False, emoji=False, soft_wrap=True)
            else:
                self._stderr.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush stderr."""
        self._stderr.flush()

    def _clear(self) -> None:
        if self._progress.live.is_started:
            self._progress.stop()
        for task in self._progress.task_ids:
            self._progress.remove_task(task)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: BaseException | TracebackType | None) -> None:
        with self._lock:  # the phase that failed has no time
            self._clear()
            self._phase = None
