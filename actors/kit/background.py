"""Tasks that run while a block does."""

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from anyio import create_task_group, sleep
from anyio.abc import TaskGroup

log = logging.getLogger(__name__)


@asynccontextmanager
async def background_tasks() -> AsyncIterator[TaskGroup]:
    """A task group whose tasks are cancelled when the block ends.

    The block's own error is raised as it is, not in a group: exit codes depend on it.
    """
    failure: Exception | None = None
    async with create_task_group() as tasks:
        try:
            yield tasks
        except Exception as error:
            failure = error
        finally:
            tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure


async def repeat(seconds: float, work: Callable[[], None], failure: str) -> None:
    """Call `work` now and every so many seconds. Its errors are logged as `failure`: a task that ended would
    take the server with it."""
    while True:
        try:
            work()
        except Exception as error:
            log.error(failure, exc_info=error)
        await sleep(seconds)
