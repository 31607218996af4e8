"""The last hour, for the console's page Live when it is opened: a sample a minute, kept in memory."""

import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import anyio

from personae.actors.kit.background import background_tasks

logger = logging.getLogger(__name__)

SECONDS = 60.0
KEPT = 61
"""Samples: those of an hour, and the one before, from which the first minute is counted."""

_sleep = anyio.sleep


class LiveHistory:
    """The last samples, each as JSON. Belongs to one event loop."""

    def __init__(self) -> None:
        self._samples: deque[bytes] = deque(maxlen=KEPT)

    def add(self, sample: bytes) -> None:
        """Keep a sample: an object, without its last brace. The time is added."""
        self._samples.append(sample + b',"at":%.3f}' % time.time())

    def body(self) -> bytes:
        """All samples as one list, the oldest first."""
        return b'{"object":"list","data":[' + b",".join(self._samples) + b"]}"

    @asynccontextmanager
    async def running(self, sample: Callable[[], bytes]) -> AsyncIterator[None]:
        """Keep a sample now and every minute while the block runs."""
        async with background_tasks() as tasks:
            tasks.start_soon(self._regularly, sample)
            yield

    async def _regularly(self, sample: Callable[[], bytes]) -> None:
        while True:
            try:
                self.add(sample())
            except Exception as error:  # without a sample the server serves on
                logger.error("a sample for the page Live could not be taken", exc_info=error)
            await _sleep(SECONDS)
