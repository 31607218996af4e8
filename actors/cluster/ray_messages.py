"""The messages between the frontend and the process that talks to Ray."""

import msgspec

from personae.actors.cluster.contact import ClusterMessage, Contact


class Node(msgspec.Struct, frozen=True):
    """A machine of the cluster: its address, whether it is alive, and its resources."""

    id: str
    address: str
    alive: bool
    resources: dict[str, float] = {}


class Gather(ClusterMessage, frozen=True):
    """The first request: connect to the cluster at this address, and reserve places for engines of this size.
    Answered by `Gathered`. The `stages` of an engine have equal parts of its CPUs and GPUs, each on one node.
    `host` is this machine's address in the cluster, if it is known."""

    number: int
    address: str
    replicas: int
    cpus: float
    gpus: float
    host: str | None = None
    stages: int = 1


class PlaceEngine(ClusterMessage, frozen=True):
    """Wait until there is a node for this engine, or for each of its stages. Answered by `Placed`."""

    number: int
    engine: int


class BeginEngine(ClusterMessage, frozen=True):
    """Have the engine's nodes start it. Answered by `Begun`. A node refuses if it has another version or
    another model."""

    number: int
    engine: int
    contact: Contact
    version: str
    model: str
    weights: str


class EndEngine(ClusterMessage, frozen=True):
    """The engine's place is not needed any more. Answered by `Begun`."""

    number: int
    engine: int


class AskNodes(ClusterMessage, frozen=True):
    """List the machines. Answered by `Nodes`."""

    number: int


class Gathered(ClusterMessage, frozen=True):
    """The cluster is ready. `host` is this machine's address in it."""

    number: int
    host: str
    nodes: tuple[Node, ...]


class Placed(ClusterMessage, frozen=True):
    """The engine's nodes are ready: their names for people, and the certificate that the engine will show."""

    number: int
    node: str
    certificate: str


class Begun(ClusterMessage, frozen=True):
    """The request is done."""

    number: int


class Nodes(ClusterMessage, frozen=True):
    """The machines of the cluster."""

    number: int
    nodes: tuple[Node, ...]


class NotDone(ClusterMessage, frozen=True):
    """Why the request can't be done."""

    number: int
    why: str


Request = Gather | PlaceEngine | BeginEngine | EndEngine | AskNodes
Answer = Gathered | Placed | Begun | Nodes | NotDone
