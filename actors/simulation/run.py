"""The parts of one simulated run that its engines, its clients and its checks share."""

from dataclasses import dataclass, field

from personae.actors.simulation.faults import Faults
from personae.actors.simulation.loop import SimulationLoop
from personae.actors.simulation.machine import SimulatedDevice
from personae.actors.simulation.peers import SimulatedPeers
from personae.actors.simulation.process import SimulatedProcess
from personae.actors.simulation.scenario import Scenario
from personae.actors.simulation.tier import SimulatedTier
from personae.actors.simulation.witness import Witness
from personae.engine.scheduling.kv_events import KVEventRecorder
from personae.engine.scheduling.scheduler import Scheduler


class SimulatedEngine:
    """One of the engines: its current process and device, and how many there were."""

    def __init__(self) -> None:
        self.process: SimulatedProcess | None = None
        self.device: SimulatedDevice | None = None
        self.recorder: KVEventRecorder | None = None
        self.tier: SimulatedTier | None = None  # outlives the processes
        self.peers: SimulatedPeers | None = None
        self.scheduler: Scheduler | None = None
        self.epochs = 0
        self.busy = 0.0  # seconds, of earlier devices


@dataclass(slots=True)
class Run:
    """One run. `engines` has every engine that was ever added, by its index."""

    scenario: Scenario
    loop: SimulationLoop
    faults: Faults
    witness: Witness
    engines: list[SimulatedEngine]
    live: set[str] = field(default_factory=set)  # requests, by the id of their first sequence
    deaths: dict[str, int] = field(default_factory=dict)  # of engine cores with this sequence on the device
