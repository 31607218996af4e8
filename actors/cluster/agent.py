"""Runs on an engine's node, without an event loop: starts the engine core's process, forwards its output, and
reports how it ended.

It has a connection to the frontend of its own. When that closes, the frontend is gone or gave up the engine,
and the agent kills the engine.
"""

import os
import signal
import subprocess
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
from personae.actors.spawn import COMMAND
from personae.errors import LineBroken

_CHUNK = 2**16
_OUTPUT_SECONDS = 2.0  # how long to read output after the process has ended


def run_engine(
    call: Dial,
    command: Sequence[str] = COMMAND,
    spawned: Callable[[int], object] = lambda pid: None,
) -> int:
    """Start an engine core's process that connects to the frontend, and wait until it has ended. Returns its
    exit code. `spawned` is called with its process id.

    It ends if the thread that calls this ends. Raises LoadError if the frontend can't be reached.
    """
    control = dial(call, call.contact.control)
    recorder, recorder_file = StepRecorder.create()
    file, threads = write_call(call), call.contact.threads
    try:
        process = subprocess.Popen(  # noqa: S603  our own command
            [*command, "dial", str(file)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(file, recorder_file),
            env={**os.environ, "OMP_NUM_THREADS": str(threads)} if threads else None,
        )
    finally:
        os.close(file)
    spawned(process.pid)
    assert process.stdout is not None
    _send(control, Spawned(process.pid, recorder_file))
    printing = Thread(target=_forward_output, args=(process.stdout, control), daemon=True)
    printing.start()
    Thread(target=_serve_control, args=(control, process, recorder), daemon=True).start()
    code = process.wait()
    printing.join(_OUTPUT_SECONDS)
    _send(control, Ended(code, recorder.read()))
    control.close()
    os.close(recorder_file)
    return code


def _send(control: Line, message: ClusterMessage) -> None:
    with suppress(OSError):  # the frontend has gone: `_serve_control` notices
        control.sendall(frame(message))


def _forward_output(output: IO[bytes], control: Line) -> None:
    with output:
        while data := os.read(output.fileno(), _CHUNK):
            _send(control, Output(data))


def _serve_control(control: Line, process: "subprocess.Popen[bytes]", recorder: StepRecorder) -> None:
    try:
        while True:
            receive_first(control, ToAgent, CONTROL_FRAME)
            _send(control, StepNote(recorder.read()))
    except (
        EOFError,
        OSError,
        LineBroken,
        msgspec.MsgspecError,
    ):  # the frontend has gone, or sent an invalid message
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGKILL)
