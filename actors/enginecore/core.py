"""The engine core: the four actors that form one engine, and the process that runs them in production.

    python -m personae.actors.enginecore FD
    python -m personae.actors.enginecore dial FD

The frontend starts this process (`actors/frontend/engine_process.py`) with one end of the connection as an
open file. On another machine an agent starts it (`actors/cluster/agent.py`), with a file that says whom to
call. It loads what `Start` names, reports its progress, and runs plans until the connection closes. It holds
nothing that the frontend does not have, so it has nothing to save: after any error it writes it to stderr and
ends at once. If `Start` has a `Keep`, it stays for a while after its frontend was killed, and serves the next
one (`actors/keeping.py`).
"""

import ctypes
import faulthandler
import gc
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any, Never

import anyio
from anyio.abc import ByteStream

from personae.actors.assembly import Assembly, assemble, loads_ahead
from personae.actors.enginecore.adapter_store import AdapterStore
from personae.actors.enginecore.compiler import Compiler
from personae.actors.enginecore.executor import Executor
from personae.actors.enginecore.kept import KeptCore, redirect_output
from personae.actors.enginecore.page_server import (
    PageListener,
    listen_at_host,
    listen_at_path,
    serve_pages,
)
from personae.actors.enginecore.scheduler import SchedulerActor
from personae.actors.enginecore.step_recorder import StepRecorder
from personae.actors.framing import frame, receive_first
from personae.actors.kit import gauges
from personae.actors.kit.child import Incident
from personae.actors.kit.event_loop import loop_options
from personae.actors.kit.gc_tuning import spare_what_is_here
from personae.actors.kit.mailbox import Ref
from personae.actors.kit.supervisor import Supervisor
from personae.actors.kit.switch_interval import shorten_switch_interval
from personae.actors.line import Line
from personae.actors.messages import Cancel, KeepLoaded, KeepSession, Message, Pin, Preempt, Submit, Unpin
from personae.actors.spec import EngineSpec
from personae.actors.wire import (
    Describe,
    Facts,
    Loaded,
    LoadFailed,
    Loading,
    Port,
    Pulse,
    StandBy,
    Start,
    ToCore,
    messages,
)
from personae.errors import LoadError
from personae.kernels.malloc import give_back_freed

if TYPE_CHECKING:
    from personae.actors.cluster.adapter_cache import AdapterCache

PULSE_SECONDS = 0.5
PROGRESS_SECONDS = 0.05
LOAD_FAILED = 2  # exit codes
CRASHED = 1
WEDGED_SECONDS = 300.0  # after which the kernel ends a process without a frontend whose loop stands still

EXECUTOR = "core/executor"  # the path of the actor, and the name of its thread

_FOR_THE_FRONTEND = (signal.SIGINT, signal.SIGTERM)
_PR_SET_PDEATHSIG = 1

log = logging.getLogger("personae.engine")


def spawn_core(
    core: Supervisor,
    engine_spec: EngineSpec,
    begin_epoch: Callable[[], int],
    streamer: Ref[Message],
    ingress: Ref[Message],
    queue_of: Callable[[str | None], Ref[Message]],
    recorder: StepRecorder,
) -> tuple[Ref[Message], Ref[Message]]:
    """Add the engine core's actors to a supervisor. Returns its store and its scheduler.

    `begin_epoch` is called on the executor's thread, once at the beginning of each epoch, and returns its
    number. The executor notes its steps in `recorder`.
    """
    epoch = 0
    bound = 4 * engine_spec.max_live  # a submit, cancel, progress and refusal of each live sequence

    def open_executor() -> Executor[Any, Any, Any]:  # it starts first; the others belong to the same epoch
        nonlocal epoch
        epoch = begin_epoch()
        at_once = engine_spec.steps_at_once
        return Executor(engine_spec.build_step_engine, scheduler, store, recorder, at_once)

    executor: Ref[Message] = core.spawn_thread("executor", open_executor, capacity=bound, stop_timeout=30.0)
    store: Ref[Message] = core.spawn(
        "store",
        lambda: AdapterStore(engine_spec.library, epoch, executor, queue_of, streamer),
        capacity=bound,
    )
    compiler: Ref[Message] = core.spawn(
        "compiler", lambda: Compiler(engine_spec.build_compiler(), scheduler), capacity=bound
    )
    scheduler: Ref[Message] = core.spawn(
        "scheduler",
        lambda: SchedulerActor(
            engine_spec.build_scheduler(),
            epoch,
            compiler,
            executor,
            streamer,
            ingress,
            late=engine_spec.late,
            steps_at_once=engine_spec.steps_at_once,
            tier=engine_spec.tier,
            kv_events=None if engine_spec.build_kv_events is None else engine_spec.build_kv_events(),
        ),
        capacity=bound,
    )
    return store, scheduler


def facts_of(assembly: Assembly, page_address: str | None = None) -> Facts:
    """The facts of the loaded model, for the frontend. Other engines ask for pages at `page_address`."""
    engine_spec = assembly.engine_spec
    return Facts(
        models=dict(engine_spec.models),
        max_model_len=engine_spec.layout.max_model_len,
        vocab_size=engine_spec.vocab_size,
        defaults=assembly.defaults,
        max_adapters=assembly.max_adapters,
        bounds=assembly.bounds,
        about=assembly.about,
        max_seqs=engine_spec.layout.max_seqs,
        max_batch_tokens=engine_spec.layout.max_batch_tokens,
        numerics=assembly.numerics,
        page_address=page_address,
    )


def main() -> Never:
    """Run the process. Its exit code is LOAD_FAILED, CRASHED, or 0 when the frontend has gone."""
    _die_with_frontend()
    faulthandler.register(signal.SIGUSR1)  # dumps every thread's stack, even if the loop hangs
    # these are for the frontend, which ends this process when it has drained
    for number in _FOR_THE_FRONTEND:
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s")
    code = 0
    line, adapters = None, None
    try:
        line, adapters = _connect()
        start, assembly = _load(line, adapters)
        give_back_freed()  # adapters as they were in their files
        recorder = StepRecorder.attach(start.recorder_file)
        shorten_switch_interval()
        kept = None if start.keep is None else KeptCore.open(start.keep)
        if kept is None:
            _run(line, start, assembly, recorder)
        else:
            _outlive(line, start, assembly, recorder, kept)
            _close_tier(assembly)
    except LoadError as error:
        if line is None:
            log.error("%s", error.message)  # for the agent that runs this process
            _end(LOAD_FAILED)
        line.sendall(frame(LoadFailed(type(error).__name__, error.message)))
        code = LOAD_FAILED
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the frontend has gone
    except BaseException:
        log.exception("the engine core crashed")
        code = CRASHED
    _end(code)


def _connect() -> "tuple[Line, AdapterCache | None]":
    """Return the connection to the frontend, and on another machine the cache of adapters that came from
    there."""
    file = int(sys.argv[-1])
    if sys.argv[-2] != "dial":
        connection = socket.socket(fileno=file)
        connection.set_inheritable(False)  # else a child process would keep the connection open
        return Line(connection), None
    from personae.actors.cluster.adapter_cache import AdapterCache
    from personae.actors.cluster.dial import dial, read_call

    call = read_call(file)
    line = dial(call, call.contact.line)
    return line, AdapterCache(call.contact, dial(call, call.contact.files))


def _load(line: Line, adapters: "AdapterCache | None") -> tuple[Start, Assembly]:
    """Wait for what to load, and load it. A spare process loads while another engine core serves."""
    first: StandBy | Start = receive_first(line, StandBy | Start)
    if isinstance(first, Start):
        start = first
    else:
        started: list[Start] = []
        try:
            if loads_ahead(first.options):
                assembly = assemble(
                    first.options, warm=True, wait=lambda: started.append(receive_first(line, Start))
                )
                return started[0], assembly
        except LoadError as error:
            if started:
                raise
            log.warning("the spare process loads only when it is needed: %s", error.message)
        start = receive_first(line, Start)
    options = start.options if adapters is None else adapters.provide(start.options)
    return start, assemble(options, _Progress(line), warm=True, fetcher=adapters)


def _run(
    line: Line, start: Start, assembly: Assembly, recorder: StepRecorder, kept: KeptCore | None = None
) -> None:
    """Run the engine until the connection closes."""
    pages = _page_listener(line, start)
    line.sendall(frame(Loaded(facts_of(assembly, None if pages is None else pages.address))))
    spare_what_is_here()

    def end(code: int, why: BaseException | None) -> None:
        if not code and kept is None:
            _close_tier(assembly)
        if code or kept is None:
            _end(code)

    def alive() -> None:
        if kept is not None:
            signal.setitimer(signal.ITIMER_REAL, WEDGED_SECONDS)

    async def run() -> None:
        await serve(
            await line.stream(),
            assembly.engine_spec,
            start.epoch,
            recorder,
            end,
            on_pulse=alive,
            pages=pages,
        )

    anyio.run(run, backend_options=loop_options())


def _page_listener(line: Line, start: Start) -> PageListener | None:
    """Where other engines ask for pages; None: nowhere."""
    if start.options.page_socket is not None:
        return listen_at_path(start.options.page_socket)
    if (identity := start.options.page_identity) is not None:
        from personae.engine.machine_sockets import server_context, trust

        tls = server_context(identity)
        trust(tls, identity.certificate)
        return listen_at_host(line.own_host, tls)
    return None


def _close_tier(assembly: Assembly) -> None:
    """Write the pages that wait to be written."""
    if (tier := assembly.engine_spec.tier) is not None:
        tier.close()


def _outlive(line: Line, start: Start, assembly: Assembly, recorder: StepRecorder, kept: KeptCore) -> None:
    """Run the engine for one frontend after the other, until none comes in time."""
    asked: list[int] = []  # signals to end: the frontend ends this process, but no other shall take it over
    _set_death_signal(0)
    try:
        while True:
            for number in _FOR_THE_FRONTEND:
                signal.signal(number, lambda number, at: asked.append(number))
            with suppress(BrokenPipeError, ConnectionResetError):  # the frontend has gone
                _run(line, start, assembly, recorder, kept)
            signal.setitimer(signal.ITIMER_REAL, kept.keep.seconds + WEDGED_SECONDS)
            line.close()
            redirect_output(os.open(os.devnull, os.O_WRONLY))
            if any(thread.name == EXECUTOR for thread in threading.enumerate()):
                return  # a step that does not end, and has the device
            gc.collect()
            while True:
                for number in _FOR_THE_FRONTEND:
                    signal.signal(number, signal.SIG_DFL)
                if asked or (found := kept.wait()) is None:
                    return
                line, recorder = found.line, found.recorder
                with suppress(EOFError, ConnectionResetError):  # this one has gone as well
                    start = receive_first(line, Start)
                    kept.keep = start.keep or kept.keep
                    break
    finally:
        kept.close()


async def serve(
    stream: ByteStream,
    engine_spec: EngineSpec,
    epoch: int,
    recorder: StepRecorder,
    end: Callable[[int, BaseException | None], object],
    on_started: Callable[[Supervisor], object] = lambda core: None,
    on_pulse: Callable[[], object] = lambda: None,
    pages: PageListener | None = None,
) -> None:
    """Run the engine until the connection closes or an actor crashes. Then `end` is called with the exit
    code, and with the error if there was one. If it returns, the actors are stopped. `on_started` is called
    with the supervisor when the actors run, `on_pulse` with each pulse. Other engines ask for pages at
    `pages`."""

    def report(incident: Incident) -> None:
        """End the process: an engine without one of its actors is useless, and its device may be unusable."""
        if incident.error is not None:
            log.error("%s %s", incident.path, incident.what, exc_info=incident.error)
            end(CRASHED, incident.error)

    frontend = Port("frontend")
    frontend.is_open = True
    core = Supervisor("core", strategy="one_for_all", max_restarts=0, report=report)
    store, scheduler = spawn_core(
        core, engine_spec, lambda: epoch, frontend, frontend, lambda adapter: frontend, recorder
    )
    async with core, anyio.create_task_group() as tasks, aclosing(messages(stream, ToCore)) as arriving:
        tasks.start_soon(frontend.write, stream)
        tasks.start_soon(_pulse, core, frontend, on_pulse)
        if pages is not None and engine_spec.page_source is not None:
            tasks.start_soon(serve_pages, pages, engine_spec.page_source, scheduler)
        on_started(core)
        async for message in arriving:
            match message:
                case Submit() | Cancel() | Preempt() | KeepSession():
                    scheduler.tell(message)
                case Pin() | Unpin() | KeepLoaded():
                    store.tell(message)
                case Describe():
                    log.warning("the engine core's actors:\n%s", gauges.dump(gauges.read(core)))
                    faulthandler.dump_traceback()
        end(0, None)  # the frontend has gone
        tasks.cancel_scope.cancel()


async def _pulse(core: Supervisor, frontend: Port, on_pulse: Callable[[], object]) -> None:
    while True:
        on_pulse()
        actors = tuple(gauges.read(core))
        executor = next(gauge for gauge in actors if gauge.path == EXECUTOR)
        frontend.tell(Pulse(executor.state == "busy", executor.handled, actors))
        await anyio.sleep(PULSE_SECONDS)


class _Progress:
    """Reports progress to the frontend: each phase at once, bytes at most every `PROGRESS_SECONDS`."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._reported = 0.0

    def __call__(self, phase: str, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._reported > PROGRESS_SECONDS or done == total:
            self._reported = now
            self._line.sendall(frame(Loading(phase, done, total)))


def _die_with_frontend() -> None:
    """Have Linux kill this process when its parent ends, even while it does not read the connection."""
    if sys.platform == "linux":
        parent = os.getppid()
        _set_death_signal(signal.SIGKILL)
        if os.getppid() != parent:  # it ended before the call
            _end(0)


def _set_death_signal(number: int) -> None:
    """Have Linux send this process a signal when its parent ends; 0 is none."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def _end(code: int, why: BaseException | None = None) -> Never:
    """End the process now. A thread in the middle of a step or of a compile is not waited for."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
