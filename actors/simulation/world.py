"""One simulated run: the engines, the clients and the faults, and the report.

    report = simulate(Scenario(seed=7, workload=SimulatedWorkload(requests=1000), faults_every=5.0))

The scenario determines everything: the same one gives the same report. That includes `trace`, a checksum over
everything that clients saw and when. A violation raises `InvariantViolated`; its message says how to replay
it.
"""

import gc
import logging
import random
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress
from functools import partial
from pathlib import Path

import anyio
import tokenizers
from anyio.abc import TaskGroup

from personae.actors.enginecore import core
from personae.actors.enginecore.step_recorder import StepRecorder
from personae.actors.kit.actor import unwrap
from personae.actors.kit.child import Incident
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
from personae.actors.replicas.scaling import ReplicaScaler
from personae.actors.simulation.adapters import SimulatedAdapters
from personae.actors.simulation.clients import Clients
from personae.actors.simulation.faults import Faults
from personae.actors.simulation.grammars import SimulatedGrammars
from personae.actors.simulation.idle import IdleCheck
from personae.actors.simulation.loop import SimulationLoop
from personae.actors.simulation.machine import EOS, VOCABULARY, SimulatedDevice
from personae.actors.simulation.peers import SimulatedPeers
from personae.actors.simulation.process import SimulatedProcess
from personae.actors.simulation.ranks import SimulatedRanks
from personae.actors.simulation.run import Run, SimulatedEngine
from personae.actors.simulation.scenario import PlacementName, Scenario, SimulationReport
from personae.actors.simulation.service import ServiceGaps
from personae.actors.simulation.tier import Cells, SimulatedTier
from personae.actors.simulation.trouble import Wrong
from personae.actors.simulation.witness import WatchedScheduler, Witness
from personae.actors.spec import EngineSpec
from personae.actors.wire import Facts
from personae.engine.generation_config import GenerationDefaults
from personae.engine.numerics import NumericsClass
from personae.engine.plan import MemoryLayout
from personae.engine.scheduling.kv_events import KVEventRecorder
from personae.engine.tiers.page_index import PageIndex
from personae.engine.tiers.tier import Tier
from personae.engine.tokens import Tokenizer
from personae.errors import (
    ActorStopped,
    Conflict,
    EngineCoreDied,
    EngineCoreHangs,
    LoadError,
    RestartsExhausted,
)
from personae.lora.bounds import AdapterBounds
from personae.lora.shapes import LoraShapes

HANG_SECONDS = 4.0
RANK_CHECK_SECONDS = 0.05  # until a rank that waits for another notices its end
HANGS = {"hang", "stop", "lost", "silent", "partition"}  # faults after which an engine is given up
COLLECTED = (200_000, 20, 1000)  # there is little garbage, and collecting it would take 40 % of the time


class InvariantViolated(AssertionError):
    """An invariant did not hold. The message says how to replay the run."""


class SimulatedSource:
    """Places for twice as many replicas as there are at the start, but at most 16 more."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self._places: set[int] = set()

    @property
    def most(self) -> int:
        """How many places there are."""
        first = max(self._world.scenario.replicas, 1)
        return min(2 * first, first + 16)

    def acquire(self, replica: int) -> Launch:
        """Take a place, with a new engine for each replica."""
        if len(self._places) >= self.most:
            raise Conflict("no place is free")
        self._places.add(replica)
        engine = SimulatedEngine()
        self._world.engines.append(engine)
        assert self._world.engines[replica] is engine
        return partial(self._world._launch, engine)

    def release(self, replica: int) -> None:
        """Free a place. The replica's process must have ended."""
        process = self._world.engines[replica].process
        if process is not None and process.returncode is None:
            raise Wrong(f"replica {replica} is removed, and its process still runs")
        self._places.remove(replica)


PLACEMENTS: dict[PlacementName, Callable[[], Placement]] = {
    "random": RandomPlacement,
    "least-loaded": LeastLoaded,
    "prefix": LongestPrefix,
    "d2lpm": DoubleDeficit,
    "estimated": EstimatedSeconds,
}


class World:
    """Builds and runs one simulated run."""

    def __init__(self, scenario: Scenario, loop: SimulationLoop) -> None:
        self.scenario = scenario
        self.loop = loop
        self._alone = scenario.replicas == 1 and not scenario.by_load
        self.engines = [SimulatedEngine()] if self._alone else []
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
            gaps=ServiceGaps() if scenario.compare_service else None,
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
        self._run = Run(scenario, loop, self.faults, self.witness, self.engines)
        self._scaler: ReplicaScaler | None = None
        self._cells: list[Cells] = [PageIndex() for _ in range(scenario.classes)]  # of shared tiers
        self._tasks: TaskGroup
        self._failure: BaseException | None = None

    async def run(self) -> SimulationReport:
        """Run the scenario from the first request to the last."""
        options = EngineOptions(Path("simulation"), record_kv_events=self.scenario.kv_events)
        backend = tokenizers.Tokenizer(tokenizers.models.BPE())
        backend.decoder = tokenizers.decoders.ByteLevel()
        tokenizer = Tokenizer(backend, eos_ids=EOS)
        try:
            async with anyio.create_task_group() as self._tasks:
                async with self._open(options, tokenizer) as engine_processes:
                    client, self._scaler = engine_processes.client, engine_processes.scaler
                    self._tasks.start_soon(self.faults.run)
                    idle = IdleCheck(self._run, client, self._scaler)
                    sent = await Clients(self._run, client, self._tasks, self._fail).send_all(idle.wait)
                self._tasks.cancel_scope.cancel()
        except BaseExceptionGroup:
            if self._failure is None:
                raise
        if self._failure is not None:
            raise self._failure
        witness = self.witness
        engines = self.engines
        stats = client.stats()
        return SimulationReport(
            self.scenario,
            self.loop.time(),
            sent,
            witness.tokens,
            self.loop.steps,
            sum(engine.epochs - 1 for engine in engines),
            witness.outcomes,
            self.faults.struck,
            idle.lulls,
            sum(engine.busy + (engine.device.busy if engine.device else 0.0) for engine in engines),
            witness.waits,
            witness.paces,
            witness.trace,
            stats.counters.prefix_queries,
            stats.counters.prefix_hits,
            stats.counters.tier_hits,
            int(sum(count for source, count in stats.adapters.loads.items() if source != "device")),
            stats.moved,
            stats.changed,
            witness.moves,
            witness.targeted,
            witness.good,
            witness.gaps.widest if witness.gaps is not None else 0.0,
            stats.prefilled,
            sum(engine.peers.fetched for engine in engines if engine.peers is not None),
            witness.pauses,
        )

    def _open(
        self, options: EngineOptions, tokenizer: Tokenizer
    ) -> AbstractAsyncContextManager[MultiProcessEngine]:
        scenario = self.scenario
        if self._alone:
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
            prefill=scenario.prefill,
            by_load=scenario.by_load,
        )

    # Adding and removing engines

    def _scale(self, dice: random.Random) -> None:
        """Change the number of replicas."""
        if self._scaler is not None:
            least = max(self.scenario.replicas // 2, 1)
            count, seconds = dice.randint(least, self._scaler.most), dice.choice((0.0, 1.0, 30.0))
            self._tasks.start_soon(self._ask_to_scale, count, seconds)

    async def _ask_to_scale(self, count: int, seconds: float) -> None:
        assert self._scaler is not None
        with suppress(Conflict, ActorStopped):  # draining replicas keep their places; or the run is over
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
                self.layout,
                scenario.places,
                costs,
                threads,
                self.faults,
                lambda: process.drag,
                tier(),
                process.ranks,
            )
            return engine.device

        def tier() -> Tier | None:
            return engine.tier if engine.peers is None else engine.peers

        if engine.tier is None and scenario.tier_pages:
            index = self.engines.index(engine)
            cells = self._cells[index % scenario.classes] if scenario.tier_shared else None
            engine.tier = SimulatedTier(
                scenario.tier_pages, scenario.tier_fails, costs, threads, scenario.seed + index, cells
            )
        if engine.peers is None and scenario.transfer:
            seed = scenario.seed + self.engines.index(engine)
            engine.peers = SimulatedPeers(
                self.engines, engine.tier, scenario.transfer_fails, costs, loop, seed, self._fail
            )

        def build_scheduler() -> WatchedScheduler:
            if (own := tier()) is not None:
                own.forget_fetches()
            engine.scheduler = WatchedScheduler(self.layout, self.witness, own, scenario.stages)
            return engine.scheduler

        def build_kv_events() -> KVEventRecorder:
            engine.recorder = KVEventRecorder()
            return engine.recorder

        engine_spec = EngineSpec(
            build_step_engine=build_device,
            build_scheduler=build_scheduler,
            build_compiler=lambda: SimulatedGrammars(costs, threads, self.faults),
            layout=self.layout,
            vocab_size=VOCABULARY,
            tokenizer=None,  # type: ignore[arg-type]  # the engine core does not use it
            models={},
            library=SimulatedAdapters(costs, threads, self.faults, keep=4 * scenario.places),
            salt=lambda tenant: b"",  # requests have their own
            max_live=scenario.max_live,
            window=scenario.window,
            late=not costs.runs_ahead and scenario.stages == 1,
            steps_at_once=scenario.stages,
            build_kv_events=build_kv_events if scenario.kv_events else None,
            tier=tier(),
        )
        facts = Facts(
            {}, self.layout.max_model_len, VOCABULARY, GenerationDefaults(), scenario.places,
            AdapterBounds(LoraShapes(1, {}), 64, 1e9), "", scenario.slots, scenario.batch,
            NumericsClass(f"{self.engines.index(engine) % scenario.classes}"),
            f"engines/{self.engines.index(engine)}" if scenario.transfer else None,
        )  # fmt: skip
        ranks = SimulatedRanks(
            scenario.ranks,
            scenario.stages,
            skew=scenario.skew,
            spare=scenario.spare,
            seed=scenario.seed,
            waits=partial(threads.sleep, RANK_CHECK_SECONDS),
        )
        process = SimulatedProcess(
            loop,
            self._dice,
            engine.epochs,
            core.serve,
            engine_spec,
            facts,
            costs.start,
            fails,
            ranks,
            self._note_end,
        )
        engine.process = process
        self._tasks.start_soon(process.run)
        return process

    def _note_end(self, recorder: StepRecorder, error: BaseException | None) -> None:
        """The engine core's process has ended."""
        if (last := recorder.read()) is not None:
            for id in last.on_device:
                self._run.deaths[id] = self._run.deaths.get(id, 0) + 1
        if error is not None and not self.faults.explains(error):
            self._fail(error)

    def _incident(self, incident: Incident) -> None:
        """Handle the death of an actor of the frontend, which may be the one that runs an engine core."""
        error = incident.error
        if error is None or isinstance(error, EngineCoreDied | LoadError):
            return  # `_note_end` handles why it died
        if isinstance(error, EngineCoreHangs) and self.faults.struck.keys() & HANGS:
            return
        if isinstance(error, RestartsExhausted) and incident.path.endswith("/core"):
            return
        self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error
            self._tasks.cancel_scope.cancel()


def simulate(scenario: Scenario) -> SimulationReport:
    """Run a scenario. Raises InvariantViolated."""
    loops: list[SimulationLoop] = []

    def make_loop() -> SimulationLoop:
        loops.append(SimulationLoop(scenario.seed))
        return loops[0]

    async def run() -> SimulationReport:
        return await World(scenario, loops[0]).run()

    logger = logging.getLogger("personae")
    level, thresholds = logger.level, gc.get_threshold()
    logger.setLevel(logging.CRITICAL)  # planted deaths need no log lines
    gc.set_threshold(*COLLECTED)
    try:
        return anyio.run(run, backend_options={"loop_factory": make_loop})
    except Exception as error:
        raise InvariantViolated(f"{unwrap(error)}\nreplay: {scenario!r}") from error
    finally:
        logger.setLevel(level)
        gc.set_threshold(*thresholds)
