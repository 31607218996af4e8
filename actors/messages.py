"""Every message between the actors, on one page.

The frontend holds the requests: ingress, one queue per adapter, streamer. With several replicas each replica
has its own, and a dispatcher sits in front of them. The engine core holds the device: adapter store,
scheduler, compiler, executor. A message marked *wire* crosses between the two and is plain data. The others
stay on their side and may hold live objects. There is one message per step and hop, never one per token.

Each start of an engine core has a number, its `epoch`. A message to the engine core carries the epoch that it
is meant for, and other epochs ignore it. So a message that was in transit when the engine core died cannot be
mistaken for a new one.
"""

import msgspec
from anyio import Event

from personae.actors.enginecore.planned_step import PlannedStep
from personae.actors.frontend.inbox import Inbox
from personae.actors.frontend.live_stream import LiveStream
from personae.actors.kit.mailbox import Reply
from personae.engine.plan import StepResult
from personae.engine.scheduling.kv_events import KVEvent
from personae.engine.scheduling.running import HeldPages
from personae.engine.sequence import Delta, SequenceLog
from personae.engine.stats import SchedulerStats, StepSample, StepTimings
from personae.errors import Overloaded, PersonaeError
from personae.grammar.matcher import Grammar
from personae.grammar.spec import GrammarSpec
from personae.lora.source import AdapterSource


class Message(msgspec.Struct, frozen=True, tag=True):
    """The base of all messages."""


# --- Frontend: ingress
# -----------------------------------------------------------------------------------------


class Submission(Message, frozen=True):
    """From a client: sequences that share one inbox. All of them are accepted, or all are refused
    (Overloaded)."""

    logs: tuple[SequenceLog, ...]
    inbox: Inbox
    reply: Reply[None]


class Withdraw(Message, frozen=True):
    """From a client: it does not want these sequences any more (it disconnected, or found a stop string)."""

    ids: tuple[str, ...]


class Progress(Message, frozen=True):
    """From the streamer: sequences that produced their first delta, and sequences that have ended."""

    started: tuple[str, ...]
    ended: tuple[str, ...]


class EngineCoreStarted(Message, frozen=True):
    """*Wire.* From the scheduler, before anything else: a new epoch of the engine core has begun, without
    sequences."""

    epoch: int
    stats: SchedulerStats


class Shutdown(Message, frozen=True):
    """From a client: end every live sequence with this error, and refuse new ones with it."""

    error: PersonaeError


class Resubmit(Message, frozen=True):
    """From the streamer, after `Replay`: the logs of live sequences, with the tokens emitted so far.

    No new sequence is admitted until the `last` of these messages: suspects are tried alone.
    """

    logs: tuple[SequenceLog, ...]
    epoch: int
    last: bool


class Preempted(Message, frozen=True):
    """From the streamer: sequences that the engine core gave up without ending them, with the tokens emitted
    so far. They wait again."""

    logs: tuple[SequenceLog, ...]
    epoch: int


# --- Frontend: dispatcher, with several replicas
# -----------------------------------------------------------------------------------------


class Transfer(Message, frozen=True):
    """From the dispatcher to a replica: it serves these streams from now on. `logs` are the logs to submit
    for them. A sequence on `trial` is reported as soon as it is cleared."""

    streams: tuple[LiveStream, ...]
    logs: tuple[SequenceLog, ...]
    trial: bool = False


class HandedOver(Message, frozen=True):
    """From a replica's streamer to its ingress: it does not have these streams any more. With `cancel` its
    engine core still computes them."""

    ids: tuple[str, ...]
    cancel: bool = False


class Orphaned(Message, frozen=True):
    """From a replica's streamer to the dispatcher: its engine core has died, and these are all its streams.

    Those in `on_device` were on the device; `outside`: see `EngineDied`.
    """

    replica: int
    streams: tuple[LiveStream, ...]
    on_device: tuple[str, ...] = ()
    outside: bool = False


class Prefilled(Message, frozen=True):
    """From the streamer of a prefill engine to the dispatcher: the prompts of these streams are computed, and
    their first tokens chosen. Their pages are at this replica."""

    replica: int
    streams: tuple[LiveStream, ...]


class ReplicaProgress(Message, frozen=True):
    """From a replica's streamer to the dispatcher: sequences that started to run, sequences that have ended,
    and sequences on trial that are cleared."""

    replica: int
    admitted: tuple[str, ...] = ()
    ended: tuple[str, ...] = ()
    cleared: tuple[str, ...] = ()


class ReplicaUp(Message, frozen=True):
    """From a replica's streamer to the dispatcher: its engine core has started, without sequences."""

    replica: int


class ReplicaLost(Message, frozen=True):
    """To the dispatcher: this replica's engine core will not be started again."""

    replica: int


class NoEngine(Message, frozen=True):
    """To the dispatcher: no engine serves, and none could be started. What waits gets this error, and so does
    what comes within its `retry_after`."""

    error: Overloaded


class ChangeRole(Message, frozen=True):
    """To the dispatcher: this replica only computes prompts from now on (`prefill`), or does all it is sent.
    The streams that it has stay there."""

    replica: int
    prefill: bool


class Drain(Message, frozen=True):
    """To the dispatcher: send nothing more to this replica. `drained` is set when it has no streams left."""

    replica: int
    drained: Event


class HandOver(Message, frozen=True):
    """To the dispatcher, which passes it to the streamer of a draining replica: its streams move to other
    replicas now."""

    replica: int


# --- Frontend: adapter queue
# -----------------------------------------------------------------------------------


class Enqueue(Message, frozen=True):
    """From the ingress: sequences for this queue's adapter, in this epoch of the engine core.

    With the first one of a new epoch the queue forgets the sequences of earlier epochs: they are enqueued
    again.
    """

    logs: tuple[SequenceLog, ...]
    epoch: int


class Pinned(Message, frozen=True):
    """*Wire.* From the adapter store: the adapter is on the device and stays there until `Unpin`.

    If `error` is set, it cannot be loaded, and its requests fail with that text; `kind` names the class of
    `personae.errors`.
    """

    adapter: str
    epoch: int
    error: str | None = None
    kind: str = "RequestFailed"


class ReleaseRequest(Message, frozen=True):
    """*Wire.* From the adapter store: others wait for this adapter's memory. Let the running sequences
    finish, then unpin.

    `now`: that took too long. The running sequences are preempted and wait until the adapter is loaded again.
    """

    adapter: str
    epoch: int
    now: bool = False


# --- Frontend: streamer
# ----------------------------------------------------------------------------------------


class OpenStream(Message, frozen=True):
    """From the ingress: the inbox for the deltas of these sequences."""

    logs: tuple[SequenceLog, ...]
    inbox: Inbox


class CloseStream(Message, frozen=True):
    """From the ingress: nobody listens to these sequences any more. They have not ended yet."""

    ids: tuple[str, ...]


class StepDone(Message, frozen=True):
    """*Wire.* From the scheduler: one step's deltas of all sequences. The `admitted` ones are computed from
    now on. `steps` are those that ended since the last message."""

    deltas: tuple[Delta, ...]
    stats: SchedulerStats
    admitted: tuple[str, ...] = ()
    steps: tuple[StepSample, ...] = ()


class Refused(Message, frozen=True):
    """*Wire.* From the scheduler or a queue: these sequences ended before their first step.

    `kind` names the class of `personae.errors` that the client raises, `param` the invalid field.
    """

    ids: tuple[str, ...]
    kind: str
    message: str
    param: str | None = None
    code: str | None = None


class KVEvents(Message, frozen=True):
    """*Wire.* From the scheduler, if recording is on: what entered and left the prefix cache."""

    events: tuple[KVEvent, ...]


class EngineDied(Message, frozen=True):
    """Reports the death of the engine core: the sequences that were on the device, and whether it was
    killed from outside. `on_device` None: its machine does not answer, so only the frontend's own record is
    known."""

    on_device: tuple[str, ...] | None
    outside: bool


class Replay(Message, frozen=True):
    """From the ingress, when the engine core has restarted: answer with `Resubmit`."""

    epoch: int
    stats: SchedulerStats


class AdapterStats(Message, frozen=True):
    """*Wire.* From the adapter store, when they have changed: adapters on the device and on the host, and
    adapters that wait to be loaded (`line`); loads and their seconds by source ("device", "host" or "disk",
    where the adapter was). `kept_loaded` counts the adapters on the device that stay there."""

    device: int = 0
    kept_loaded: int = 0
    host: int = 0
    host_bytes: int = 0
    line: int = 0
    evictions: int = 0
    yields: int = 0
    loads: dict[str, float] = {}
    load_seconds: dict[str, float] = {}


# --- Engine core: adapter store
# ------------------------------------------------------------------------------------


class Pin(Message, frozen=True):
    """*Wire.* From a queue: load this adapter to the device. Answered by `Pinned` when it is there."""

    adapter: str
    epoch: int


class Unpin(Message, frozen=True):
    """*Wire.* From a queue: it has no request for this adapter left."""

    adapter: str
    epoch: int


class KeepLoaded(Message, frozen=True):
    """*Wire.* From a client: load these adapters, and keep them on the device until another message names
    others. In every epoch."""

    adapters: tuple[str, ...]


class AdapterLoaded(Message, frozen=True):
    """From the executor: whether the adapter was loaded. `error` says why it never can be; `kind` is as in
    `Pinned`.

    The other fields describe the pool now: adapters in it, copies to it so far, evictions so far.
    """

    adapter: str
    placed: bool
    error: str | None = None
    residents: int = 0
    loads: int = 0
    evictions: int = 0
    kind: str = "RequestFailed"


class AdaptersEvicted(Message, frozen=True):
    """From the executor: adapters were evicted because sequences needed their memory. The figures are as in
    `AdapterLoaded`."""

    residents: int
    loads: int
    evictions: int


class MemoryWanted(Message, frozen=True):
    """From the executor: sequences need memory that adapters have, and all adapters are held. Answered by a
    `Release` as soon as one can be evicted."""


# --- Engine core: scheduler
# ----------------------------------------------------------------------------------------


class Submit(Message, frozen=True):
    """*Wire.* From a queue: these sequences wait for a slot from now on."""

    logs: tuple[SequenceLog, ...]
    epoch: int


class Cancel(Message, frozen=True):
    """*Wire.* From a queue: end these sequences. The last delta of each has `finish` "cancelled"."""

    ids: tuple[str, ...]
    epoch: int


class Preempt(Message, frozen=True):
    """*Wire.* From a queue: give up these sequences. The last delta of each has `finish` "preempted"."""

    ids: tuple[str, ...]
    epoch: int


class KeepSession(Message, frozen=True):
    """*Wire.* From a client: keep the pages of a tenant's session for so many seconds from now on, 0 for no
    longer. With `forget` delete the pages that nobody else uses. In every epoch."""

    tenant: str
    session: str
    seconds: float
    forget: bool = False


class HoldPages(Message, frozen=True):
    """From the page server: keep these pages for another engine until `LetGo` (see `Scheduler.hold`)."""

    root: bytes
    chunks: tuple[bytes, ...]
    reply: Reply[HeldPages]


class LetGo(Message, frozen=True):
    """From the page server: the pages held under this number have been sent."""

    number: int


class Compiled(Message, frozen=True):
    """From the compiler: the grammar, or the reason why there is none."""

    spec: GrammarSpec
    tenant: str
    grammar: Grammar | None = None
    error: PersonaeError | None = None


class Borrow(Message, frozen=True):
    """From the executor: an adapter needs the memory of `count` KV pages. Answered by `Lend`."""

    count: int


class Return(Message, frozen=True):
    """From the executor: KV pages whose memory adapters have returned."""

    pages: tuple[int, ...]


class Resumed(Message, frozen=True):
    """From the executor: these sequences were deferred, and their masks are ready now."""

    ids: tuple[str, ...]


class PollMasks(Message, frozen=True):
    """From the executor to itself: check whether such masks are ready."""


class StepFinished(Message, frozen=True):
    """From the executor: a step's result, how long it took, and how long the device was idle before it.

    `timings` covers all steps so far.
    """

    result: StepResult
    seconds: float
    gap_seconds: float
    timings: StepTimings = StepTimings()


# --- Engine core: compiler
# -----------------------------------------------------------------------------------------


class Compile(Message, frozen=True):
    """From the scheduler: compile this grammar for a tenant. Answered by `Compiled`."""

    spec: GrammarSpec
    tenant: str = "default"


# --- Engine core: executor
# -----------------------------------------------------------------------------------------


class Execute(Message, frozen=True):
    """From the scheduler: run this step.

    `follows`: there was a step just before, so the time since then is the host's overhead (the measured gap).
    """

    step: PlannedStep
    follows: bool


class LoadAdapter(Message, frozen=True):
    """From the adapter store: copy this adapter from its source to the device and hold it. Answered by
    `AdapterLoaded`."""

    adapter: str
    source: AdapterSource


class AdapterLoadFailed(Message, frozen=True):
    """From a thread that reads while steps run: what it read into this adapter's pages is not the adapter,
    for this reason."""

    adapter: str
    error: str


class Lend(Message, frozen=True):
    """From the scheduler, in answer to `Borrow`: adapters may use the memory of these KV pages, if any, after
    the steps that were sent before."""

    pages: tuple[int, ...]


class RecallPages(Message, frozen=True):
    """From the scheduler: it needs `count` of the lent pages back, as soon as adapters that nobody holds can
    be evicted. Answered by one or more `Return`."""

    count: int


class Release(Message, frozen=True):
    """From the adapter store: these adapters may be evicted, in this order."""

    adapters: tuple[str, ...]
