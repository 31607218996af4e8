"""The process that talks to Ray, for the frontend.

    python -m personae.actors.cluster.ray_driver FD

Ray ends its process when the cluster's head is gone for a while, and its library is large. Neither must
affect the process that holds the streams. No token goes through this process. When the frontend ends, this
process ends with its Ray job, and so do the engines.
"""

import logging
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable
from threading import Lock, Thread
from typing import Any, NamedTuple, Never

import msgspec

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # before ray is imported
os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "1")  # Ray tries 20 times, 41 s each

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from personae.actors.cluster.contact import StageOrder
from personae.actors.cluster.ray_host import EngineHost
from personae.actors.cluster.ray_messages import (
    Answer,
    AskNodes,
    BeginEngine,
    Begun,
    EndEngine,
    Gather,
    Gathered,
    Node,
    Nodes,
    NotDone,
    Placed,
    PlaceEngine,
    Request,
)
from personae.actors.framing import frame, receive_first
from personae.actors.line import Line
from personae.engine.machine_sockets import new_identity
from personae.engine.parallel.far_stages import CERTIFIED, FarStages
from personae.errors import LoadError

ROOM_SECONDS = 600.0  # to find room for all engines: an autoscaler may have to add machines
LOG_SECONDS = 10.0  # between two log lines while something is waited for
BEGIN_SECONDS = 120.0  # for a node to check its model and start a process
PAUSE_SECONDS = 0.5
CONNECT_SECONDS = 10.0  # how long connecting to an address may take

log = logging.getLogger("personae.ray")


def _check_reachable(address: str) -> None:
    """Raise OSError if nothing listens at `host:port`: Ray itself would retry for minutes. Ray resolves other
    forms of an address, such as `auto`."""
    host, colon, port = address.rpartition(":")
    if colon and "/" not in host and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()


class _Bundles(NamedTuple):
    """Where an engine runs: a bundle of a placement group for each of its stages. The ranks of a stage are in
    one bundle, so they are always on one node."""

    group: PlacementGroup
    bundles: tuple[int, ...]


class Driver:
    """Serves the frontend's requests with Ray. Each request blocks a thread of its own. `host` is the actor
    that runs on engines' nodes, one for each stage of an engine.

    Engines of one stage are spread over the nodes, in one placement group for all. With several stages each
    engine has a group of its own, which spreads its stages.
    """

    host: type[EngineHost] = EngineHost

    def __init__(self) -> None:
        self._stages = 1
        self._size: dict[str, float] = {}  # of a stage
        self._reserved: list[_Bundles] = []
        self._actors: dict[int, list[Any]] = {}
        self._making = Lock()
        self._nodes_of: dict[int, list[tuple[str, str]]] = {}  # ids and names, by stage
        self._place_of: dict[int, _Bundles] = {}

    def gather(self, request: Gather) -> Answer:
        """Connect to the cluster and reserve places. Raises LoadError."""
        local = request.address == "local"
        wanted: dict[str, Any] = {}
        if local:
            cpus = max(os.cpu_count() or 1, -int(-request.replicas * request.cpus // 1))
            wanted = {"include_dashboard": False, "num_cpus": cpus}
        elif request.host is not None:
            wanted = {"_node_ip_address": request.host}  # a machine may run several nodes; this one is ours
        try:
            _check_reachable(request.address)
            ray.init(
                request.address,
                namespace=f"personae-{secrets.token_hex(8)}",
                log_to_driver=False,
                configure_logging=False,
                **wanted,
            )
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            raise LoadError(f"--ray {request.address}: {_sentence(error)}") from None
        self._stages = stages = request.stages
        self._size = {"CPU": request.cpus / stages, "GPU": request.gpus / stages}
        self._size = {name: amount for name, amount in self._size.items() if amount}
        if stages > 1:
            self._reserved = [self._new_place() for _ in range(request.replicas)]
        elif request.replicas:
            group = placement_group([self._size] * request.replicas, strategy="SPREAD")
            self._reserved = [_Bundles(group, (bundle,)) for bundle in range(request.replicas)]
        self._wait_for_room(request)
        host = "127.0.0.1" if local else request.host or ray.util.get_node_ip_address()
        return Gathered(request.number, host, _nodes())

    def _new_place(self) -> _Bundles:
        group = placement_group([self._size] * self._stages, strategy="SPREAD")
        return _Bundles(group, tuple(range(self._stages)))

    def _wait_for_room(self, request: Gather) -> None:
        until = time.monotonic() + ROOM_SECONDS
        for place in self._reserved:
            while not place.group.wait(LOG_SECONDS):
                parts = f" in {self._stages} stages" if self._stages > 1 else ""
                missing = (
                    f"the cluster has no room for {request.replicas} engines{parts} of "
                    f"{_amounts(self._size)} each. Its nodes: {_summary()}."
                )
                if time.monotonic() > until:
                    raise LoadError(f"--ray {request.address}: {missing}")
                log.warning("waiting for room: %s", missing)

    def place(self, request: PlaceEngine) -> Answer:
        """Wait for the engine's actors, on whichever nodes they live now."""
        logged_at = time.monotonic()
        described = _described(self._actors_of(request.engine))
        while True:
            try:
                found = ray.get(described, timeout=PAUSE_SECONDS)
            except GetTimeoutError:  # a call is still pending
                if (moved := self._moved(request.engine)) is not None:
                    described = _described(moved)
            except ActorUnavailableError:
                time.sleep(PAUSE_SECONDS)
                described = _described(self._actors_of(request.engine))
            except RayActorError as error:
                self._leave(request.engine)
                raise LoadError(f"Ray can't start engine {request.engine}: {_sentence(error)}") from None
            else:
                self._nodes_of[request.engine] = [(id, name) for id, name, _ in found]
                names = dict.fromkeys(name for _, name, _ in found)
                return Placed(request.number, ", ".join(names), found[0][2])
            if time.monotonic() - logged_at > LOG_SECONDS:
                logged_at = time.monotonic()
                log.warning("engine %d waits for a node; the nodes: %s", request.engine, _summary())

    def _actors_of(self, engine: int) -> list[Any]:
        with self._making:
            if engine not in self._actors:
                self._actors[engine] = self._make(engine)
            return self._actors[engine]

    def _moved(self, engine: int) -> list[Any] | None:
        """The new actors of an engine that waits for room elsewhere, in a place that an engine has left
        since; None if there is none."""
        with self._making:
            if (
                engine not in self._actors
                or self._place_of.get(engine) in self._reserved
                or not self._free_places()
            ):
                return None
        self._leave(engine)
        return self._actors_of(engine)

    def _free_places(self) -> list[_Bundles]:
        return [place for place in self._reserved if place not in self._place_of.values()]

    def _make(self, engine: int) -> list[Any]:
        place = self._place_of.get(engine)
        if place is None:
            if free := self._free_places():
                place = free[0]
            elif self._stages > 1:
                place = self._new_place()
            if place is not None:
                self._place_of[engine] = place
        strategies: list[Any] = ["SPREAD"]  # an engine of one stage beyond the places
        if place is not None:
            strategies = [PlacementGroupSchedulingStrategy(place.group, bundle) for bundle in place.bundles]
        return [
            ray.remote(self.host)
            .options(
                num_cpus=self._size.get("CPU", 0),
                num_gpus=self._size.get("GPU", 0),
                max_restarts=-1,
                max_concurrency=4,
                scheduling_strategy=strategy,
            )
            .remote()
            for strategy in strategies
        ]

    def _leave(self, engine: int) -> None:
        """Give the engine's place back."""
        with self._making:
            actors = self._actors.pop(engine, [])
            self._nodes_of.pop(engine, None)
            place = self._place_of.pop(engine, None)
        for actor in actors:
            ray.kill(actor, no_restart=True)
        if place is not None and place not in self._reserved:
            remove_placement_group(place.group)

    def begin(self, request: BeginEngine) -> Answer:
        """Pass the request on to the engine's nodes: those of the other stages first, which the engine
        calls. Raises LoadError if one refuses."""
        (id, name), *further = self._nodes_of[request.engine]
        actor, *others = self._actors_of(request.engine)
        threads = max(int(self._size.get("CPU", 1)) // request.contact.ranks, 1)
        checked = request.version, request.model, request.weights
        far = None
        if others:
            identity = new_identity(CERTIFIED)
            order = msgspec.msgpack.encode(StageOrder(request.contact.ranks, threads, identity))
            begun = [other.begin_stage.remote(order, *checked) for other in others]
            far = FarStages(
                tuple(
                    tuple(_answered(answer, there)) for answer, (_, there) in zip(begun, further, strict=True)
                ),
                identity,
            )
        contact = msgspec.structs.replace(
            request.contact, share=self._share(id), threads=threads, far_stages=far
        )
        _answered(actor.begin.remote(msgspec.msgpack.encode(contact), *checked), name)
        log.info("engine %d starts on node %s", request.engine, ", ".join([name, *(n for _, n in further)]))
        return Begun(request.number)

    def _share(self, node: str) -> int:
        """How many engines, or stages of engines, are to run on a node."""
        groups = {place.group.id: place.group for place in self._reserved}.values()
        found = [id for group in groups for id in placement_group_table(group)["bundles_to_node_id"].values()]
        for engine, nodes in self._nodes_of.items():
            if self._place_of.get(engine) not in self._reserved:
                found += [id for id, _ in nodes]
        return max(found.count(node), 1)

    def end(self, request: EndEngine) -> Answer:
        """Give the engine's place back."""
        self._leave(request.engine)
        return Begun(request.number)

    def nodes(self, request: AskNodes) -> Answer:
        """Return the nodes as Ray knows them."""
        return Nodes(request.number, _nodes())


def _answered(answer: Any, node: str) -> Any:
    """What a node answers. Raises LoadError with its name if it answers with a reason, or not."""
    try:
        found = ray.get(answer, timeout=BEGIN_SECONDS)
    except (RayError, TimeoutError) as error:
        found = _sentence(error)
    if isinstance(found, str):
        raise LoadError(f"Node {node}: {found}")
    return found


def _described(actors: list[Any]) -> list[Any]:
    return [actor.describe.remote() for actor in actors]


def _nodes() -> tuple[Node, ...]:
    return tuple(
        Node(found["NodeID"], found["NodeManagerAddress"], found["Alive"], found.get("Resources", {}))
        for found in ray.nodes()
    )


def _summary() -> str:
    alive = [node for node in _nodes() if node.alive]
    return "; ".join(f"{node.address} with {_amounts(node.resources)}" for node in alive) or "none"


def _amounts(resources: dict[str, float]) -> str:
    return " and ".join(f"{resources.get(name, 0):g} {name}s" for name in ("CPU", "GPU"))


def _sentence(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines)[:1000] or type(error).__name__


def main() -> Never:
    """Run the process."""
    line = Line(socket.socket(fileno=int(sys.argv[-1])))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # these are for the frontend, which ends this process
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s")
    logging.getLogger("ray").setLevel(logging.WARNING)
    driver = Driver()
    handlers: dict[type, Callable[[Any], Answer]] = {
        Gather: driver.gather,
        PlaceEngine: driver.place,
        BeginEngine: driver.begin,
        EndEngine: driver.end,
        AskNodes: driver.nodes,
    }

    def answer(request: Any) -> None:
        try:
            result = handlers[type(request)](request)
        except LoadError as error:
            result = NotDone(request.number, error.message)
        except Exception as error:  # Ray has many errors of its own: the frontend decides
            log.exception("a request to Ray failed")
            result = NotDone(request.number, _sentence(error))
        line.sendall(frame(result))

    try:
        while True:
            request = receive_first(line, Request)
            if isinstance(request, Gather):
                answer(request)  # on this thread: Ray's library must be started on the main thread
            else:
                Thread(target=answer, args=(request,), daemon=True).start()
    except (EOFError, OSError):
        pass  # the frontend has gone
    ray.shutdown()
    os._exit(0)


if __name__ == "__main__":
    main()
