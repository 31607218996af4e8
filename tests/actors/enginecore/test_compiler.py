"""Compiles that fail, and compiles whose requests were withdrawn."""

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest
from patience import PATIENCE, soon
from recorders import RecordingRef
from virtual_clock import real_clock

from personae.actors.enginecore.compile_turns import MOST_LONG, QUICK_SECONDS
from personae.actors.enginecore.compiler import Compiler
from personae.actors.enginecore.scheduler import SchedulerActor
from personae.actors.kit.mailbox import Ref
from personae.actors.kit.supervisor import Supervisor
from personae.actors.messages import Cancel, Compile, Compiled, EngineCoreStarted, Message, Refused, Submit
from personae.engine.params import SamplingParams
from personae.engine.plan import MemoryLayout
from personae.engine.scheduling.fairness import VirtualTokenCounters
from personae.engine.scheduling.scheduler import Scheduler
from personae.engine.sequence import SequenceLog
from personae.errors import GrammarError, Overloaded, RequestFailed
from personae.grammar.spec import GrammarSpec

pytestmark = real_clock
SPEC = GrammarSpec("regex", "a+")
AT_ONCE = MOST_LONG  # compiles of a tenant that take long


class Panic(BaseException):
    """An exception like those that Rust libraries raise."""


class Grammars:
    """A compiler that does what its test wants."""

    def __init__(self, outcome: BaseException | None = None) -> None:
        self.outcome = outcome
        self.going = self.most = 0
        self.go_on = threading.Event()
        self.lock = threading.Lock()

    def get(self, spec: GrammarSpec, tenant: str) -> None:
        return None

    def put(self, spec: GrammarSpec, grammar: object, tenant: str) -> None:
        pass

    def compile(self, spec: GrammarSpec, tenant: str) -> object:
        if self.outcome is not None:
            raise self.outcome
        with self.lock:
            self.going += 1
            self.most = max(self.most, self.going)
        self.go_on.wait(PATIENCE)
        with self.lock:
            self.going -= 1
        return object()


class Arrivals(RecordingRef):
    """A ref that can wait for a number of messages."""

    async def wait_for(self, count: int) -> None:
        await soon(lambda: len(self) >= count, f"{count} messages have come")


@asynccontextmanager
async def compiling(grammars: Grammars, **options: float) -> AsyncIterator[tuple[Ref[Message], Arrivals]]:
    scheduler = Arrivals()
    top = Supervisor("top", max_restarts=0)
    compiler: Ref[Message] = top.spawn("compiler", lambda: Compiler(grammars, scheduler, **options))
    async with top:
        yield compiler, scheduler


@pytest.mark.parametrize("outcome", [RuntimeError("a bug of theirs"), Panic("index out of bounds")])
async def test_a_library_that_fails_ends_its_request_and_the_compiler_continues(outcome) -> None:
    grammars = Grammars(outcome)
    async with compiling(grammars) as (compiler, scheduler):
        compiler.tell(Compile(SPEC))
        await scheduler.wait_for(1)
        assert isinstance(scheduler[0].error, RequestFailed)
        grammars.outcome = None
        grammars.go_on.set()
        compiler.tell(Compile(SPEC))
        await scheduler.wait_for(2)
        assert scheduler[1].grammar is not None


async def test_the_number_of_concurrent_compiles_is_limited() -> None:
    grammars = Grammars()
    async with compiling(grammars) as (compiler, scheduler):
        for number in range(3 * AT_ONCE):
            compiler.tell(Compile(GrammarSpec("regex", f"a{{{number}}}")))
        await soon(lambda: grammars.going >= AT_ONCE, "as many as may compile")
        grammars.go_on.set()
        await scheduler.wait_for(3 * AT_ONCE)
    assert grammars.most == AT_ONCE


async def test_a_compile_that_takes_too_long_is_a_typed_error_and_its_result_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    up = anyio.Event()

    async def sleep(seconds: float) -> None:
        if seconds > QUICK_SECONDS:
            await up.wait()

    monkeypatch.setattr("personae.actors.enginecore.compiler.sleep", sleep)
    grammars = Grammars()
    kept: list[GrammarSpec] = []
    grammars.put = lambda spec, grammar, tenant: kept.append(spec)
    async with compiling(grammars) as (compiler, scheduler):
        specs = [GrammarSpec("regex", f"a{{{number}}}") for number in range(AT_ONCE + 1)]
        for spec in specs:
            compiler.tell(Compile(spec))
        await soon(lambda: grammars.going == AT_ONCE, "as many as may compile")
        up.set()
        await scheduler.wait_for(AT_ONCE + 1)
        kinds = {answer.spec: type(answer.error) for answer in scheduler}
        waiting = [spec for spec in specs if kinds[spec] is Overloaded]
        assert len(waiting) == 1, "the one that found no thread is not to blame"
        assert [kinds[spec] for spec in specs if spec not in waiting] == [GrammarError] * AT_ONCE
        begun = next(spec for spec in specs if spec not in waiting)
        compiler.tell(Compile(begun))
        await scheduler.wait_for(AT_ONCE + 2)
        assert (scheduler[-1].spec, scheduler[-1].error.code) == (begun, "grammar_timeout")
        grammars.go_on.set()
        await soon(lambda: len(kept) == AT_ONCE, "what they bring is kept")
        assert len(scheduler) == AT_ONCE + 2, "each is answered once"


async def test_a_grammar_asked_for_and_withdrawn_again_and_again_is_compiled_once() -> None:
    layout = MemoryLayout(num_pages=8, page_size=16, max_seqs=2, max_model_len=64, max_batch_tokens=16)
    compiler, executor, streamer, ingress = RecordingRef(), RecordingRef(), Arrivals(), RecordingRef()
    top = Supervisor("top", max_restarts=0)
    scheduler: Ref[Message] = top.spawn(
        "scheduler",
        lambda: SchedulerActor(
            Scheduler(layout, VirtualTokenCounters()), 1, compiler, executor, streamer, ingress
        ),
    )
    async with top:
        for number in range(5):
            log = SequenceLog(f"{number}", (1,), 1, SamplingParams(max_tokens=2, seed=0), grammar=SPEC)
            scheduler.tell(Submit((log,), 1))
            scheduler.tell(Cancel((log.id,), 1))
        scheduler.tell(Submit((SequenceLog("last", (1,), 1, log.params, grammar=SPEC),), 1))
        scheduler.tell(Compiled(SPEC, "default", error=RequestFailed("no")))
        await streamer.wait_for(2)
        [begun] = ingress
        assert isinstance(begun, EngineCoreStarted)
    assert compiler == [Compile(SPEC, "default")]
    refused = [message for message in streamer if isinstance(message, Refused)]
    assert [message.ids for message in refused] == [("last",)]


async def test_a_tenants_compiles_wait_only_for_its_own_and_a_full_sandbox_is_not_blamed_on_the_grammar() -> (
    None
):
    grammars = Grammars()
    async with compiling(grammars) as (compiler, scheduler):
        for number in range(2 * AT_ONCE):
            compiler.tell(Compile(GrammarSpec("regex", f"a{{{number}}}"), "greedy"))
        compiler.tell(Compile(SPEC, "modest"))
        await soon(lambda: grammars.going > AT_ONCE, "another tenant's grammar compiles at the same time")
        grammars.go_on.set()
        await scheduler.wait_for(2 * AT_ONCE + 1)
        assert grammars.most == AT_ONCE + 1
        grammars.outcome = Overloaded("no time")
        compiler.tell(Compile(GrammarSpec("regex", "b")))
        await scheduler.wait_for(2 * AT_ONCE + 2)
        assert isinstance(scheduler[-1].error, Overloaded)


async def test_a_grammar_that_another_tenant_has_had_compiled_is_compiled_again() -> None:
    """Otherwise the time of an answer would reveal what another tenant has sent."""
    layout = MemoryLayout(num_pages=8, page_size=16, max_seqs=2, max_model_len=64, max_batch_tokens=16)
    compiler, executor, streamer, ingress = RecordingRef(), RecordingRef(), Arrivals(), RecordingRef()
    top = Supervisor("top", max_restarts=0)
    scheduler: Ref[Message] = top.spawn(
        "scheduler",
        lambda: SchedulerActor(
            Scheduler(layout, VirtualTokenCounters()), 1, compiler, executor, streamer, ingress
        ),
    )
    async with top:
        params = SamplingParams(max_tokens=2, seed=0)
        for id, tenant in (("0", "a"), ("1", "b"), ("2", "a")):
            log = SequenceLog(id, (1,), 1, params, grammar=SPEC, tenant=tenant)
            scheduler.tell(Submit((log,), 1))
        scheduler.tell(Compiled(SPEC, "a", error=RequestFailed("no")))
        await streamer.wait_for(1)
    assert compiler == [Compile(SPEC, "a"), Compile(SPEC, "b")]
    refused = [message for message in streamer if isinstance(message, Refused)]
    assert [message.ids for message in refused] == [("0", "2")]
