"""One simulated run: a company, its clients, its faults, and what was seen.

    report = simulate(Scenario(seed=7, workload=Workload(requests=1000), faults_every=5.0))

Everything follows from the scenario: the same one gives the same report, `trace` included, which is a
checksum over all that clients saw and when. A violation is raised as `InvariantViolated`, whose message says
how to replay it.
"""

import gc
import logging
import random
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress
from functools import partial
from pathlib import Path
from zlib import crc32

import anyio
import tokenizers
from anyio.abc import TaskGroup

from personae.actors.enginecore import core
from personae.actors.enginecore.adapter_store import AdapterStore
from personae.actors.enginecore.step_recorder import StepRecorder
from personae.actors.frontend.frontend import Frontend, LocalClient, LocalStream
from personae.actors.frontend.probation import GUILTY
from personae.actors.kit.actor import ActorCell, unwrap
from personae.actors.kit.child import Incident
from personae.actors.kit.supervisor import Supervisor
from personae.actors.multi_process import MultiProcessEngine, launch_processes
from personae.actors.options import EngineOptions
from personae.actors.process import CoreProcess, Launch
from personae.actors.replicas.launch import launch_replicas
from personae.actors.replicas.placement.base import Placement
from personae.actors.replicas.placement.d2lpm import DoubleDeficit
from personae.actors.replicas.placement.estimated import EstimatedSeconds
from personae.actors.replicas.placement.least_loaded import LeastLoaded
from personae.actors.replicas.placement.prefix import LongestPrefix
from personae.actors.replicas.placement.random import RandomPlacement
from personae.actors.replicas.replica import ReplicaState
from personae.actors.replicas.replica_set import ReplicaSet
from personae.actors.replicas.scaling import ReplicaScaler
from personae.actors.simulation.adapters import SimulatedAdapters
from personae.actors.simulation.faults import Faults
from personae.actors.simulation.grammars import SimulatedGrammars
from personae.actors.simulation.loop import SimulationLoop
from personae.actors.simulation.machine import EOS, VOCABULARY, SimulatedDevice, Truth
from personae.actors.simulation.process import SimulatedProcess
from personae.actors.simulation.scenario import PlacementName, Scenario, SimulationReport
from personae.actors.simulation.trouble import Wrong
from personae.actors.simulation.witness import ObservedSequence, WatchedScheduler, Witness, idle, nothing_left
from personae.actors.simulation.workload import (
    BAD,
    BROKEN,
    PANICS,
    POISON,
    THINKS,
    SimulatedRequest,
    requests,
)
from personae.actors.spec import EngineSpec
from personae.actors.wire import Facts
from personae.engine.generation_config import GenerationDefaults
from personae.engine.numerics import NumericsClass
from personae.engine.plan import MemoryLayout
from personae.engine.scheduling.kv_events import KVEventRecorder
from personae.engine.sequence import SequenceLog
from personae.engine.tokens import Tokenizer
from personae.errors import (
    GRAMMAR_TOO_SLOW,
    ActorStopped,
    Conflict,
    EngineCoreDied,
    EngineCoreHangs,
    EngineLost,
    GrammarError,
    LoadError,
    Overloaded,
    PersonaeError,
    Quarantined,
    RequestFailed,
    RestartsExhausted,
)
from personae.lora.bounds import AdapterBounds
from personae.lora.shapes import LoraShapes

HANG_SECONDS = 4.0
HANGS = {"hang", "stop", "lost", "silent", "partition"}  # faults by which an engine is given up
COLLECTED = (200_000, 20, 1000)  # little is garbage, and looking for it would take 40 % of the time
SETTLE_SECONDS = 30.0  # what was begun for one who left, a compile or a placement, may take its time


class InvariantViolated(AssertionError):
    """Something that must always hold did not; how to see it again is in the message."""


class SimulatedSource:
    """Places for twice as many replicas as there are at first, or 16 more."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self._places: set[int] = set()

    @property
    def most(self) -> int:
        """How many places there are."""
        first = self._world.scenario.replicas
        return min(2 * first, first + 16)

    def acquire(self, replica: int) -> Launch:
        """Each replica is another engine."""
        if len(self._places) >= self.most:
            raise Conflict("no place is free")
        self._places.add(replica)
        engine = SimulatedEngine()
        self._world.engines.append(engine)
        assert self._world.engines[replica] is engine
        return partial(self._world._launch, engine)

    def release(self, replica: int) -> None:
        """Its process has ended."""
        process = self._world.engines[replica].process
        if process is not None and process.returncode is None:
            raise Wrong(f"replica {replica} is removed, and its process lives")
        self._places.remove(replica)


class SimulatedEngine:
    """One of the engines: its process now, its device, and how many there were."""

    def __init__(self) -> None:
        self.process: SimulatedProcess | None = None
        self.device: SimulatedDevice | None = None
        self.recorder: KVEventRecorder | None = None
        self.epochs = 0
        self.busy = 0.0  # seconds, of devices that are gone


PLACEMENTS: dict[PlacementName, Callable[[], Placement]] = {
    "random": RandomPlacement,
    "least-loaded": LeastLoaded,
    "prefix": LongestPrefix,
    "d2lpm": DoubleDeficit,
    "estimated": EstimatedSeconds,
}


class World:
    """One run in the making."""

    def __init__(self, scenario: Scenario, loop: SimulationLoop) -> None:
        self.scenario = scenario
        self.loop = loop
        self.engines = [SimulatedEngine()] if scenario.replicas == 1 else []  # every one that was ever there
        self.lulls = 0
        self.faults = Faults(
            loop,
            scenario.seed,
            scenario.faults_every,
            scenario.kinds,
            lambda: [engine.process for engine in self.engines],
            self._scale,
        )
        self.witness = Witness(
            loop.time,
            lambda: sum(engine.epochs for engine in self.engines),
            scenario.longest_wait,
            outage=2 * HANG_SECONDS + 2 * scenario.costs.start + 5,
            every=scenario.every,
            goal=scenario.goal,
        )
        self.layout = MemoryLayout(
            scenario.pages,
            scenario.page_size,
            scenario.slots,
            (scenario.pages - scenario.lendable) * scenario.page_size,
            scenario.batch,
            scenario.lendable,
        )
        self._dice = random.Random(scenario.seed)
        self._living: set[str] = set()
        self._deaths: dict[str, int] = {}  # of the engine core, by the sequences that were aboard
        self._client: LocalClient
        self._scaler: ReplicaScaler | None = None
        self._tasks: TaskGroup
        self._wrong: BaseException | None = None

    async def run(self) -> SimulationReport:
        """From the first request to the last."""
        options = EngineOptions(Path("simulation"), record_kv_events=self.scenario.kv_events)
        tokenizer = Tokenizer(tokenizers.Tokenizer(tokenizers.models.BPE()), eos_ids=EOS)
        try:
            async with anyio.create_task_group() as self._tasks:
                async with self._open(options, tokenizer) as engine_processes:
                    self._client = engine_processes.client
                    self._scaler = engine_processes.scaler
                    self._tasks.start_soon(self.faults.run)
                    sent = await self._open_the_doors()
                self._tasks.cancel_scope.cancel()
        except BaseExceptionGroup:
            if self._wrong is None:
                raise
        if self._wrong is not None:
            raise self._wrong
        witness = self.witness
        engines = self.engines
        stats = self._client.stats()
        return SimulationReport(
            self.scenario,
            self.loop.time(),
            sent,
            witness.tokens,
            witness.steps,
            self.loop.steps,
            sum(engine.epochs - 1 for engine in engines),
            witness.outcomes,
            self.faults.struck,
            self.lulls,
            sum(engine.busy + (engine.device.busy if engine.device else 0.0) for engine in engines),
            witness.waits,
            witness.paces,
            witness.trace,
            stats.counters.prefix_queries,
            stats.counters.prefix_hits,
            int(sum(count for source, count in stats.adapters.loads.items() if source != "device")),
            stats.moved,
            stats.changed,
            witness.moves,
            witness.targeted,
            witness.good,
        )

    def _open(
        self, options: EngineOptions, tokenizer: Tokenizer
    ) -> AbstractAsyncContextManager[MultiProcessEngine]:
        scenario = self.scenario
        if scenario.replicas == 1:
            return launch_processes(
                partial(self._launch, self.engines[0]),
                options,
                tokenizer,
                report=self._incident,
                max_restarts=scenario.max_restarts,
                hang_seconds=HANG_SECONDS,
                max_live=scenario.max_live,
                window=scenario.window,
            )
        return launch_replicas(
            SimulatedSource(self),
            scenario.replicas,
            options,
            tokenizer,
            report=self._incident,
            max_restarts=scenario.max_restarts,
            hang_seconds=HANG_SECONDS,
            max_live=scenario.max_live,
            window=scenario.window,
            placement=PLACEMENTS[scenario.placement](),
            on_kv_events=lambda engine, events: None,
        )

    # Clients

    async def _open_the_doors(self) -> int:
        sent = 0
        late = self.loop.time()  # what the start, and lulls, have cost
        for request in requests(self.scenario.workload, self.scenario.seed):
            delay = request.at + late - self.loop.time()
            if delay > 0:
                await anyio.sleep(delay)
            self._living.add(request.logs[0].id)
            self._tasks.start_soon(self._be_client, request)
            sent += 1
            if sent % self.scenario.lull == 0:
                begun = self.loop.time()
                await self._wait_for_silence()
                late += self.loop.time() - begun
        await self._wait_for_silence()
        return sent

    async def _be_client(self, request: SimulatedRequest) -> None:
        try:
            await self._ask(request)
        except Exception as error:
            self._stop(error)
        finally:
            self._living.discard(request.logs[0].id)

    async def _ask(self, request: SimulatedRequest) -> None:
        witness, now = self.witness, self.loop.time()
        seen = {
            log.id: ObservedSequence(crc32(log.id.encode()), log, Truth(log), now, self.witness.restarts())
            for log in request.logs
        }
        how = "left"
        try:
            async with self._client.stream(request.logs) as stream:
                await self._read(stream, request, seen)
            if all(sequence.ended for sequence in seen.values()) and (
                stream._arrived or stream._inbox._deltas
            ):
                raise Wrong(f"request {request.logs[0].id} has ended, and more of it has come")
        except PersonaeError as error:
            how = self._allowed(request, error)
        for sequence in seen.values():
            if sequence.ended is None:
                if how == "left" and request.leaves_after is None:
                    raise Wrong(f"sequence {sequence.log.id} has no end")
                witness.end(sequence, how)

    async def _read(
        self, stream: LocalStream, request: SimulatedRequest, seen: dict[str, ObservedSequence]
    ) -> None:
        leaves, read = request.leaves_after, 0
        if leaves == 0:
            return
        async for delta in stream:
            sequence = seen[delta.id]
            self.witness.delta(sequence, delta)
            if delta.code == GRAMMAR_TOO_SLOW and bound_slowly(sequence.log):
                pass
            elif delta.finish not in (None, "stop", "length") and not self.faults.may_fail(delta.id):
                raise Wrong(f"sequence {delta.id} ends by {delta.finish}: {delta.error}")
            read += len(delta.tokens)
            if leaves is not None and read >= leaves:
                if len(seen) == 1:
                    return
                stream.stop(delta.id)  # one of several
            if request.naps:
                await anyio.sleep(request.naps)

    def _allowed(self, request: SimulatedRequest, error: PersonaeError) -> str:
        """The name of an error that this request may end with. Anything else is raised."""
        log = request.logs[0]
        source = log.grammar.source if log.grammar is not None else ""
        match error:
            case EngineLost():
                return "engine lost"
            case Overloaded():
                return "refused"
            case GrammarError() if source.startswith(BAD):
                return "bad grammar"
            case RequestFailed(code="grammar_failed") if source.startswith(PANICS):
                return "bad grammar"
            case Quarantined() if log.tokens[0] == POISON:
                return "quarantined"
            case Quarantined() if any(self._deaths.get(log.id, 0) >= GUILTY for log in request.logs):
                return "unlucky"  # planted faults struck twice while it was aboard
            case RequestFailed() if (log.adapter or "").startswith(BROKEN):
                return "no adapter"
        raise Wrong(f"request {log.id} fails: {error!r}") from error

    # Silence

    async def _wait_for_silence(self) -> None:
        """Until all have ended; then nothing of them may be left anywhere."""
        lost = self._client._frontend.lost
        begun, epochs = self.loop.time(), self.witness.restarts()
        while self._living or not (self._all_ready() or lost.is_set()):
            self.faults.resting = self.scenario.calm_lulls and not self._living
            await anyio.sleep(0.25)
            outages = (self.witness.restarts() - epochs + 1) * self.witness.outage
            if self.loop.time() - begun > self.scenario.longest_wait + outages:
                raise Wrong(f"never ended: {sorted(self._living) or 'the outage'}")
        await anyio.sleep(SETTLE_SECONDS)
        if lost.is_set():
            return
        if not self._all_ready():  # struck again
            await self._wait_for_silence()
            return
        for index, frontend in self._frontends().items():
            if not frontend.lost.is_set():
                self._check_silent(self.engines[index], frontend)
        if isinstance(self._client._frontend, ReplicaSet):
            nothing_left(self._client._frontend)
            self._check_prefixes(self._client._frontend)
        self.lulls += 1
        self.faults.resting = False

    def _check_prefixes(self, replicas: ReplicaSet) -> None:
        """What replicas say of their prefix caches is true."""
        for index, replica in replicas.replicas.items():
            recorder = self.engines[index].recorder
            if replica.exact is None or recorder is None or replica.frontend.lost.is_set():
                continue
            if replica.exact.names != recorder.names:
                raise Wrong(f"engine {index} has other blocks cached than it says")

    def _frontends(self) -> dict[int, Frontend]:
        house = self._client._frontend
        if isinstance(house, ReplicaSet):
            return {replica.index: replica.frontend for replica in house.replicas.values()}
        assert isinstance(house, Frontend)
        return {0: house}

    def _all_ready(self) -> bool:
        frontends = self._frontends().values()
        return self._draining() == 0 and all(each.ready() or each.lost.is_set() for each in frontends)

    def _draining(self) -> int:
        """How many replicas are about to be removed, or are being."""
        if self._scaler is None:
            return 0
        return sum(replica.state is ReplicaState.DRAINING for replica in self._scaler.replicas)

    def _check_silent(self, engine: SimulatedEngine, frontend: Frontend) -> None:
        """Nothing is left of what has ended, at one of the engines."""
        process = engine.process
        assert process is not None
        houses = [frontend._supervisor] + ([process.core] if process.core else [])
        actors = {path: actor for house in houses for path, actor in _actors(house)}
        idle(actors, engine.epochs)
        if (device := engine.device) is not None:
            held = {
                digest
                for store in actors.values()
                if isinstance(store, AdapterStore)
                for digest in store._idle
            }
            if device.worker.held != held:
                raise Wrong(f"all have ended, the device holds {device.worker.held}, and the store {held}")
            if device.slots:
                raise Wrong(f"all have ended, and slots are still taken: {list(device.slots)}")

    # Adding and removing engines

    def _scale(self, dice: random.Random) -> None:
        """Have another number of replicas."""
        if self._scaler is not None:
            least = max(self.scenario.replicas // 2, 1)
            count, seconds = dice.randint(least, self._scaler.most), dice.choice((0.0, 1.0, 30.0))
            self._tasks.start_soon(self._ask_to_scale, count, seconds)

    async def _ask_to_scale(self, count: int, seconds: float) -> None:
        assert self._scaler is not None
        with suppress(Conflict, ActorStopped):  # places of those that drain are not free yet; it is over
            await self._scaler.scale(count, seconds)

    # The engine core's process

    async def _launch(self, engine: SimulatedEngine) -> CoreProcess:
        scenario, loop, costs = self.scenario, self.loop, self.scenario.costs
        threads = loop.threads
        engine.epochs += 1
        fails, self.faults.load_fails = self.faults.load_fails, False

        def build_device() -> SimulatedDevice:
            if engine.device is not None:
                engine.busy += engine.device.busy
            engine.device = SimulatedDevice(
                self.layout, scenario.places, costs, threads, self.faults, lambda: process.drag
            )
            return engine.device

        def build_kv_events() -> KVEventRecorder:
            engine.recorder = KVEventRecorder()
            return engine.recorder

        engine_spec = EngineSpec(
            build_step_engine=build_device,
            build_scheduler=lambda: WatchedScheduler(self.layout, self.witness),
            build_compiler=lambda: SimulatedGrammars(costs, threads, self.faults),
            layout=self.layout,
            vocab_size=VOCABULARY,
            tokenizer=None,  # type: ignore[arg-type]  # The engine core has no use for it
            models={},
            library=SimulatedAdapters(costs, threads, self.faults, keep=4 * scenario.places),
            salt=lambda tenant: b"",  # the requests bring theirs
            max_live=scenario.max_live,
            window=scenario.window,
            late=not costs.runs_ahead,
            build_kv_events=build_kv_events if scenario.kv_events else None,
        )
        facts = Facts(
            {}, self.layout.max_model_len, VOCABULARY, GenerationDefaults(), scenario.places,
            AdapterBounds(LoraShapes(1, {}), 64, 1e9), "", scenario.slots, scenario.batch,
            NumericsClass(f"{self.engines.index(engine) % scenario.classes}"),
        )  # fmt: skip
        process = SimulatedProcess(
            loop,
            self._dice,
            engine.epochs,
            core.serve,
            engine_spec,
            facts,
            costs.start,
            fails,
            self._note_end,
        )
        engine.process = process
        self._tasks.start_soon(process.run)
        return process

    def _note_end(self, recorder: StepRecorder, error: BaseException | None) -> None:
        """The engine core's process has ended."""
        if (last := recorder.read()) is not None:
            for id in last.on_device:
                self._deaths[id] = self._deaths.get(id, 0) + 1
        if error is not None and not self.faults.explains(error):
            self._stop(error)

    def _incident(self, incident: Incident) -> None:
        """An actor of the frontend has died; of the process that the engine core is, its host."""
        error = incident.error
        if error is None or isinstance(error, EngineCoreDied | LoadError):
            return  # why it died is told to `_note_end`; what killed it is a fault
        if isinstance(error, EngineCoreHangs) and self.faults.struck.keys() & HANGS:
            return
        if isinstance(error, RestartsExhausted) and incident.path.endswith("/back"):
            return
        self._stop(error)

    def _stop(self, error: BaseException) -> None:
        if self._wrong is None:
            self._wrong = error
            self._tasks.cancel_scope.cancel()


def bound_slowly(log: SequenceLog) -> bool:
    """Whether its masks may take too long."""
    return log.grammar is not None and log.grammar.source.startswith(THINKS)


def _actors(house: Supervisor) -> list[tuple[str, object]]:
    return [
        (child.node.path, child.node.actor)
        for child in house.children
        if isinstance(child.node, ActorCell) and child.node.actor is not None
    ]


def simulate(scenario: Scenario) -> SimulationReport:
    """Run a scenario. Raises Violation."""
    loops: list[SimulationLoop] = []

    def make_loop() -> SimulationLoop:
        loops.append(SimulationLoop(scenario.seed))
        return loops[0]

    async def run() -> SimulationReport:
        return await World(scenario, loops[0]).run()

    logger = logging.getLogger("personae")
    level, thresholds = logger.level, gc.get_threshold()
    logger.setLevel(logging.CRITICAL)  # planted deaths are no news
    gc.set_threshold(*COLLECTED)
    try:
        return anyio.run(run, backend_options={"loop_factory": make_loop})
    except Exception as error:
        raise InvariantViolated(f"{unwrap(error)}\nreplay: {scenario!r}") from error
    finally:
        logger.setLevel(level)
        gc.set_threshold(*thresholds)
