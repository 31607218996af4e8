"""Back: the four actors that are one engine, and the process that they live in when serving.

    python -m personae.actors.back FD

is started by Front (`actors/host.py`) with one end of the line as an open file. It loads what `Start` names,
tells how far it is, and runs plans until the line ends. It holds nothing that Front does not have, so it has
nothing to save: whatever goes wrong, it says so on stderr and ends at once.
"""

import ctypes
import faulthandler
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import aclosing
from typing import Never

import anyio
from anyio.abc import ByteStream, SocketStream

from personae.actors.adapter_store import AdapterStore
from personae.actors.assembly import Assembly, assemble
from personae.actors.blackbox import BlackBox
from personae.actors.compiler import Compiler
from personae.actors.executor import Executor
from personae.actors.kit import gauges
from personae.actors.kit.child import Incident
from personae.actors.kit.collector import spare_what_is_here
from personae.actors.kit.mailbox import Ref
from personae.actors.kit.supervisor import Supervisor
from personae.actors.kit.turns import take_short_turns
from personae.actors.messages import Cancel, Message, Pin, Recall, Submit, Unpin
from personae.actors.scheduler import SchedulerActor
from personae.actors.script import Script
from personae.actors.wire import (
    Describe,
    Facts,
    Loaded,
    LoadFailed,
    Loading,
    Port,
    Pulse,
    Start,
    ToBack,
    frame,
    messages,
    receive_first,
)
from personae.errors import LoadError

PULSE_SECONDS = 0.5
PROGRESS_SECONDS = 0.05
LOAD_FAILED = 2  # exit codes
CRASHED = 1

_PR_SET_PDEATHSIG = 1

log = logging.getLogger("personae.back")


def spawn_back(
    back: Supervisor,
    script: Script,
    begin_life: Callable[[], int],
    streamer: Ref[Message],
    ingress: Ref[Message],
    queue_of: Callable[[str | None], Ref[Message]],
    box: BlackBox,
) -> tuple[Ref[Message], Ref[Message]]:
    """Add Back's actors to a supervisor; returns its store and its scheduler.

    `begin_life` is called on the executor's thread, once at the beginning of each life, and numbers it. The
    executor notes its steps in `box`.
    """
    life = 0
    bound = 4 * script.max_live  # submit, cancel, progress and refusal of every live sequence find room

    def open_executor() -> Executor:  # the first to start: those after it are of the same life
        nonlocal life
        life = begin_life()
        return Executor(script.build_step_engine, scheduler, store, box)

    executor: Ref[Message] = back.spawn_thread("executor", open_executor, capacity=bound, stop_timeout=30.0)
    store: Ref[Message] = back.spawn(
        "store", lambda: AdapterStore(script.library, life, executor, queue_of, streamer), capacity=bound
    )
    compiler: Ref[Message] = back.spawn(
        "compiler", lambda: Compiler(script.build_compiler(), scheduler), capacity=bound
    )
    scheduler: Ref[Message] = back.spawn(
        "scheduler",
        lambda: SchedulerActor(
            script.build_scheduler(), life, compiler, executor, streamer, ingress, late=script.late
        ),
        capacity=bound,
    )
    return store, scheduler


def facts_of(assembly: Assembly) -> Facts:
    """What Front is told of what was loaded."""
    script = assembly.script
    return Facts(
        models=dict(script.models),
        max_model_len=script.layout.max_model_len,
        vocab_size=script.vocab_size,
        defaults=assembly.defaults,
        max_adapters=assembly.max_adapters,
        bounds=assembly.bounds,
        about=assembly.about,
    )


def main() -> Never:
    """The process. Its exit code is LOAD_FAILED, CRASHED, or 0 when Front has gone."""
    line = socket.socket(fileno=int(sys.argv[-1]))
    line.set_inheritable(False)  # or a helper process of ours would keep the line open
    _die_with_front()
    faulthandler.register(signal.SIGUSR1)  # where every thread is, even if the loop does not turn
    for number in (signal.SIGINT, signal.SIGTERM):  # meant for Front, which ends us when it has drained
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s")
    code = 0
    try:
        start = receive_first(line, Start)
        assembly = assemble(start.options, _Progress(line), warm=True)
        line.sendall(frame(Loaded(facts_of(assembly))))
        box = BlackBox.attach(start.black_box)
        spare_what_is_here()
        take_short_turns()
        anyio.run(_serve, line, assembly.script, start.life, box, backend_options={"use_uvloop": True})
    except LoadError as error:
        line.sendall(frame(LoadFailed(type(error).__name__, error.message)))
        code = LOAD_FAILED
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # Front has gone
    except BaseException:
        log.exception("Back ends")
        code = CRASHED
    _end(code)


async def _serve(line: socket.socket, script: Script, life: int, box: BlackBox) -> None:
    await serve(await SocketStream.from_socket(line), script, life, box, _end)


async def serve(
    stream: ByteStream,
    script: Script,
    life: int,
    box: BlackBox,
    end: Callable[[int, BaseException | None], object],
    meet: Callable[[Supervisor], object] = lambda back: None,
) -> None:
    """Play until the line ends or an actor does; then `end` is called with the exit code, and the error if
    that
    is the reason. `meet` is shown the actors when they are there."""

    def report(incident: Incident) -> None:
        """An engine that has lost an actor is of no use, and its device may be poisoned."""
        if incident.error is not None:
            log.error("%s %s", incident.path, incident.what, exc_info=incident.error)
            end(CRASHED, incident.error)

    front = Port("front")
    front.is_open = True
    back = Supervisor("back", strategy="one_for_all", max_restarts=0, report=report)
    store, scheduler = spawn_back(back, script, lambda: life, front, front, lambda adapter: front, box)
    async with back, anyio.create_task_group() as tasks, aclosing(messages(stream, ToBack)) as arriving:
        tasks.start_soon(front.write, stream)
        tasks.start_soon(_pulse, back, front)
        meet(back)
        async for message in arriving:
            match message:
                case Submit() | Cancel() | Recall():
                    scheduler.tell(message)
                case Pin() | Unpin():
                    store.tell(message)
                case Describe():
                    log.warning("Back's actors:\n%s", gauges.dump(gauges.read(back)))
                    faulthandler.dump_traceback()
        end(0, None)  # Front has gone


async def _pulse(back: Supervisor, front: Port) -> None:
    while True:
        actors = tuple(gauges.read(back))
        executor = next(gauge for gauge in actors if gauge.path == "back/executor")
        front.tell(Pulse(executor.state == "busy", executor.handled, actors))
        await anyio.sleep(PULSE_SECONDS)


class _Progress:
    """Tells Front how far loading is, not more often than a person can see."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self._told = 0.0

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._told > PROGRESS_SECONDS or done == total:
            self._told = now
            self._line.sendall(frame(Loading(done, total)))


def _die_with_front() -> None:
    """Have Linux kill this process when its parent ends, even while it cannot read the line."""
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before we asked
            _end(0)


def _end(code: int, why: BaseException | None = None) -> Never:
    """Now: a thread in the middle of a step, or of a compile, is not waited for."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
