"""What the frontend and the process that talks to Ray say to each other."""

import msgspec

from personae.actors.cluster.contact import ClusterMessage, Contact


class Node(msgspec.Struct, frozen=True):
    """A machine of the cluster: its address, whether it lives, what it has and what of that is free."""

    id: str
    address: str
    alive: bool
    resources: dict[str, float] = {}


class Gather(ClusterMessage, frozen=True):
    """First of all: connect to the cluster at this address, and reserve places for engines of that size;
    answered by `Gathered`. `host` is this machine's address in it, if that is known."""

    number: int
    address: str
    replicas: int
    cpus: float
    gpus: float
    host: str | None = None


class PlaceEngine(ClusterMessage, frozen=True):
    """Wait until there is a node for this engine; answered by `Placed`."""

    number: int
    engine: int


class BeginEngine(ClusterMessage, frozen=True):
    """Have the engine's node start it; answered by `Begun`. The node refuses if it has another version or
    another model."""

    number: int
    engine: int
    contact: Contact
    version: str
    model: str
    weights: str


class EndEngine(ClusterMessage, frozen=True):
    """The engine's place is not needed any more; answered by `Begun`."""

    number: int
    engine: int


class AskNodes(ClusterMessage, frozen=True):
    """Which machines are there? Answered by `Nodes`."""

    number: int


class Gathered(ClusterMessage, frozen=True):
    """The cluster is there. `host` is this machine's address in it."""

    number: int
    host: str
    nodes: tuple[Node, ...]


class Placed(ClusterMessage, frozen=True):
    """The engine's node is there: its name for people, and the certificate that it will show."""

    number: int
    node: str
    certificate: str


class Begun(ClusterMessage, frozen=True):
    """It is done."""

    number: int


class Nodes(ClusterMessage, frozen=True):
    """The machines of the cluster."""

    number: int
    nodes: tuple[Node, ...]


class NotDone(ClusterMessage, frozen=True):
    """Why it can't be done."""

    number: int
    why: str


Request = Gather | PlaceEngine | BeginEngine | EndEngine | AskNodes
Answer = Gathered | Placed | Begun | Nodes | NotDone
