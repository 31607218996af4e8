"""Regularly writes what a store keeps in memory to the data folder."""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from personae.errors import StorageFailed


@contextmanager
def flushed(what: str, flush: Callable[[], None], seconds: float, logger: logging.Logger) -> Iterator[None]:
    """Call `flush` on a thread every so many `seconds` while the block runs, and once when it ends.

    A StorageFailed of `flush` is logged, and `what` stays in memory until the next time.
    """
    over = threading.Event()

    def attempt() -> None:
        try:
            flush()
        except StorageFailed as error:
            logger.warning("%s could not be written, and stays in memory: %s", what, error.message)

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
