"""The whole company in one process: for tests, for use as a library, for debugging.

personae               one_for_one, gives up at once: what Front lost could not be resumed
├── front              one_for_one, gives up at once: it holds the logs
│   ├── streamer
│   ├── ingress
│   └── queue/...      one per adapter, made on first use
└── back               one_for_all: its four are one engine and start anew together, caches empty
    ├── executor       owns the device, on its own thread
    ├── store          which adapters are on the device
    ├── compiler
    └── scheduler      last: when it says `BackStarted`, the others are there
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count

from personae.actors.back import spawn_back
from personae.actors.blackbox import BlackBox
from personae.actors.front import Front, LocalClient, Prospectus, watching
from personae.actors.kit.child import Incident, Report, log_incident
from personae.actors.kit.supervisor import Supervisor
from personae.actors.script import Script

MAX_RESTARTS = 5
WITHIN = 60.0  # seconds


@asynccontextmanager
async def open_stage(
    script: Script, report: Report = log_incident, *, max_restarts: int = MAX_RESTARTS
) -> AsyncIterator[LocalClient]:
    """Raise the curtain: start every actor, yield the client, stop everything in order.

    Raises what the first start of an actor raised (StartFailed). When Back dies more than `max_restarts`
    times within a minute it is not started again: streams end with EngineLost, and so does what comes later.
    """
    box = BlackBox.private()

    def note(incident: Incident) -> None:
        if incident.error is not None and incident.path.startswith("personae/back/"):
            front.note_death(box.read(), outside=False)
        report(incident)

    root = Supervisor(
        "personae", max_restarts=0, report=watching(note, "personae/back", lambda: front.lose_back())
    )
    front = Front(root, ready=lambda: back.state == "running", max_live=script.max_live, window=script.window)
    # Temporary: when it gives up, Front stays, to tell everybody. Stopped first: it tells Front things.
    back = root.supervisor(
        "back", strategy="one_for_all", max_restarts=max_restarts, within=WITHIN, restart="temporary"
    )
    lives = count(1)
    front.meet(
        *spawn_back(back, script, lambda: next(lives), front.streamer, front.ingress, front.queue_of, box)
    )
    async with root:
        yield LocalClient(
            Prospectus(
                script.tokenizer, script.models, script.layout.max_model_len, script.vocab_size, script.salt
            ),
            front,
        )
