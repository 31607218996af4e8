"""Counts the requests that use MCP servers, for each tenant."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from personae.errors import RateLimited

MOST_REQUESTS = 32
"""Requests of a tenant that use MCP servers at the same time."""


class McpUse:
    """Belongs to one event loop."""

    def __init__(self) -> None:
        self._requests: Counter[str] = Counter()

    @contextmanager
    def request(self, tenant: str) -> Iterator[None]:
        """Count one request while the block runs. Raises RateLimited."""
        if self._requests[tenant] >= MOST_REQUESTS:
            raise RateLimited(
                f"{MOST_REQUESTS} requests of this tenant use MCP servers, which is the limit.", param="tools"
            )
        self._requests[tenant] += 1
        try:
            yield
        finally:
            self._requests[tenant] -= 1
            if not self._requests[tenant]:
                del self._requests[tenant]
