"""Two halves of a step, of which one computes while the other waits for other ranks (two-batch overlap)."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Semaphore
from typing import TypeVar

from personae.engine.parallel.thread_state import thread_state

T = TypeVar("T")


class TwoBatches:
    """Two pieces of work in two threads, one of which runs at a time. Each lets the other run where it
    would wait (`switch`). The first begins, and then they take turns. On a GPU both launch on one stream.

    `now`: the number of the one that runs, 0 or 1; 0 if there is none.
    """

    def __init__(self) -> None:
        self.now = 0
        self._second = ThreadPoolExecutor(1, "second half")
        self._turns = Semaphore(0), Semaphore(0)
        self._both = False  # neither has ended
        self._error: BaseException | None = None

    def run(self, first: Callable[[], T], second: Callable[[], T]) -> tuple[T, T]:
        """The results of both. If one raises an error, the other ends at its next switch, and the error is
        raised here."""
        self._turns = Semaphore(0), Semaphore(0)
        self._both, self._error = True, None
        as_here, found = thread_state(), list[T]()

        def other() -> None:
            self._turns[1].acquire()
            with as_here():
                self._until_end(second, theirs)

        theirs = list[T]()
        ended = self._second.submit(other)
        self._until_end(first, found)
        ended.result()
        self.now = 0
        if self._error is not None:
            raise self._error
        return found[0], theirs[0]

    def switch(self) -> None:
        """Let the other one run until its next switch. Nothing happens if there is no other one."""
        if not self._both:
            return
        own = self.now
        self._pass_on()
        self._turns[own].acquire()
        if self._error is not None:
            raise _OtherFailed

    def _until_end(self, work: Callable[[], T], found: list[T]) -> None:
        try:
            if self._error is None:
                found.append(work())
        except _OtherFailed:
            pass
        except BaseException as error:  # run() raises it
            self._error = error
        self._both = False
        self._pass_on()

    def _pass_on(self) -> None:
        self.now = 1 - self.now
        self._turns[self.now].release()


class _OtherFailed(Exception):  # what ends the one that has not failed
    """The other one has raised an error."""
