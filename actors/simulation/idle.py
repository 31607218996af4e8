"""What must hold whenever every request has ended: nothing of any of them is left anywhere."""

import anyio

from personae.actors.enginecore.adapter_store import AdapterStore
from personae.actors.frontend.adapter_queue import AdapterQueue
from personae.actors.frontend.frontend import Frontend, LocalClient
from personae.actors.kit.actor import ActorCell
from personae.actors.kit.supervisor import Supervisor
from personae.actors.replicas.replica import ReplicaState
from personae.actors.replicas.replica_set import ReplicaSet
from personae.actors.replicas.scaling import ReplicaScaler
from personae.actors.simulation.run import Run, SimulatedEngine
from personae.actors.simulation.trouble import Wrong

SETTLE_SECONDS = 30.0  # work begun for a client that left, a compile or a load, may take this long


class IdleCheck:
    """Waits until a run is idle, and checks it. `lulls` counts the checks."""

    def __init__(self, run: Run, client: LocalClient, scaler: ReplicaScaler | None) -> None:
        self._run = run
        self._frontend = client._frontend
        self._scaler = scaler
        self.lulls = 0

    async def wait(self) -> None:
        """Wait until all requests have ended, then check that nothing of them is left."""
        run, lost = self._run, self._frontend.lost
        begun, epochs = run.loop.time(), run.witness.restarts()
        while run.live or not (self._all_ready() or lost.is_set()):
            run.faults.resting = run.scenario.calm_lulls and not run.live
            await anyio.sleep(0.25)
            outages = (run.witness.restarts() - epochs + 1) * run.witness.outage
            if run.loop.time() - begun > run.scenario.longest_wait + outages:
                raise Wrong(f"never ended: {sorted(run.live) or 'the outage'}")
        await anyio.sleep(SETTLE_SECONDS)
        if lost.is_set():
            return
        if not self._all_ready():  # another fault struck
            await self.wait()
            return
        for index, frontend in self._frontends().items():
            if not frontend.lost.is_set():
                _check_engine(run.engines[index], frontend)
        if isinstance(self._frontend, ReplicaSet):
            check_dispatcher(self._frontend)
            self._check_prefixes(self._frontend)
        self.lulls += 1
        run.faults.resting = False

    def _check_prefixes(self, replicas: ReplicaSet) -> None:
        """Check that replicas report their prefix caches correctly."""
        for index, replica in replicas.replicas.items():
            recorder = self._run.engines[index].recorder
            if replica.exact is None or recorder is None or replica.frontend.lost.is_set():
                continue
            if replica.exact.names != set(recorder.names):
                raise Wrong(f"engine {index} has other blocks cached than it reports")

    def _frontends(self) -> dict[int, Frontend]:
        frontend = self._frontend
        if isinstance(frontend, ReplicaSet):
            return {replica.index: replica.frontend for replica in frontend.replicas.values()}
        assert isinstance(frontend, Frontend)
        return {0: frontend}

    def _all_ready(self) -> bool:
        frontends = self._frontends().values()
        return self._draining() == 0 and all(each.ready() or each.lost.is_set() for each in frontends)

    def _draining(self) -> int:
        """How many replicas are draining or being removed."""
        if self._scaler is None:
            return 0
        return sum(replica.state is ReplicaState.DRAINING for replica in self._scaler.replicas)


def _check_engine(engine: SimulatedEngine, frontend: Frontend) -> None:
    """Check that nothing is left at one of the engines."""
    process = engine.process
    assert process is not None
    supervisors = [frontend._supervisor] + ([process.core] if process.core else [])
    actors = {path: actor for supervisor in supervisors for path, actor in _actors(supervisor)}
    check_actors(actors, engine.epochs)
    if (device := engine.device) is not None:
        held = {
            digest for store in actors.values() if isinstance(store, AdapterStore) for digest in store._idle
        }
        if device.worker.held != held:
            raise Wrong(f"all have ended, the device holds {device.worker.held}, and the store {held}")
        if engine.tier is not None and engine.tier.tickets:
            raise Wrong(f"all have ended, and {engine.tier.tickets} fetches of the tier are still held")
        if engine.peers is not None and engine.peers.tickets:
            raise Wrong(f"all have ended, and {engine.peers.tickets} fetches from engines are still held")
        if engine.scheduler is not None and engine.scheduler.holds:
            raise Wrong(f"all have ended, and {engine.scheduler.holds} holds for other engines are left")
        if device.slots:
            raise Wrong(f"all have ended, and slots are still taken: {list(device.slots)}")


def _actors(supervisor: Supervisor) -> list[tuple[str, object]]:
    return [
        (child.node.path, child.node.actor)
        for child in supervisor.children
        if isinstance(child.node, ActorCell) and child.node.actor is not None
    ]


def check_actors(actors: dict[str, object], epoch: int) -> None:
    """Check that the actors, given by path, hold nothing after every request has ended. Raises Wrong."""
    for path, actor in actors.items():
        for name, left in vars(actor).items():
            if name in _EMPTY_WHEN_IDLE and isinstance(left, dict | set) and left:
                raise Wrong(f"all have ended, and {path} still has {name} {left!r}")
        if (
            isinstance(actor, AdapterQueue)
            and actor._adapter is not None
            and actor._epoch == epoch  # a queue that was not used since does not know the new epoch
            and (actor._pinned or actor._pinning)
        ):
            raise Wrong(f"all have ended, and {path} still pins its adapter")


def check_dispatcher(replicas: ReplicaSet) -> None:
    """Check that the dispatcher holds nothing, and nothing is promised to a replica. Raises Wrong."""
    dispatcher = replicas._dispatcher
    left = {
        "sequences": dispatcher._live,
        "keys": dispatcher._keys,
        "waiting": dispatcher._waiting,
        "demand": dispatcher._waiting.demand,
        "prompts": dispatcher._waiting.prompts,
        "returning": dispatcher._returning,
        "withdrawn": dispatcher._withdrawn,
        "draining": dispatcher._draining,
        "suspects": None if dispatcher._suspects.over else dispatcher._suspects,
    }
    for replica in replicas.replicas.values():
        name = f"of engine {replica.index}"
        left |= {f"live {name}": replica.live, f"work {name}": replica.work}
        left |= {f"demand {name}": replica.demand, f"waiting {name}": replica._waiting}
        left |= {f"tenants {name}": replica._tenants, f"prompts {name}": replica._prompts}
    for name, value in left.items():
        if value:
            raise Wrong(f"all have ended, and the dispatcher still has {name}: {value!r}")


_EMPTY_WHEN_IDLE = {
    "_live", "_adapter_of", "_withdrawn", "_lanes", "_on_device", "_refused", "_known", "_compiling",
    "_grammars", "_placed", "_queue", "_tried", "_held", "_on_trial",
}  # fmt: skip
