"""Runs on an engine's node, without a loop: starts the engine core's process, passes on what it prints, and
says how it ended.

It holds a connection to the frontend of its own. When that ends, whoever wants the engine is gone, and the
engine is killed.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Thread
from typing import IO

import msgspec

from personae.actors.cluster.contact import (
    CONTROL_FRAME,
    ClusterMessage,
    Dial,
    Ended,
    Output,
    Spawned,
    StepNote,
    ToAgent,
)
from personae.actors.cluster.dial import dial, write_call
from personae.actors.enginecore.step_recorder import StepRecorder
from personae.actors.framing import frame, receive_first
from personae.actors.line import Line
from personae.errors import LineBroken

COMMAND = (sys.executable, "-m", "personae.actors.enginecore.core")
_CHUNK = 2**16
_LAST_WORDS_SECONDS = 2.0  # for output that is left in the pipe when the process has ended


def run_engine(
    call: Dial,
    command: Sequence[str] = COMMAND,
    spawned: Callable[[int], object] = lambda pid: None,
) -> int:
    """Start an engine core's process that calls the frontend, and stay until it has ended; returns its exit
    code. `spawned` is called with its process id.

    Its death follows that of the thread that calls this. Raises LoadError if the frontend can't be reached.
    """
    control = dial(call, call.contact.control)
    recorder, box = StepRecorder.create()
    file, threads = write_call(call), call.contact.threads
    try:
        process = subprocess.Popen(  # noqa: S603  our own command
            [*command, "dial", str(file)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(file, box),
            env={**os.environ, "OMP_NUM_THREADS": str(threads)} if threads else None,
        )
    finally:
        os.close(file)
    spawned(process.pid)
    assert process.stdout is not None
    _say(control, Spawned(process.pid, box))
    printing = Thread(target=_pass_on, args=(process.stdout, control), daemon=True)
    printing.start()
    Thread(target=_obey, args=(control, process, recorder), daemon=True).start()
    code = process.wait()
    printing.join(_LAST_WORDS_SECONDS)
    _say(control, Ended(code, recorder.read()))
    control.close()
    os.close(box)
    return code


def _say(control: Line, message: ClusterMessage) -> None:
    with suppress(OSError):  # the frontend has gone: `_obey` sees that
        control.sendall(frame(message))


def _pass_on(output: IO[bytes], control: Line) -> None:
    with output:
        while data := os.read(output.fileno(), _CHUNK):
            _say(control, Output(data))


def _obey(control: Line, process: "subprocess.Popen[bytes]", recorder: StepRecorder) -> None:
    try:
        while True:
            receive_first(control, ToAgent, CONTROL_FRAME)
            _say(control, StepNote(recorder.read()))
    except (EOFError, OSError, LineBroken, msgspec.MsgspecError):  # it has gone, or says what it can't mean
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGKILL)
