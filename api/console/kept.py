"""An answer that is made at most once a second, however many clients ask for it."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import anyio

SECONDS = 1.0
"""How old an answer may be."""


@dataclass(slots=True)
class KeptAnswer:
    """The last answer, and when it was made, on `anyio.current_time`'s clock."""

    _body: bytes = b""
    _made: float = -math.inf

    def body(self, make: Callable[[], bytes]) -> bytes:
        """The last answer, or a new one if that is too old."""
        now = anyio.current_time()
        if not 0 <= now - self._made < SECONDS:  # less than 0: another event loop's clock
            self._body, self._made = make(), now
        return self._body

    def drop(self) -> None:
        """Have the next answer made anew, because a client changed what it says."""
        self._made = -math.inf
