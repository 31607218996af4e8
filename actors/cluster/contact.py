"""What the frontend sends to a node to start an engine, and what the node reports about the process."""

import msgspec

from personae.actors.cluster.identity import Identity
from personae.actors.enginecore.step_recorder import LastStep

GREETING = b"personae 1\n"  # before the ticket
TICKET_BYTES = 32
CONTROL_FRAME = 2**20  # bytes, between an agent and the frontend
WELCOME, UNKNOWN = b"\x01", b"\x00"  # the frontend's answer to a ticket


class Contact(msgspec.Struct, frozen=True):
    """Where the frontend listens, and a ticket for each of an engine's three connections.

    `certificate` is the frontend's; None on loopback. `adapters` are the adapters known at the start: their
    names, and the keys under which the node requests their files. The engine is one of `share` engines on its
    machine and uses `threads` threads (0: no limit). The folder `cache` keeps adapters, up to `cache_bytes`.
    """

    host: str = ""
    port: int = 0
    line: bytes = b""
    control: bytes = b""
    files: bytes = b""
    certificate: str | None = None
    adapters: dict[str, str] = {}
    share: int = 1
    threads: int = 0
    cache: str | None = None
    cache_bytes: int = 20 * 2**30


class Dial(msgspec.Struct, frozen=True):
    """A contact, and who the engine is there."""

    contact: Contact
    identity: Identity | None = None


class ClusterMessage(msgspec.Struct, frozen=True, tag=True):
    """The base of what frontend and other machines say to each other, besides an engine's own messages."""


class Spawned(ClusterMessage, frozen=True):
    """From the agent, first of all: the engine core's process runs, and `box_file` is its step recorder."""

    pid: int
    box_file: int


class Output(ClusterMessage, frozen=True):
    """From the agent: the engine core has printed this."""

    data: bytes


class AskLastStep(ClusterMessage, frozen=True):
    """To the agent: answer with `StepNote`."""


class StepNote(ClusterMessage, frozen=True):
    """From the agent: the engine core's last step."""

    last: LastStep | None


class Ended(ClusterMessage, frozen=True):
    """From the agent, last of all: how the engine core's process ended, and its last step."""

    code: int
    last: LastStep | None


FromAgent = Spawned | Output | StepNote | Ended
ToAgent = AskLastStep
