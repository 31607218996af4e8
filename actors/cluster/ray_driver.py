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
from collections import Counter
from collections.abc import Callable
from threading import Lock, Thread
from typing import Any, Never

import msgspec

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # before ray is imported
os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "1")  # Ray tries 20 times, 41 s each

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

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


class Driver:
    """Serves the frontend's requests with Ray. Each request blocks a thread of its own. `host` is the actor
    that runs on engines' nodes."""

    host: type[EngineHost] = EngineHost

    def __init__(self) -> None:
        self._group: PlacementGroup | None = None
        self._size: dict[str, float] = {}
        self._actors: dict[int, Any] = {}
        self._making = Lock()
        self._node_of: dict[int, tuple[str, str]] = {}  # node id and name
        self._bundle_of: dict[int, int] = {}  # an engine's bundle in the placement group

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
        self._size = {"CPU": request.cpus, "GPU": request.gpus}
        self._size = {name: amount for name, amount in self._size.items() if amount}
        if request.replicas:
            self._group = placement_group([self._size] * request.replicas, strategy="SPREAD")
            self._wait_for_room(request)
        host = "127.0.0.1" if local else request.host or ray.util.get_node_ip_address()
        return Gathered(request.number, host, _nodes())

    def _wait_for_room(self, request: Gather) -> None:
        assert self._group is not None
        until = time.monotonic() + ROOM_SECONDS
        while not self._group.wait(LOG_SECONDS):
            missing = (
                f"the cluster has no room for {request.replicas} engines of {_amounts(self._size)} each. "
                f"Its nodes: {_summary()}."
            )
            if time.monotonic() > until:
                raise LoadError(f"--ray {request.address}: {missing}")
            log.warning("waiting for room: %s", missing)

    def place(self, request: PlaceEngine) -> Answer:
        """Wait for the engine's actor, on whichever node it lives now."""
        logged_at = time.monotonic()
        actor = self._actor(request.engine)
        described = actor.describe.remote()
        while True:
            try:
                id, name, certificate = ray.get(described, timeout=PAUSE_SECONDS)
            except GetTimeoutError:  # the call is still pending
                if (moved := self._moved_to_bundle(request.engine)) is not None:
                    actor = moved
                    described = actor.describe.remote()
            except ActorUnavailableError:
                time.sleep(PAUSE_SECONDS)
                described = actor.describe.remote()
            except RayActorError as error:
                with self._making:
                    self._actors.pop(request.engine, None)
                raise LoadError(f"Ray can't start engine {request.engine}: {_sentence(error)}") from None
            else:
                self._node_of[request.engine] = (id, name)
                return Placed(request.number, name, certificate)
            if time.monotonic() - logged_at > LOG_SECONDS:
                logged_at = time.monotonic()
                log.warning("engine %d waits for a node; the nodes: %s", request.engine, _summary())

    def _actor(self, engine: int) -> Any:
        with self._making:
            if engine not in self._actors:
                self._actors[engine] = self._make(engine)
            return self._actors[engine]

    def _moved_to_bundle(self, engine: int) -> Any | None:
        """The new actor of an engine that waits for room elsewhere, in a bundle that an engine has left
        since; None if there is none."""
        with self._making:
            if engine not in self._actors or engine in self._bundle_of or not self._free_bundles():
                return None
            ray.kill(self._actors[engine], no_restart=True)
            self._actors[engine] = self._make(engine)
            return self._actors[engine]

    def _free_bundles(self) -> list[int]:
        if self._group is None:
            return []
        taken = self._bundle_of.values()
        return [bundle for bundle in range(self._group.bundle_count) if bundle not in taken]

    def _make(self, engine: int) -> Any:
        strategy: Any = "SPREAD"  # for engines beyond the placement group's bundles
        if engine not in self._bundle_of and (free := self._free_bundles()):
            self._bundle_of[engine] = free[0]
        if engine in self._bundle_of:
            strategy = PlacementGroupSchedulingStrategy(self._group, self._bundle_of[engine])
        return (
            ray.remote(self.host)
            .options(
                num_cpus=self._size.get("CPU", 0),
                num_gpus=self._size.get("GPU", 0),
                max_restarts=-1,
                max_concurrency=4,
                scheduling_strategy=strategy,
            )
            .remote()
        )

    def begin(self, request: BeginEngine) -> Answer:
        """Pass the request on to the engine's node."""
        id, name = self._node_of[request.engine]
        threads = max(int(self._size.get("CPU", 1)) // request.contact.ranks, 1)
        contact = msgspec.structs.replace(request.contact, share=self._share(id), threads=threads)
        actor = self._actor(request.engine)
        packed = msgspec.msgpack.encode(contact)
        try:
            why = ray.get(
                actor.begin.remote(packed, request.version, request.model, request.weights),
                timeout=BEGIN_SECONDS,
            )
        except (RayError, TimeoutError) as error:
            why = _sentence(error)
        if why is not None:
            return NotDone(request.number, f"Node {name}: {why}")
        log.info("engine %d starts on node %s", request.engine, name)
        return Begun(request.number)

    def _share(self, node: str) -> int:
        """How many engines are to run on a node."""
        bundles: dict[int, str] = {}
        if self._group is not None:
            bundles = placement_group_table(self._group)["bundles_to_node_id"]
        later = Counter(id for engine, (id, _) in self._node_of.items() if engine not in self._bundle_of)
        return max(sum(id == node for id in bundles.values()) + later[node], 1)

    def end(self, request: EndEngine) -> Answer:
        """Give the engine's place back."""
        with self._making:
            actor = self._actors.pop(request.engine, None)
            self._node_of.pop(request.engine, None)
            self._bundle_of.pop(request.engine, None)
        if actor is not None:
            ray.kill(actor, no_restart=True)
        return Begun(request.number)

    def nodes(self, request: AskNodes) -> Answer:
        """Return the nodes as Ray knows them."""
        return Nodes(request.number, _nodes())


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
