"""What the frontend sends to a node to start an engine, and what the node reports about the process."""

import msgspec

from personae.actors.enginecore.step_recorder import LastStep
from personae.engine.machine_sockets import TlsIdentity
from personae.engine.parallel.far_stages import FarStages

GREETING = b"personae 1\n"  # sent before the ticket
TICKET_BYTES = 32
CONTROL_FRAME = 2**20  # bytes, between an agent and the frontend
WELCOME, UNKNOWN = b"\x01", b"\x00"  # the frontend's answer to a ticket


class Contact(msgspec.Struct, frozen=True):
    """Where the frontend listens, and a ticket for each of an engine's three connections.

    `certificate` is the frontend's; None on loopback. `adapters` are the adapters known at the start: their
    names, and the keys under which the node requests their files. The engine is one of `share` engines on its
    machine and uses `threads` threads for each of its `ranks` there (0: no limit). `far_stages`: its stages
    on other nodes. The folder `cache` keeps adapters, up to `cache_bytes`.
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
    ranks: int = 1
    far_stages: FarStages | None = None
    cache: str | None = None
    cache_bytes: int = 20 * 2**30


class StageOrder(msgspec.Struct, frozen=True):
    """Start the `ranks` of a stage, with so many `threads` each, which show this identity."""

    ranks: int
    threads: int
    identity: TlsIdentity


class Dial(msgspec.Struct, frozen=True):
    """A contact, and the engine's identity on that connection."""

    contact: Contact
    identity: TlsIdentity | None = None


class ClusterMessage(msgspec.Struct, frozen=True, tag=True):
    """The base of all messages between the frontend and other machines except an engine's own."""


class Spawned(ClusterMessage, frozen=True):
    """From the agent, before anything else: the engine core runs as process `pid`, and `recorder_file` is the
    descriptor of its step recorder."""

    pid: int
    recorder_file: int


class Output(ClusterMessage, frozen=True):
    """From the agent: output of the engine core."""

    data: bytes


class AskLastStep(ClusterMessage, frozen=True):
    """To the agent: answer with `StepNote`."""


class StepNote(ClusterMessage, frozen=True):
    """From the agent: the engine core's last step."""

    last: LastStep | None


class Ended(ClusterMessage, frozen=True):
    """From the agent, as its last message: how the engine core's process ended, and its last step."""

    code: int
    last: LastStep | None


FromAgent = Spawned | Output | StepNote | Ended
ToAgent = AskLastStep
