"""Every message between the actors, on one page.

The frontend holds the requests: ingress, one queue per adapter, streamer. With several replicas each of them
has these, and a dispatcher stands before them. The engine core holds the device: adapter store, scheduler,
compiler, executor. A message marked *wire* crosses between the two and is plain data; the others stay on
their side and may hold live objects. One message per step and hop, never one per token.

Each start of an engine core has a number, its `epoch`. What the frontend says to the engine core carries the
epoch it is meant for, and is ignored by any other: whatever was on its way when the engine core died cannot
be taken for news.
"""

import msgspec
from anyio import Event

from personae.actors.frontend.inbox import Inbox
from personae.actors.frontend.live_stream import LiveStream
from personae.actors.kit.mailbox import Reply
from personae.engine.plan import StepPlan, StepResult
from personae.engine.scheduling.kv_events import KVEvent
from personae.engine.sequence import Delta, SequenceLog
from personae.engine.stats import SchedulerStats, StepSample, StepTimings
from personae.errors import PersonaeError
from personae.grammar.sandbox.masks import AnyGrammar
from personae.grammar.spec import GrammarKey, GrammarSpec
from personae.lora.source import AdapterSource


class Message(msgspec.Struct, frozen=True, tag=True):
    """The base of all messages."""


# --- Frontend: ingress
# -----------------------------------------------------------------------------------------


class Submission(Message, frozen=True):
    """From a client: sequences that share one inbox. Taken whole or refused whole (Overloaded)."""

    logs: tuple[SequenceLog, ...]
    inbox: Inbox
    reply: Reply[None]


class Withdraw(Message, frozen=True):
    """From a client: these sequences are not wanted any more (it went away, or found a stop string)."""

    ids: tuple[str, ...]


class Progress(Message, frozen=True):
    """From the streamer: sequences that produced their first delta, and sequences that are over."""

    started: tuple[str, ...]
    ended: tuple[str, ...]


class EngineCoreStarted(Message, frozen=True):
    """*Wire.* From the scheduler, first of all: a new epoch of the engine core has begun, and it knows no
    sequence."""

    epoch: int
    stats: SchedulerStats


class Shutdown(Message, frozen=True):
    """From a client: end every live sequence with this error, and refuse with it whatever comes."""

    error: PersonaeError


class Resubmit(Message, frozen=True):
    """From the streamer, after `Replay`: logs of live sequences as far as they got.

    Until the `last` of them nobody else is let in: suspects are tried alone.
    """

    logs: tuple[SequenceLog, ...]
    epoch: int
    last: bool


class Preempted(Message, frozen=True):
    """From the streamer: sequences that the engine core has let go of without an end, as far as they got
    in this epoch. They wait again."""

    logs: tuple[SequenceLog, ...]
    epoch: int


# --- Frontend: dispatcher, with several replicas
# -----------------------------------------------------------------------------------------


class Transfer(Message, frozen=True):
    """From the dispatcher to a replica: it serves these streams from now on. `logs` are theirs as they are to
    be submitted; one on `trial` is reported as soon as it is cleared."""

    streams: tuple[LiveStream, ...]
    logs: tuple[SequenceLog, ...]
    trial: bool = False


class HandedOver(Message, frozen=True):
    """From a replica's streamer to its ingress: these are not its streams any more."""

    ids: tuple[str, ...]


class Orphaned(Message, frozen=True):
    """From a replica's streamer to the dispatcher: its engine core has died, and these are all its streams.

    `on_device` were aboard; `outside`: as in `EngineDied`.
    """

    replica: int
    streams: tuple[LiveStream, ...]
    on_device: tuple[str, ...] = ()
    outside: bool = False


class ReplicaProgress(Message, frozen=True):
    """From a replica's streamer to the dispatcher: sequences that are computed from now on, that are over,
    and those on trial that are cleared."""

    replica: int
    admitted: tuple[str, ...] = ()
    ended: tuple[str, ...] = ()
    cleared: tuple[str, ...] = ()


class ReplicaUp(Message, frozen=True):
    """From a replica's streamer to the dispatcher: its engine core has started, and nothing is aboard."""

    replica: int


class ReplicaLost(Message, frozen=True):
    """To the dispatcher: the engine core of this replica is not started again."""

    replica: int


class Drain(Message, frozen=True):
    """To the dispatcher: send this replica nothing more. `drained` is set when it has no streams."""

    replica: int
    drained: Event


class HandOver(Message, frozen=True):
    """To the dispatcher, and from it to the streamer of a replica that drains: its streams go on at other
    replicas now."""

    replica: int


# --- Frontend: adapter queue
# -----------------------------------------------------------------------------------


class Enqueue(Message, frozen=True):
    """From the ingress: sequences for this queue's adapter, in this epoch of the engine core.

    The first of a new epoch: those of earlier epochs are forgotten, they come again.
    """

    logs: tuple[SequenceLog, ...]
    epoch: int


class Pinned(Message, frozen=True):
    """*Wire.* From the adapter store: the adapter is on the device and stays there until `Unpin`.

    With `error` set it cannot be, and its requests fail with that text; `kind` names the class of
    `personae.errors`.
    """

    adapter: str
    epoch: int
    error: str | None = None
    kind: str = "RequestFailed"


class ReleaseRequest(Message, frozen=True):
    """*Wire.* From the adapter store: others wait for this adapter's place. Finish what runs, then unpin.

    `now`: that took too long; what runs is to wait until the adapter has a place again.
    """

    adapter: str
    epoch: int
    now: bool = False


# --- Frontend: streamer
# ----------------------------------------------------------------------------------------


class OpenStream(Message, frozen=True):
    """From the ingress: where the deltas of these sequences go."""

    logs: tuple[SequenceLog, ...]
    inbox: Inbox


class CloseStream(Message, frozen=True):
    """From the ingress: nobody listens to these sequences any more; their end is still awaited."""

    ids: tuple[str, ...]


class StepDone(Message, frozen=True):
    """*Wire.* From the scheduler: one step's deltas, for everyone; `admitted` are computed from now on.
    `steps` are those that ended since the last message."""

    deltas: tuple[Delta, ...]
    stats: SchedulerStats
    admitted: tuple[str, ...] = ()
    steps: tuple[StepSample, ...] = ()


class Refused(Message, frozen=True):
    """*Wire.* From the scheduler or a queue: these sequences ended before their first step.

    `kind` names the class of `personae.errors` that the client raises, `param` the field that is wrong.
    """

    ids: tuple[str, ...]
    kind: str
    message: str
    param: str | None = None
    code: str | None = None


class KVEvents(Message, frozen=True):
    """*Wire.* From the scheduler, where it was asked for: what entered and left the prefix cache."""

    events: tuple[KVEvent, ...]


class EngineDied(Message, frozen=True):
    """From whoever saw the engine core die: the sequences that were aboard, and whether it was killed from
    outside. None: its machine does not answer, so it is not known better than the frontend knows."""

    on_device: tuple[str, ...] | None
    outside: bool


class Replay(Message, frozen=True):
    """From the ingress, when the engine core has started anew: answer with `Resubmit`."""

    epoch: int
    stats: SchedulerStats


class AdapterStats(Message, frozen=True):
    """*Wire.* From the adapter store, when they have changed: adapters on the device and the host, those in
    line for the device; loads and their seconds by source ("device", "host", "disk": where they were)."""

    device: int = 0
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
    """*Wire.* From a queue: have this adapter on the device; answered by `Pinned` once it is."""

    adapter: str
    epoch: int


class Unpin(Message, frozen=True):
    """*Wire.* From a queue: no request of this adapter is left."""

    adapter: str
    epoch: int


class AdapterLoaded(Message, frozen=True):
    """From the executor: whether the adapter got its place; `error` says why it never can, `kind` is as in
    `Pinned`.

    Of the pool as it is now: adapters in it, how many were copied to it, how many left for others.
    """

    adapter: str
    placed: bool
    error: str | None = None
    residents: int = 0
    loads: int = 0
    evictions: int = 0
    kind: str = "RequestFailed"


class AdaptersEvicted(Message, frozen=True):
    """From the executor: adapters left for sequences that wanted their memory. The pool's figures as in
    `AdapterLoaded`."""

    residents: int
    loads: int
    evictions: int


class MemoryWanted(Message, frozen=True):
    """From the executor: sequences want memory that adapters have, and all of these are held; answered by a
    `Release` as soon as one can be let go."""


# --- Engine core: scheduler
# ----------------------------------------------------------------------------------------


class Submit(Message, frozen=True):
    """*Wire.* From a queue: these sequences wait for their turn from now on."""

    logs: tuple[SequenceLog, ...]
    epoch: int


class Cancel(Message, frozen=True):
    """*Wire.* From a queue: end these sequences; the last delta of each says `cancelled`."""

    ids: tuple[str, ...]
    epoch: int


class Preempt(Message, frozen=True):
    """*Wire.* From a queue: let go of these sequences; the last delta of each says `recalled`."""

    ids: tuple[str, ...]
    epoch: int


class Compiled(Message, frozen=True):
    """From the compiler: the grammar, or why there is none."""

    spec: GrammarSpec
    tenant: str
    grammar: AnyGrammar | None = None
    error: PersonaeError | None = None


class Borrow(Message, frozen=True):
    """From the executor: the memory of so many KV pages would do an adapter good; answered by `Lend`."""

    count: int


class Repaid(Message, frozen=True):
    """From the executor: KV pages whose memory adapters no longer have."""

    pages: tuple[int, ...]


class Resumed(Message, frozen=True):
    """From the executor: the masks for which these sequences sat a step out are there."""

    ids: tuple[str, ...]


class Look(Message, frozen=True):
    """From the executor to itself: see whether such masks are there."""


class StepFinished(Message, frozen=True):
    """From the executor: what a step brought, how long it took, and how long the device waited since.

    `timings` is of all steps so far.
    """

    result: StepResult
    seconds: float
    gap_seconds: float
    timings: StepTimings = StepTimings()


# --- Engine core: compiler
# -----------------------------------------------------------------------------------------


class Compile(Message, frozen=True):
    """From the scheduler: compile this for a tenant, answer with `Compiled`."""

    spec: GrammarSpec
    tenant: str = "default"


# --- Engine core: executor
# -----------------------------------------------------------------------------------------


class Execute(Message, frozen=True):
    """From the scheduler: run this step. `grammars` has those of the plan's admissions.

    `follows`: there was work just before, so the time since then is the host's doing (the gap that we
    measure).
    """

    plan: StepPlan
    grammars: dict[GrammarKey, AnyGrammar]
    follows: bool


class LoadAdapter(Message, frozen=True):
    """From the adapter store: copy this adapter from where it lies to the device and hold it; answered by
    `AdapterLoaded`."""

    adapter: str
    source: AdapterSource


class AdapterLoadFailed(Message, frozen=True):
    """From a thread that reads beside the steps: what it read into this adapter's pages is not the adapter,
    for this reason."""

    adapter: str
    error: str


class Lend(Message, frozen=True):
    """From the scheduler, in answer to a `Borrow`: adapters may have the memory of these KV pages, if any,
    after the steps that were sent before."""

    pages: tuple[int, ...]


class Repay(Message, frozen=True):
    """From the scheduler: so many of the pages that were lent are wanted back, as soon as adapters that
    nobody holds can leave; answered by `Repaid`, in as many parts as it takes."""

    count: int


class Release(Message, frozen=True):
    """From the adapter store: these adapters may be evicted, the first of them first."""

    adapters: tuple[str, ...]
