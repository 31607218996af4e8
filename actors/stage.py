"""The stage: which actors there are, who supervises whom, and the client that stands before them.

personae               one_for_one, gives up at once: what Front lost could not be resumed
├── back               one_for_all: its four are one engine and start anew together, caches empty
│   ├── executor       owns the device, on its own thread
│   ├── store          which adapters are on the device
│   ├── compiler
│   └── scheduler      last: when it says `BackStarted`, the others are there
└── front              one_for_one, gives up at once: it holds the logs
    ├── streamer
    ├── ingress
    └── queue/...      one per adapter, made on first use
"""

from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from personae.actors.adapter_queue import AdapterQueue
from personae.actors.adapter_store import AdapterStore
from personae.actors.client import EngineStats, ModelCard
from personae.actors.compiler import Compiler
from personae.actors.executor import Executor
from personae.actors.inbox import Inbox
from personae.actors.ingress import Ingress
from personae.actors.kit.child import Report, log_incident
from personae.actors.kit.mailbox import ActorStopped, Ref
from personae.actors.kit.supervisor import Supervisor
from personae.actors.messages import Message, Submission, Withdraw
from personae.actors.scheduler import SchedulerActor
from personae.actors.streamer import Latest, Streamer
from personae.engine.plan import MemoryLayout
from personae.engine.scheduler import Scheduler
from personae.engine.sequence import Delta, SequenceLog
from personae.engine.step import StepEngine
from personae.engine.tokens import Tokenizer
from personae.grammar.compiler import GrammarCompiler
from personae.lora.library import AdapterLibrary


@dataclass(frozen=True, slots=True)
class Script:
    """What a company needs to play: the engine's parts, made anew for every life of Back, and the fixed
    facts.

    `models` maps the names of the base and the adapters that are there from the start to their cards;
    `library` has every adapter by its digest.
    `salt` gives a tenant's prefix-cache salt. `max_live` bounds the sequences in the house.
    """

    build_step_engine: Callable[[], StepEngine]
    build_scheduler: Callable[[], Scheduler]
    build_compiler: Callable[[], GrammarCompiler]
    layout: MemoryLayout
    vocab_size: int
    tokenizer: Tokenizer
    models: Mapping[str, ModelCard]
    library: AdapterLibrary
    salt: Callable[[str], bytes]
    max_live: int = 4096
    window: int = 64


class LocalClient:
    """`EngineClient` over a stage in this process."""

    def __init__(self, script: Script, ingress: Ref[Message], latest: Latest, root: Supervisor) -> None:
        self._script = script
        self._ingress = ingress
        self._latest = latest
        self._root = root

    @property
    def tokenizer(self) -> Tokenizer:
        """The base model's tokenizer."""
        return self._script.tokenizer

    @property
    def max_model_len(self) -> int:
        """The most tokens a sequence may have, prompt and answer together."""
        return self._script.layout.max_model_len

    @property
    def vocab_size(self) -> int:
        """Rows of the model's logits."""
        return self._script.vocab_size

    def models(self, tenant: str) -> Mapping[str, ModelCard]:
        """The names that this tenant may use, the base first."""
        return self._script.models

    def salt(self, tenant: str) -> bytes:
        """The prefix-cache salt of this tenant."""
        return self._script.salt(tenant)

    @asynccontextmanager
    async def stream(self, logs: Sequence[SequenceLog]) -> AsyncIterator["LocalStream"]:
        """Submit the sequences; leaving the context withdraws those that have not ended."""
        inbox = Inbox()
        stream = LocalStream(inbox, {log.id for log in logs}, self._ingress)
        try:  # the asking too: one that is cancelled may have been admitted
            await self._ingress.ask(lambda reply: Submission(tuple(logs), inbox, reply))
            yield stream
        finally:
            stream.withdraw()

    def stats(self) -> EngineStats:
        """What the engine is doing now."""
        load = self._latest.load
        return EngineStats(
            ready=self._root.state == "running",
            running=load.running,
            waiting=load.waiting,
            pages_total=load.pages_total,
            pages_used=load.pages_used,
            prefix_queries=load.prefix_queries,
            prefix_hits=load.prefix_hits,
            preemptions=load.preemptions,
            steps=load.steps,
            step_seconds=load.step_seconds,
            host_gap_seconds=load.gap_seconds,
        )


class LocalStream:
    """The deltas of one submission. An iterator and no generator: breaking out of the loop leaves nothing
    open."""

    def __init__(self, inbox: Inbox, live: set[str], ingress: Ref[Message]) -> None:
        self._inbox = inbox
        self._live = live
        self._ingress = ingress
        self._arrived: deque[Delta] = deque()

    def __aiter__(self) -> "LocalStream":
        return self

    async def __anext__(self) -> Delta:
        """The next delta of a sequence that is still wanted; ends when every sequence has ended."""
        while self._live:
            if not self._arrived:
                self._arrived.extend(await self._inbox.get())
            delta = self._arrived.popleft()
            if delta.id in self._live:
                if delta.finish is not None:
                    self._live.discard(delta.id)
                return delta
        raise StopAsyncIteration

    def stop(self, id: str) -> None:
        """End one sequence now; nothing more of it is delivered."""
        if id in self._live:
            self._live.discard(id)
            self._tell(Withdraw((id,)))

    def withdraw(self) -> None:
        """End all that still run."""
        if self._live:
            self._tell(Withdraw(tuple(self._live)))
            self._live.clear()

    def _tell(self, withdraw: Withdraw) -> None:
        with suppress(ActorStopped):  # the house is closed: everything in it has ended
            self._ingress.tell(withdraw)


@asynccontextmanager
async def open_stage(script: Script, report: Report = log_incident) -> AsyncIterator[LocalClient]:
    """Raise the curtain: start every actor, yield the client, stop everything in order.

    Raises what the first start of an actor raised (StartFailed), later RestartsExhausted when Back cannot
    be kept.
    """
    root = Supervisor("personae", max_restarts=0, report=report)
    back = root.supervisor("back", strategy="one_for_all", max_restarts=5, within=60.0)
    front = root.supervisor("front", max_restarts=0)
    latest = Latest()
    bound = 4 * script.max_live  # submit, cancel, progress and refusal of every live sequence find room
    queues: dict[str | None, Ref[Message]] = {}
    lives = 0

    def open_executor() -> Executor:
        nonlocal lives
        lives += 1  # the executor is the first of Back to start: those after it are of the same life
        return Executor(script.build_step_engine, scheduler, store)

    def queue_of(adapter: str | None) -> Ref[Message]:
        if adapter not in queues:
            name = f"queue/{adapter or 'base'}"
            queues[adapter] = front.spawn(
                name,
                lambda: AdapterQueue(adapter, store, scheduler, streamer, script.window),
                capacity=bound,
            )
        return queues[adapter]

    executor: Ref[Message] = back.spawn_thread(
        "executor",
        open_executor,
        capacity=bound,
        stop_timeout=30.0,
    )
    store: Ref[Message] = back.spawn(
        "store", lambda: AdapterStore(script.library, lives, executor, queue_of), capacity=bound
    )
    compiler: Ref[Message] = back.spawn(
        "compiler", lambda: Compiler(script.build_compiler(), scheduler), capacity=bound
    )
    scheduler: Ref[Message] = back.spawn(
        "scheduler",
        lambda: SchedulerActor(script.build_scheduler(), lives, compiler, executor, streamer, ingress),
        capacity=bound,
    )
    streamer: Ref[Message] = front.spawn("streamer", lambda: Streamer(ingress, latest), capacity=bound)
    ingress: Ref[Message] = front.spawn(
        "ingress", lambda: Ingress(streamer, queue_of, script.max_live), capacity=bound
    )
    async with root:
        yield LocalClient(script, ingress, latest, root)
