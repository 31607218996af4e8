"""Regularly writes what a store keeps in memory to the data folder."""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from personae.errors import StorageFailed


class WriteFailures:
    """Counts writes to a data directory that failed, by what was to be written. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add(self, what: str) -> None:
        """Count one."""
        with self._lock:
            self._counts[what] += 1

    def counts(self) -> dict[str, int]:
        """How many so far."""
        with self._lock:
            return dict(self._counts)


@contextmanager
def flushed(
    what: str,
    flush: Callable[[], None],
    seconds: float,
    logger: logging.Logger,
    failures: WriteFailures,
) -> Iterator[None]:
    """Call `flush` on a thread every so many `seconds` while the block runs, and once when it ends.

    Whatever `flush` raises is logged and counted, and `flush` is called again at the next time.
    """
    over = threading.Event()

    def attempt() -> None:
        try:
            flush()
        except StorageFailed as error:
            failures.add(what)
            logger.warning("%s could not be written, and stays in memory: %s", what, error.message)
        except Exception as error:  # a thread that ends would never write again
            failures.add(what)
            logger.error("%s could not be written, which is tried again", what, exc_info=error)

    def write() -> None:
        while not over.wait(seconds):
            attempt()

    thread = threading.Thread(target=write, name=what, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        attempt()
