"""The whole engine in one process: for tests, for use as a library, for debugging.

personae               one_for_one, gives up at once: what the frontend lost could not be resumed
├── frontend           one_for_one, gives up at once: it holds the logs
│   ├── streamer
│   ├── ingress
│   └── queue/...      one per adapter, created on first use
└── core               one_for_all: these four are one engine and restart together, with empty caches
    ├── executor       owns the device, on its own thread
    ├── store          knows which adapters are on the device
    ├── compiler
    └── scheduler      last: when it sends `EngineCoreStarted`, the others are running
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count

from personae.actors.enginecore.core import spawn_core
from personae.actors.enginecore.step_recorder import StepRecorder
from personae.actors.frontend.frontend import Frontend, LocalClient, ModelInfo, watch_restarts
from personae.actors.frontend.supervised_engine import MAX_RESTARTS, WITHIN
from personae.actors.kit.child import Incident, ReportIncident, log_incident
from personae.actors.kit.supervisor import Supervisor
from personae.actors.spec import EngineSpec


@asynccontextmanager
async def open_in_process(
    engine_spec: EngineSpec, report: ReportIncident = log_incident, *, max_restarts: int = MAX_RESTARTS
) -> AsyncIterator[LocalClient]:
    """Start every actor, yield the client, and stop everything in order.

    Raises StartFailed if an actor's first start fails. If the engine core dies more than `max_restarts` times
    within a minute, it is not started again: streams end with EngineLost, and later requests are refused with
    it.
    """
    recorder = StepRecorder.private()

    def note(incident: Incident) -> None:
        if incident.error is not None and incident.path.startswith("personae/core/"):
            frontend.note_engine_death(recorder.read(), outside=False)
        report(incident)

    root = Supervisor(
        "personae",
        max_restarts=0,
        report=watch_restarts(note, "personae/core", lambda: frontend.lose_engine()),
    )
    frontend = Frontend(
        root, ready=lambda: core.state == "running", max_live=engine_spec.max_live, window=engine_spec.window
    )
    # Temporary: when it gives up, the frontend stays and ends the streams with an error. It stops first,
    # since it sends messages to the frontend.
    core = root.supervisor(
        "core", strategy="one_for_all", max_restarts=max_restarts, within=WITHIN, restart="temporary"
    )
    epochs = count(1)
    frontend.connect(
        *spawn_core(
            core,
            engine_spec,
            lambda: next(epochs),
            frontend.streamer,
            frontend.ingress,
            frontend.queue_of,
            recorder,
        )
    )
    async with root:
        yield LocalClient(
            ModelInfo(
                engine_spec.tokenizer(),
                engine_spec.models,
                engine_spec.layout.max_model_len,
                engine_spec.vocab_size,
                engine_spec.salt,
            ),
            frontend,
        )
