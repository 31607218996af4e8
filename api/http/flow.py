"""Whether a connection takes what is written to it."""

from typing import Protocol

FLOW = "personae.flow"
"""The key of a connection's `Flow` in the extensions of an ASGI scope, if the server has put one there."""


class Flow(Protocol):
    """While `write_paused` is False, ASGI's `send` does not wait. uvicorn's FlowControl is one."""

    write_paused: bool
